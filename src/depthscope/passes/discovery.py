"""Which modules of a model of no known family are its blocks, seen in one pass.

Blocks follow each other in a chain (`chains.py`); the trunk is the chain with the most parameters. Its blocks may be of
several classes, stand in several stages, or be one module that is applied again and again. What is left out is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from depthscope.anatomy import Anatomy, BlockAnatomy, anatomy_of
from depthscope.anatomy.spelling import Stream, spell, stream_of
from depthscope.anatomy.unknown import MOST, NOTE, is_solid, nested, size_of, unknown_anatomy
from depthscope.passes.chains import Chain, Links, Passage
from depthscope.passes.inputs import Batch
from depthscope.passes.lineage import Call, Passed, States, follow
from depthscope.passes.quiet import undisturbed
from depthscope.passes.tokens import count_ways

TOKENS = (2, 3)  # axes of a token matrix: (n, d), or with a batch
MAPS = (4,)  # of a map of features, which has no one axis of tokens
HOW = "name the blocks with blocks='path.to.layers.*'"


def find_anatomy(model: nn.Module, batch: Batch | None, blocks: str | None = None) -> Anatomy:
    """The anatomy of a model. If it is of no known family, and there is a batch, one pass tells what its blocks are."""
    try:
        known = anatomy_of(model, blocks)
    except ValueError:
        if batch is None or blocks is not None:
            raise
        known = None
    if known is not None and (batch is None or known.family != "unknown"):
        return known
    assert batch is not None
    with undisturbed(model):
        calls, states = follow(model, batch)
    if known is not None and blocks is not None:
        return _checked(model, blocks, known, calls, states)
    return _found(model, known, calls, states)


# --- the user has named nothing ---------------------------------------------------------------------


def _found(model: nn.Module, listed: Anatomy | None, calls: list[Call], states: States) -> Anatomy:
    chains = _all_chains(model, calls, states)
    if not chains:
        raise ValueError(_why_none(model, listed, calls, states))
    trunk = _inside_stages(max(chains, key=_rank), chains)
    streams = _streams(trunk)
    anatomy = unknown_anatomy([(p.call.name, p.call.module, streams[p.call.name]) for p in trunk], NOTE)
    listed_too = listed is not None and [b.module for b in listed.blocks] == [b.module for b in anatomy.blocks]
    needs_no_word = listed_too and all(stream == Stream() for stream in streams.values())
    return replace(
        anatomy,
        spelled=None if needs_no_word else spell(model, anatomy.blocks),
        left_out=tuple(_left_out(model, trunk, chains, calls)),
        applications=len(trunk),
        between=_between(trunk),
    )


def _between(chain: Chain) -> tuple[int, ...]:
    pairs = enumerate(zip(chain, chain[1:], strict=False), start=2)
    return tuple(number for number, (before, after) in pairs if after.entrance.state != before.state)


def _all_chains(model: nn.Module, calls: list[Call], states: States) -> list[Chain]:
    """The chains of modules that could be blocks; if there are none, of all that have parameters, or of all."""
    links = Links(calls, states, TOKENS)
    for could_be in (is_solid, _has_parameters, lambda _module: True):
        chosen = [call for call in links.calls if call.around is not None and could_be(call.module)]
        found: dict[tuple[object, ...], Chain] = {}
        for group in _groups(chosen):
            beside = [call for call in chosen if call.depth == group[0].depth]
            for chain in links.all_chains(group):
                whole = links.filled(chain, beside if could_be is is_solid else [], _akin(model))
                found.setdefault(tuple((p.call, p.entrance.path) for p in whole), whole)
        if could_be is not is_solid:
            found = {key: chain for key, chain in found.items() if _share(model, chain, calls) >= MOST}
        if found:
            return list(found.values())
    return []


def _share(model: nn.Module, chain: Chain, calls: list[Call]) -> float:
    """How much of the model's parameters, embeddings aside, are in a chain and in what stands beside its modules."""
    first, last = chain[0].call, chain[-1].call
    beside = [call.module for call in calls if call.depth == first.depth and first.begun <= call.begun <= last.begun]
    tables = size_of([module for module in model.modules() if isinstance(module, nn.Embedding)])
    return size_of(beside) / max(1, size_of([model]) - tables)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _groups(calls: Sequence[Call]) -> Iterator[list[Call]]:
    """The calls of modules of one class that stand equally deep, at least two of them."""
    groups: dict[tuple[int, type], list[Call]] = {}
    for call in calls:
        groups.setdefault((call.depth, type(call.module)), []).append(call)
    return (group for group in groups.values() if len(group) > 1)


