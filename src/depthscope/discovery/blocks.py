"""Which modules of a model of no known family are its blocks, seen in one pass.

Blocks follow each other in a chain (`chains.py`); the trunk is the chain with the most parameters. Its blocks may be of
several classes, stand in several stages, or be one module that is applied again and again. What is left out is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from depthscope.anatomy import Anatomy, BlockAnatomy, anatomy_of
from depthscope.anatomy.unknown import (
    MOST,
    NOTE,
    Ends,
    ends_of,
    has_parts,
    is_solid,
    nested,
    size_of,
    spell,
    unknown_anatomy,
)
from depthscope.discovery.chains import Chain, Links, Passage
from depthscope.discovery.tracing import Call, States, follow
from depthscope.hooks.tokens import count_ways
from depthscope.inputs.batches import Batch
from depthscope.safety import undisturbed

HOW = "name the blocks with blocks='path.to.layers.*'"
OUTSIDE = "the residual additions stand outside the modules that are counted as blocks here: the sums are measured"


def find_anatomy(model: nn.Module, batch: Batch | None, blocks: str | None = None) -> Anatomy:
    """The anatomy of a model. If it is of no known family, and there is a batch, one pass tells what its blocks are."""
    listed, none_listed = None, ""
    try:
        listed = anatomy_of(model, blocks)
    except ValueError as error:
        if batch is None or blocks is not None:
            raise
        none_listed = str(error)
    if listed is not None and (batch is None or listed.family != "unknown"):
        return listed
    assert batch is not None
    with undisturbed(model):
        calls, states = follow(model, batch)
    if listed is not None and blocks is not None:
        return _named(model, blocks, listed, calls, states, batch)
    chains = sorted(_all_chains(model, calls, states), key=_rank, reverse=True)
    if listed is not None and not (chains and _share_of_one(listed, chains[0]) >= MOST):
        mine = [call for call in calls if any(call.module is block.module for block in listed.blocks)]
        chains = Links(mine, states, calls[0].left, injected=True).all_chains(mine)
        chains = [chain for chain in chains if len(chain) == len(mine) > 2]
    if not chains:
        if listed is None:
            raise ValueError(none_listed)
        first, second = listed.blocks[:2]
        raise ValueError(
            why_not(listed.blocks, calls)
            or f"what {first.name!r} returns does not enter {second.name!r}, or not without what is older than it: "
            f"these blocks are not sequential; {HOW}"
        )
    return _found(model, listed, chains, calls, batch)


def depth_of(model: nn.Module, anatomy: Anatomy) -> int:
    """How many blocks run in a pass: more than there are block modules if these share their weights."""
    if anatomy.applications is not None:
        return anatomy.applications
    return max(len(anatomy.blocks), getattr(getattr(model, "config", None), "num_hidden_layers", 0) or 0)


# --- the user has named nothing ---------------------------------------------------------------------


def _found(model: nn.Module, listed: Anatomy | None, chains: list[Chain], calls: list[Call], batch: Batch) -> Anatomy:
    trunk = _inside_stages(chains[0], chains)
    streams = _streams(trunk, batch)
    all_ends = _all_ends(trunk)
    anatomy = unknown_anatomy([(p.call.name, p.call.module, all_ends[p.call.name]) for p in trunk], NOTE)
    listed_too = listed is not None and [b.module for b in listed.blocks] == [b.module for b in anatomy.blocks]
    needs_no_word = listed_too and set(all_ends.values()) == {Ends()}
    pairs = enumerate(pairwise(trunk), start=2)
    return replace(
        anatomy,
        notes=(*anatomy.notes, *([OUTSIDE] if any(passage.added for passage in trunk) else [])),
        spelled=None if needs_no_word else spell(model, anatomy.blocks),
        left_out=tuple(_left_out(model, trunk, chains, calls)),
        applications=len(trunk),
        **streams,
        between=tuple(number for number, (before, after) in pairs if after.entrance.state != before.state),
    )


def _all_chains(model: nn.Module, calls: list[Call], states: States) -> list[Chain]:
    """The chains of modules that could be blocks; if there are none, of all that have parameters, or of all."""
    links = Links(calls, states, calls[0].left)

    def list_of(call: Call) -> str:
        around = call.name.rpartition(".")[0]
        return around if isinstance(model.get_submodule(around), nn.ModuleList) else ""

    for could_be in (is_solid, lambda module: next(module.parameters(), None) is not None, lambda _module: True):
        chosen = [call for call in links.calls if call.all_around and could_be(call.module)]
        groups: dict[tuple[int, type], list[Call]] = {}  # of modules of one class that stand equally deep
        for call in chosen:
            groups.setdefault((call.depth, type(call.module)), []).append(call)
        found: dict[tuple[object, ...], Chain] = {}
        for key in sorted(groups, key=lambda key: key[0]):  # the outermost first
            group, known = groups[key], {passage.call for chain in found.values() for passage in chain}
            if len(group) < 2 or all(known & set(call.all_around) and not has_parts(call.module) for call in group):
                continue  # parts of blocks
            for chain in links.all_chains(group):
                beside = _beside(group, chosen, list_of) if could_be is is_solid else []
                whole = links.filled(chain, beside, list_of)
                # A chain of plain layers must be what the model is made of, and no part of its blocks.
                alone = len({passage.call.all_around[0] for passage in whole}) == 1
                if could_be is is_solid or (alone and _share_of(model, whole, calls) >= MOST):
                    found.setdefault(tuple((p.call, p.entrance.path) for p in whole), whole)
        if found:
            return list(found.values())
    return []


def _beside(group: list[Call], calls: list[Call], list_of: Callable[[Call], str]) -> list[Call]:
    """The calls that may stand in one chain with a class of blocks: of modules in the same list, or of classes that are
    called about as often. A module that is called now and then stands between the blocks."""
    lists = {list_of(call) for call in group} - {""}
    equally_deep = [call for call in calls if call.depth == group[0].depth]
    often = Counter(type(call.module) for call in equally_deep)
    return [
        call
        for call in equally_deep
        if len(group) <= 2 * often[type(call.module)] <= 4 * len(group) or list_of(call) in lists
    ]


def _rank(chain: Chain) -> tuple[int, int, bool, int]:
    """The most parameters, the outermost modules, tokens with a batch, the most calls."""
    modules = [passage.call.module for passage in chain]
    return size_of(modules), -chain[0].call.depth, len(chain[0].entrance.shape) > 2, len(chain)


def _inside_stages(trunk: Chain, chains: list[Chain]) -> Chain:
    """Where every module of a chain has several blocks that are alike, and little else, these are the blocks."""
    stages = [passage.call for passage in trunk]
    for chain in chains:
        inside = [[p.call.module for p in chain if stage in p.call.all_around] for stage in stages]
        modules = [module for found in inside for module in found]
        several = all(len(found) > 1 and _are_alike(found) for found in inside)
        several &= not any(passage.added for passage in chain)  # branches of a block
        if several and len(modules) == len(chain) and size_of(modules) >= MOST * size_of([c.module for c in stages]):
            return _inside_stages(chain, chains)
    return trunk


def _are_alike(modules: Sequence[nn.Module]) -> bool:
    return len({(type(m), tuple((name, p.shape) for name, p in m.named_parameters())) for m in modules}) == 1


def _left_out(model: nn.Module, trunk: Chain, chains: list[Chain], calls: list[Call]) -> Iterator[str]:
    """What looks like blocks and is not among them."""
    own = {passage.call for passage in trunk}
    names = {passage.call.name for passage in trunk}
    if (share := _share_of(model, trunk, calls)) < MOST:
        yield f"these blocks hold {share:.0%} of the model's parameters (embeddings aside)"
    for chain in chains:
        others = {passage.call.name for passage in chain}
        if chain is not trunk and {p.call for p in chain} <= own and 2 * len(chain) > len(trunk):
            blocks = unknown_anatomy([(p.call.name, p.call.module, p.ends) for p in chain], "").blocks
            said = spell(model, blocks)
            yield f"another stream of tokens passes these blocks and is left out: blocks={said!r} names it"
        elif not any(nested(a, b) or nested(b, a) for a in others for b in names):
            names |= others
            yield f"other blocks that follow each other are left out: {chain[0].call.name} to {chain[-1].call.name}"
    modules = {passage.call.module for passage in trunk}
    runs = sum(call.module in modules for call in calls)
    if runs > len(trunk):
        yield f"these blocks also run outside their chain: {runs - len(trunk)} of {runs} runs do not follow the others"


def _share_of_one(listed: Anatomy, chain: Chain) -> float:
    """How much of the one block by its looks that a chain stands in is in the chain; 1 if it is in none, or several."""
    around = {b.name: b.module for b in listed.blocks for p in chain if p.call.name.startswith(f"{b.name}.")}
    inside = all(p.call.name.startswith(tuple(f"{name}." for name in around)) for p in chain)
    return size_of([p.call.module for p in chain]) / size_of([*around.values()]) if inside and len(around) == 1 else 1


def _share_of(model: nn.Module, chain: Chain, calls: list[Call]) -> float:
    """How much of the model's parameters, embeddings aside, are in a chain and in what stands beside its modules."""
    first, last = chain[0].call, chain[-1].call
    beside = [call.module for call in calls if call.depth == first.depth and first.number <= call.number <= last.number]
    tables = size_of([module for module in model.modules() if isinstance(module, nn.Embedding)])
    return size_of(beside) / max(1, size_of([model]) - tables)


