"""Which modules of a model of no known family are its blocks, seen in one pass.

Blocks follow each other in a chain (`chains.py`); the trunk is the chain with the most parameters. Its blocks may be of
several classes, stand in several stages, or be one module that is applied again and again. What is left out is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy, BlockAnatomy, anatomy_of
from depthscope.anatomy.unknown import MOST, NOTE, Ends, ends_of, has_parts, is_solid, size_of, spell, unknown_anatomy
from depthscope.discovery.chains import Chain, Links, Passage
from depthscope.discovery.omissions import HOW, left_out, share_of, why_none, why_not
from depthscope.discovery.tracing import Call, Passed, States, follow
from depthscope.hooks.tokens import count_ways
from depthscope.inputs.batches import Batch
from depthscope.safety import undisturbed

TOKENS = (2, 3)  # axes of a token matrix: (n, d), or with a batch
MAPS = (4,)  # of a map of features: (batch, height, width, d) is read as tokens
OUTSIDE = "the residual additions stand outside the modules that are counted as blocks here: the sums are measured"


def find_anatomy(model: nn.Module, batch: Batch | None, blocks: str | None = None) -> Anatomy:
    """The anatomy of a model. If it is of no known family, and there is a batch, one pass tells what its blocks are."""
    known, unlisted = None, ""
    try:
        known = anatomy_of(model, blocks)
    except ValueError as error:
        if batch is None or blocks is not None:
            raise
        unlisted = str(error)
    if known is not None and (batch is None or known.family != "unknown"):
        return known
    assert batch is not None
    with undisturbed(model):
        calls, states = follow(model, batch)
    if known is not None and blocks is not None:
        return _checked(model, blocks, known, calls, states, batch)
    chains = _all_chains(model, calls, states)
    if not chains:
        raise ValueError(unlisted if known is None else why_none(known, calls))
    return _found(model, known, chains, calls, batch)


# --- the user has named nothing ---------------------------------------------------------------------


def _found(model: nn.Module, listed: Anatomy | None, chains: list[Chain], calls: list[Call], batch: Batch) -> Anatomy:
    trunk = _inside_stages(max(chains, key=_rank), chains)
    streams = _are_streams(trunk, batch)
    if not streams:
        _refuse_maps(trunk, batch)
    all_ends = _all_ends(trunk)
    anatomy = unknown_anatomy([(p.call.name, p.call.module, all_ends[p.call.name]) for p in trunk], NOTE)
    anatomy = replace(anatomy, notes=(*anatomy.notes, *_folded(trunk, batch)))
    listed_too = listed is not None and [b.module for b in listed.blocks] == [b.module for b in anatomy.blocks]
    needs_no_word = listed_too and set(all_ends.values()) == {Ends()}
    if any(passage.added for passage in trunk):
        anatomy = replace(anatomy, notes=(*anatomy.notes, OUTSIDE))
    return replace(
        anatomy,
        spelled=None if needs_no_word else spell(model, anatomy.blocks),
        left_out=tuple(left_out(model, trunk, sorted(chains, key=_rank, reverse=True), calls)),
        applications=len(trunk),
        streams=streams,
        between=_between(trunk),
    )


def _are_streams(passages: Sequence[Passage], batch: Batch) -> bool:
    """Whether tokens are (batch, n, streams, d) where ids are (batch, n): hyper-connections, and no maps."""
    ids = _shapes_of_ids(batch)
    shapes = {tuple(passage.entrance.shape) for passage in passages}
    return bool(shapes) and all(len(shape) in MAPS and shape[:2] in ids for shape in shapes)


def _folded(passages: Sequence[Passage], batch: Batch) -> tuple[str, ...]:
    """A note where blocks have several times the sequences of the ids: streams that stand in the batch."""
    ids, shapes = _shapes_of_ids(batch), {tuple(passage.entrance.shape) for passage in passages}
    if len(ids) != 1 or len(shapes) != 1 or len(shape := shapes.pop()) != 3:
        return ()
    sequences, n = ids.pop()
    times = shape[0] // sequences
    if shape[1] != n or times < 2 or shape[0] != times * sequences:
        return ()
    return (
        f"the blocks have {shape[0]} sequences for {sequences} of ids: {times} streams (hyper-connections) that stand "
        "in the batch are each measured as a sequence",
    )


def _shapes_of_ids(batch: Batch) -> set[tuple[int, ...]]:
    given = [value for value in (*batch.args, *batch.kwargs.values()) if isinstance(value, Tensor)]
    return {tuple(value.shape) for value in given if value.ndim == 2 and not value.is_floating_point()}


def _refuse_maps(passages: Sequence[Passage], batch: Batch) -> None:
    """Refuses maps of features, unless their last axis is the width of a token: norms in the blocks say so, and none
    says that it is the second."""
    ids = _shapes_of_ids(batch)
    turned = [passage for passage in passages if _is_turned(passage, ids)]
    if turned and len(turned) == len(passages):
        raise ValueError(
            f"expected tokens (batch, n, d) in {turned[0].call.name!r}, got {tuple(turned[0].entrance.shape)}, of "
            f"which the second axis is as wide as the weights of the block; {HOW}"
        )
    maps = [passage for passage in passages if len(passage.entrance.shape) in MAPS]
    widths = [({w.numel() for w in p.call.module.parameters() if w.ndim == 1}, p.entrance.shape) for p in maps]
    last = [shape[-1] in known and shape[1] not in known for known, shape in widths]
    second = [shape[1] in known and shape[-1] not in known for known, shape in widths]
    if maps and (any(second) or not any(last)):
        raise ValueError(
            f"expected tokens (batch, n, d) or (batch, height, width, d) in {maps[0].call.name!r}, got a map of "
            f"features {tuple(maps[0].entrance.shape)}; {HOW}"
        )


def _is_turned(passage: Passage, ids: set[tuple[int, ...]]) -> bool:
    """Whether tokens seem to be (batch, d, n): ids (batch, n) say so; or some weights are as wide as the second axis,
    and none as the third."""
    shape = tuple(passage.entrance.shape)
    if len(shape) == 3 and (shape[0], shape[2]) in ids and shape[:2] not in ids and shape[1::-1] not in ids:
        return True
    widths = {size for weight in passage.call.module.parameters() for size in weight.shape}
    return len(shape) == 3 and shape[1] in widths and shape[2] not in widths


def _between(chain: Chain) -> tuple[int, ...]:
    pairs = enumerate(pairwise(chain), start=2)
    return tuple(number for number, (before, after) in pairs if after.entrance.state != before.state)


def _all_chains(model: nn.Module, calls: list[Call], states: States) -> list[Chain]:
    """The chains of modules that could be blocks; if there are none, of all that have parameters, or of all."""
    links = Links(calls, states, TOKENS + MAPS, calls[0].left)
    for could_be in (is_solid, _has_parameters, lambda _module: True):
        chosen = [call for call in links.calls if call.around is not None and could_be(call.module)]
        found: dict[tuple[object, ...], Chain] = {}
        for group in _groups(chosen):
            known = {passage.call for chain in found.values() for passage in chain}
            if all(known & set(call.all_around()) and not has_parts(call.module) for call in group):
                continue  # parts of blocks
            for chain in links.all_chains(group):
                beside = _beside(model, group, chosen) if could_be is is_solid else []
                whole = links.filled(chain, beside, _akin(model))
                found.setdefault(tuple((p.call, p.entrance.path) for p in whole), whole)
        if could_be is not is_solid:
            found = {key: chain for key, chain in found.items() if _is_whole(model, chain, calls)}
        if found:
            return list(found.values())
    return []


def _is_whole(model: nn.Module, chain: Chain, calls: list[Call]) -> bool:
    """Whether a chain of plain layers is what a model is made of, and no part of its blocks."""
    return len({passage.call.around for passage in chain}) == 1 and share_of(model, chain, calls) >= MOST


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _groups(calls: Sequence[Call]) -> Iterator[list[Call]]:
    """The calls of modules of one class that stand equally deep, at least two of them; the outermost first."""
    groups: dict[tuple[int, type], list[Call]] = {}
    for call in calls:
        groups.setdefault((call.depth, type(call.module)), []).append(call)
    return (groups[key] for key in sorted(groups, key=lambda key: key[0]) if len(groups[key]) > 1)


def _beside(model: nn.Module, group: list[Call], calls: list[Call]) -> list[Call]:
    """The calls that may stand in one chain with a class of blocks: of modules in the same list, or of classes that are
    called about as often. A module that is called now and then stands between the blocks."""
    lists = {_list_around(model, call.name) for call in group} - {""}
    equally_deep = [call for call in calls if call.depth == group[0].depth]
    often = Counter(type(call.module) for call in equally_deep)
    return [
        call
        for call in equally_deep
        if len(group) <= 2 * often[type(call.module)] <= 4 * len(group) or _list_around(model, call.name) in lists
    ]


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


def _rank(chain: Chain) -> tuple[int, int, bool, int]:
    """The most parameters, the outermost modules, tokens with a batch, the most calls."""
    modules = [passage.call.module for passage in chain]
    return size_of(modules), -chain[0].call.depth, len(chain[0].entrance.shape) > 2, len(chain)


def _inside_stages(trunk: Chain, chains: list[Chain]) -> Chain:
    """Where every module of a chain has several blocks that are alike, and little else, these are the blocks."""
    stages = [passage.call for passage in trunk]
    for chain in chains:
        inside = {call: [p.call.module for p in chain if call in p.call.all_around()] for call in stages}
        modules = [module for found in inside.values() for module in found]
        several = all(len(found) > 1 and _are_alike(found) for found in inside.values())
        several &= not any(passage.added for passage in chain)  # branches of a block
        if several and len(modules) == len(chain) and size_of(modules) >= MOST * size_of([c.module for c in stages]):
            return _inside_stages(chain, chains)
    return trunk


def _are_alike(modules: Sequence[nn.Module]) -> bool:
    made = {(type(m), tuple((name, p.shape) for name, p in m.named_parameters())) for m in modules}
    return len(made) == 1


def _all_ends(trunk: Chain) -> dict[str, Ends]:
    """By the name of each module, where its tokens enter and leave; nothing is said if there is one way everywhere."""
    found: dict[str, Ends] = {}
    plain = all(_is_only_way(passage) for passage in trunk)
    for passage in trunk:
        ends = Ends() if plain else passage.ends
        if found.setdefault(passage.call.name, ends) != ends:
            raise ValueError(
                f"the tokens enter {passage.call.name!r}, or leave it, at different places in different calls "
                f"({found[passage.call.name].spelled}, {ends.spelled}): {HOW}, with what is called in one way"
            )
    return found


def _is_only_way(passage: Passage) -> bool:
    """Whether `first_tokens` finds these tokens on both sides, and nothing else could be meant."""
    call = passage.call
    ways = count_ways(_shapes(call.entered), _shapes(call.left))
    firsts = (_first(call.entered), _first(call.left))
    return (
        not passage.added and ways == 1 and len(passage.exit.shape) < 4 and firsts == (passage.entrance, passage.exit)
    )


def _shapes(passed: Sequence[Passed]) -> list[torch.Size]:
    """A tensor that is there twice counts once."""
    once = {p.path if p.state is None else p.state: p.shape for p in passed}
    return list(once.values())


def _first(passed: Sequence[Passed]) -> Passed | None:
    return next((p for axes in (3, 2) for p in passed if len(p.shape) == axes), None)


# --- the user has named the blocks --------------------------------------------------------------------


def _checked(
    model: nn.Module, pattern: str, named: Anatomy, calls: list[Call], states: States, batch: Batch
) -> Anatomy:
    """The blocks that the user has named, with the way of the tokens through them, and what is to be said of them."""
    if why := why_not(named.blocks, calls):
        raise ValueError(why)
    own = {id(block.module) for block in named.blocks}
    mine = [call for call in calls if id(call.module) in own]
    links = Links(mine, states, TOKENS + MAPS, calls[0].left)
    chains = links.all_chains(mine)
    passages = [passage for call in mine for passage in links.passages[id(call)]]
    streams = _are_streams(passages, batch)
    if not streams and all(ends_of(block) == Ends() for block in named.blocks):
        _refuse_maps(passages, batch)
    all_ends: dict[str, Ends] = {}
    for block in named.blocks:
        hints = ends_of(block)
        all_ends[block.name] = hints if hints != Ends() else _ends_in(block, chains, links)
    anatomy = unknown_anatomy([(b.name, b.module, all_ends[b.name]) for b in named.blocks], named.notes[0])
    anatomy = replace(anatomy, notes=(*anatomy.notes, *_folded(passages, batch)))
    linked = {(a.call, b.call) for chain in chains for a, b in pairwise(chain)}
    broken = [f"{a.name} and {b.name}" for a, b in pairwise(mine) if (a, b) not in linked]
    idle = [block.name for block in named.blocks if not any(call.module is block.module for call in mine)]
    said = [
        *(f"what one block returns does not enter the next, or not alone: {pair}" for pair in broken[:3]),
        *([f"blocks that were not called: {', '.join(idle)}"] if idle else []),
    ]
    as_said = all(all_ends[block.name] == ends_of(block) for block in named.blocks)
    return replace(
        anatomy,
        spelled=pattern if as_said else spell(model, anatomy.blocks),
        left_out=tuple(said),
        applications=len(mine),
        streams=streams,
    )


def _ends_in(block: BlockAnatomy, chains: list[Chain], links: Links) -> Ends:
    for chain in chains:
        for passage in chain:
            if passage.call.module is block.module:
                return _all_ends(chain)[passage.call.name]
    ways = {p.ends for call in links.calls if call.module is block.module for p in links.passages[id(call)]}
    plain = [way for way in ways if not way.added]
    if len(plain) > 1:
        said = ", ".join(f"{block.name}{way.spelled}" for way in sorted(plain, key=str))
        raise ValueError(
            f"several tensors could be the tokens of {block.name!r}: say which with blocks=, one of {said}"
        )
    return Ends() if len(ways) < 2 else next(way for way in ways if way.added)


def depth_of(model: nn.Module, anatomy: Anatomy) -> int:
    """How many blocks run in a pass: more than there are block modules if these share their weights."""
    if anatomy.applications is not None:
        return anatomy.applications
    return max(len(anatomy.blocks), getattr(getattr(model, "config", None), "num_hidden_layers", 0) or 0)