def _akin(model: nn.Module) -> Callable[[Call, Chain], bool]:
    """Whether a call at the end of a chain belongs to it: its class does, or it stands in the same ModuleList."""

    def akin(call: Call, chain: Chain) -> bool:
        around = _list_around(model, call.name)
        return any(
            type(p.call.module) is type(call.module) or (around and around == _list_around(model, p.call.name))
            for p in chain
        )

    return akin


def _list_around(model: nn.Module, name: str) -> str:
    around = name.rpartition(".")[0]
    return around if isinstance(model.get_submodule(around), nn.ModuleList) else ""


def _rank(chain: Chain) -> tuple[int, int, int, int]:
    """The most parameters, the outermost modules, tokens with a batch, the most calls."""
    modules = [passage.call.module for passage in chain]
    return size_of(modules), -chain[0].call.depth, len(chain[0].entrance.shape), len(chain)


def _inside_stages(trunk: Chain, chains: list[Chain]) -> Chain:
    """Where every module of a chain has several blocks that are alike, and little else, these are the blocks."""
    stages = {passage.call: [] for passage in trunk}  # type: dict[Call, list[nn.Module]]
    for chain in chains:
        inside = {call: [p.call.module for p in chain if _is_inside(p.call, call)] for call in stages}
        modules = [module for found in inside.values() for module in found]
        if len(modules) == len(chain) and all(len(found) > 1 and _are_alike(found) for found in inside.values()):
            if size_of(modules) >= MOST * size_of([call.module for call in stages]):
                return _inside_stages(chain, chains)
    return trunk


def _is_inside(call: Call | None, stage: Call) -> bool:
    while call is not None and call.depth > stage.depth:
        call = call.around
        if call is stage:
            return True
    return False


def _are_alike(modules: Sequence[nn.Module]) -> bool:
    made = {(type(m), tuple((name, p.shape) for name, p in m.named_parameters())) for m in modules}
    return len(made) == 1


def _streams(trunk: Chain) -> dict[str, Stream]:
    """By the name of each module, where its tokens enter and leave. Nothing need be said where there is one way only."""
    streams: dict[str, Stream] = {}
    for passage in trunk:
        stream = Stream() if _is_only_way(passage) else passage.stream
        if streams.setdefault(passage.call.name, stream) != stream:
            raise ValueError(
                f"the tokens enter {passage.call.name!r}, or leave it, at different places in different calls "
                f"({streams[passage.call.name].spelled}, {stream.spelled}): {HOW}, with what is called in one way"
            )
    return streams


def _is_only_way(passage: Passage) -> bool:
    """Whether `first_tokens` finds these tokens on both sides, and nothing else could be meant."""
    call = passage.call
    ways = count_ways(_shapes(call.entered), _shapes(call.left))
    firsts = (_first(call.entered), _first(call.left))
    return not passage.added and ways == 1 and firsts == (passage.entrance, passage.exit)


def _shapes(passed: Sequence[Passed]) -> list[torch.Size]:
    """A tensor that is there twice counts once."""
    once = {p.path if p.state is None else p.state: p.shape for p in passed}
    return list(once.values())


def _first(passed: Sequence[Passed]) -> Passed | None:
    return next((p for axes in (3, 2) for p in passed if len(p.shape) == axes), None)


# --- what is said -----------------------------------------------------------------------------------


def _left_out(model: nn.Module, trunk: Chain, chains: list[Chain], calls: list[Call]) -> Iterator[str]:
    """What looks like blocks and is not measured."""
    own = {passage.call for passage in trunk}
    names = {passage.call.name for passage in trunk}
    if (share := _share(model, trunk, calls)) < MOST:
        yield f"these blocks hold {share:.0%} of the model's parameters (embeddings aside)"
    for chain in chains:
        others = {passage.call.name for passage in chain}
        if chain is not trunk and others <= names and {p.call for p in chain} <= own:
            blocks = unknown_anatomy([(p.call.name, p.call.module, p.stream) for p in chain], "").blocks
            yield f"another stream of tokens passes these blocks and is left out: blocks={spell(model, blocks)!r} names it"
        elif not any(nested(a, b) or nested(b, a) for a in others for b in names):
            yield f"other blocks that follow each other are left out: {_span(chain)}"
    again = sum(
        call.module is passage.call.module for call in calls for passage in {p.call.module: p for p in trunk}.values()
    )
    if again > len(trunk):
        yield f"these blocks also run outside their chain: {again - len(trunk)} of {again} runs begin or end elsewhere"
    lists = {_list_around(model, name) for name in names} - {""}
    beside = [f"{around}.{key}" for around in sorted(lists) for key in model.get_submodule(around)._modules]
    if missing := [name for name in beside if not any(nested(name, b) or nested(b, name) for b in names)]:
        yield f"modules beside the blocks that are not part of their chain are left out: {', '.join(missing)}"