# --- the user has named the blocks --------------------------------------------------------------------


def _named(model: nn.Module, pattern: str, named: Anatomy, calls: list[Call], states: States, batch: Batch) -> Anatomy:
    """The blocks that the user has named, with the way of the tokens through them, and what is to be said of them."""
    if why := why_not(named.blocks, calls):
        raise ValueError(why)
    modules = {block.module for block in named.blocks}
    mine = [call for call in calls if call.module in modules]
    links = Links(mine, states, calls[0].left)
    chains = links.all_chains(mine)
    passages = [passage for call in mine for passage in links.passages[id(call)]]
    said = any(ends_of(block) != Ends() for block in named.blocks)
    streams = _streams(passages, batch, may_be_maps=said)
    all_ends = {
        block.name: own if (own := ends_of(block)) != Ends() else _ends_in(block, chains, passages)
        for block in named.blocks
    }
    anatomy = unknown_anatomy([(b.name, b.module, all_ends[b.name]) for b in named.blocks], named.notes[0])
    linked = {(a.call, b.call) for chain in chains for a, b in pairwise(chain)}
    broken = [f"{a.name} and {b.name}" for a, b in pairwise(mine) if (a, b) not in linked]
    idle = [block.name for block in named.blocks if not any(call.module is block.module for call in mine)]
    as_said = all(all_ends[block.name] == ends_of(block) for block in named.blocks)
    return replace(
        anatomy,
        spelled=pattern if as_said else spell(model, anatomy.blocks),
        left_out=(
            *(f"what one block returns does not enter the next, or not alone: {pair}" for pair in broken[:3]),
            *([f"blocks that were not called: {', '.join(idle)}"] if idle else []),
        ),
        applications=len(mine),
        **streams,
    )