def _span(chain: Chain) -> str:
    return f"{chain[0].call.name} to {chain[-1].call.name}"


def _why_none(model: nn.Module, listed: Anatomy | None, calls: list[Call], states: States) -> str:
    """One line that says why no blocks were found."""
    if maps := [c for group in _groups(_solid(calls)) for c in Links(calls, states, MAPS).all_chains(group)]:
        shape = tuple(maps[0][0].entrance.shape)
        return f"{_span(maps[0])} pass maps of features {shape} on to each other, and no tokens (batch, n, d)"
    if listed is None:
        return f"no blocks in {type(model).__name__}: no modules of one class pass tokens on to each other; {HOW}"
    return _why_not(listed.blocks, calls) or (
        f"what {listed.blocks[0].name!r} returns does not enter {listed.blocks[1].name!r}, or not without what is "
        f"older than it: these are no blocks that follow each other; {HOW}"
    )


def _solid(calls: list[Call]) -> list[Call]:
    return [call for call in calls if is_solid(call.module)]


def _why_not(blocks: Sequence[BlockAnatomy], calls: list[Call]) -> str | None:
    """Why these cannot be blocks: they are not called, or return another shape than they were given."""
    own = {id(block.module) for block in blocks}
    mine = [call for call in calls if id(call.module) in own]
    if not mine:
        around = f"{blocks[0].name}."
        parts = [c.name for c in calls if c.name.startswith(around) and "." not in c.name.removeprefix(around)]
        globs = {f"{blocks[0].name.rpartition('.')[0]}.*.{name.removeprefix(around)}" for name in parts}
        instead = f"; modules that are called: blocks={' or '.join(map(repr, sorted(globs)))}" if parts else f"; {HOW}"
        return f"none of the blocks {[block.name for block in blocks][:4]} ran{instead}"
    for call in mine:
        entered = [tuple(p.shape) for p in call.entered if len(p.shape) in TOKENS]
        left = [tuple(p.shape) for p in call.left if len(p.shape) in TOKENS]
        if not set(entered) & set(left):
            return (
                f"{call.name!r} is given {', '.join(map(str, entered)) or 'no tokens'} and returns "
                f"{', '.join(map(str, left)) or 'none'}: a block returns tokens of the shape that it was given; {HOW}"
            )
    return None


# --- the user has named the blocks --------------------------------------------------------------------


def _checked(model: nn.Module, pattern: str, named: Anatomy, calls: list[Call], states: States) -> Anatomy:
    """The blocks that the user has named, with the way of the tokens through them, and what is to be said of them."""
    if why := _why_not(named.blocks, calls):
        raise ValueError(why)
    own = {id(block.module) for block in named.blocks}
    mine = [call for call in calls if id(call.module) in own]
    links = Links(mine, states, TOKENS)
    chains = links.all_chains(mine)
    streams: dict[str, Stream] = {}
    for block in named.blocks:
        told = stream_of(block)
        streams[block.name] = told if told != Stream() else _stream_in(block, chains, links)
    anatomy = unknown_anatomy([(b.name, b.module, streams[b.name]) for b in named.blocks], named.notes[0])
    linked = {(a.call, b.call) for chain in chains for a, b in zip(chain, chain[1:], strict=False)}
    broken = [f"{a.name} and {b.name}" for a, b in zip(mine, mine[1:], strict=False) if (a, b) not in linked]
    idle = [block.name for block in named.blocks if not any(call.module is block.module for call in mine)]
    left_out = [
        *(f"what one block returns does not enter the next, or not alone: {pair}" for pair in broken[:3]),
        *([f"blocks that were not called: {', '.join(idle)}"] if idle else []),
    ]
    said = all(stream == stream_of(block) for block, stream in zip(named.blocks, streams.values(), strict=True))
    return replace(
        anatomy,
        spelled=pattern if said else spell(model, anatomy.blocks),
        left_out=tuple(left_out),
        applications=len(mine),
    )


def _stream_in(block: BlockAnatomy, chains: list[Chain], links: Links) -> Stream:
    for chain in chains:
        for passage in chain:
            if passage.call.module is block.module:
                return _streams((passage,))[passage.call.name]
    ways = {p.stream for call in links.calls if call.module is block.module for p in links.passages[id(call)]}
    plain = [way for way in ways if not way.added]
    if len(plain) > 1:
        said = ", ".join(f"{block.name}{way.spelled}" for way in sorted(plain, key=str))
        raise ValueError(
            f"several tensors could be the tokens of {block.name!r}: say which with blocks=, one of {said}"
        )
    return Stream() if len(ways) < 2 else next(way for way in ways if way.added)