def _ends_in(block: BlockAnatomy, chains: list[Chain], passages: list[Passage]) -> Ends:
    for chain in chains:
        if any(passage.call.module is block.module for passage in chain):
            return _all_ends(chain)[block.name]
    ways = {passage.ends for passage in passages if passage.call.module is block.module}
    if len(plain := [way for way in ways if not way.added]) > 1:
        said = ", ".join(f"{block.name}{way.spelled}" for way in sorted(plain, key=str))
        raise ValueError(
            f"several tensors could be the tokens of {block.name!r}: say which with blocks=, one of {said}"
        )
    return Ends() if len(ways) < 2 else next(way for way in ways if way.added)


def why_not(blocks: Sequence[BlockAnatomy], calls: list[Call]) -> str | None:
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
        entered, left = ([tuple(p.shape) for p in side if len(p.shape) > 1] for side in (call.entered, call.left))
        if not set(entered) & set(left):
            return (
                f"{call.name!r} is given {', '.join(map(str, entered)) or 'no tokens'} and returns "
                f"{', '.join(map(str, left)) or 'none'}: a block returns tokens of the shape that it was given; {HOW}"
            )
    return None


# --- what passes the blocks ---------------------------------------------------------------------------


def _streams(passages: Sequence[Passage], batch: Batch, *, may_be_maps: bool = False) -> dict[str, Any]:
    """What an anatomy says of several streams, (batch, n, streams, d) or side by side in the batch, where ids are
    (batch, n): hyper-connections, and no maps of features, which are refused."""
    given = [value for value in (*batch.args, *batch.kwargs.values()) if isinstance(value, Tensor)]
    ids = {tuple(value.shape) for value in given if value.ndim == 2 and not value.is_floating_point()}
    shapes = {tuple(passage.entrance.shape) for passage in passages}
    if shapes and all(len(shape) == 4 and shape[:2] in ids for shape in shapes):
        return {"streams": True}
    if not may_be_maps:
        _refuse_maps(passages, ids)
    if len(ids) != 1 or len(shapes) != 1:
        return {}
    ((sequences, n),), ((size, *axes),) = ids, shapes
    is_folded = len(axes) == 2 and axes[0] == n and size % sequences == 0 and size > sequences
    return {"streams": True, "folded": size // sequences} if is_folded else {}


def _refuse_maps(passages: Sequence[Passage], ids: set[tuple[int, ...]]) -> None:
    """Refuses tokens (batch, d, n), and maps of features, unless their last axis is the width of a token: norms in the
    blocks say so, and none says that it is the second."""
    turned = [passage for passage in passages if _is_turned(passage, ids)]
    if turned and len(turned) == len(passages):
        raise ValueError(
            f"expected tokens (batch, n, d) in {turned[0].call.name!r}, got {tuple(turned[0].entrance.shape)}, of "
            f"which the second axis is as wide as the weights of the block; {HOW}"
        )
    maps = [passage for passage in passages if len(passage.entrance.shape) == 4]
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

    sides = passage.call.entered, passage.call.left
    once = ({p.path if p.state is None else p.state: p.shape for p in side} for side in sides)  # by state
    firsts = tuple(next((p for axes in (3, 2) for p in side if len(p.shape) == axes), None) for side in sides)
    is_only = count_ways(*(list(shapes.values()) for shapes in once)) == 1 and not passage.added
    return is_only and len(passage.exit.shape) < 4 and firsts == (passage.entrance, passage.exit)
