"""What is said of a model whose blocks were looked for in a pass: what is left out, and why nothing was found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from depthscope.anatomy import Anatomy, BlockAnatomy
from depthscope.anatomy.unknown import MOST, is_solid, size_of, spell, unknown_anatomy
from depthscope.discovery.chains import Chain
from depthscope.discovery.tracing import Call

HOW = "name the blocks with blocks='path.to.layers.*'"
SHOWN = 6  # names that are said, of many


class Places:
    """Where some modules stand, by their names."""

    def __init__(self, names: Iterable[str]):
        self.names = set(names)
        self.around = {prefix for name in self.names for prefix in _prefixes(name)}

    def apart(self, name: str) -> bool:
        """Whether a module stands neither in one of these nor around one."""
        return name not in self.around and not self.names & set(_prefixes(name))


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]


def left_out(model: nn.Module, trunk: Chain, chains: list[Chain], calls: list[Call]) -> Iterator[str]:
    """What looks like blocks and is not among them."""
    own = {passage.call for passage in trunk}
    places = Places(passage.call.name for passage in trunk)
    if (share := share_of(model, trunk, calls)) < MOST:
        yield f"these blocks hold {share:.0%} of the model's parameters (embeddings aside)"
    for chain in chains:
        names = {passage.call.name for passage in chain}
        if chain is not trunk and {p.call for p in chain} <= own and 2 * len(chain) > len(trunk):
            blocks = unknown_anatomy([(p.call.name, p.call.module, p.ends) for p in chain], "").blocks
            said = spell(model, blocks)
            yield f"another stream of tokens passes these blocks and is left out: blocks={said!r} names it"
        elif all(places.apart(name) for name in names):
            places = Places(places.names | names)
            yield f"other blocks that follow each other are left out: {chain[0].call.name} to {chain[-1].call.name}"
    modules = {passage.call.module for passage in trunk}
    runs = sum(call.module in modules for call in calls)
    if runs > len(trunk):
        yield f"these blocks also run outside their chain: {runs - len(trunk)} of {runs} runs do not follow the others"
    if missing := _like_blocks(model, places):
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        named = ", ".join(missing[:SHOWN])
        yield f"modules like the blocks that are not part of their chain are left out: {named}{more}"


def share_of(model: nn.Module, chain: Chain, calls: list[Call]) -> float:
    """How much of the model's parameters, embeddings aside, are in a chain and in what stands beside its modules."""
    first, last = chain[0].call, chain[-1].call
    beside = [call.module for call in calls if call.depth == first.depth and first.number <= call.number <= last.number]
    tables = size_of([module for module in model.modules() if isinstance(module, nn.Embedding)])
    return size_of(beside) / max(1, size_of([model]) - tables)


def _like_blocks(model: nn.Module, places: Places) -> list[str]:
    """Modules beside blocks in a list, and modules of their classes, that stand neither in blocks nor around them."""
    kinds = {type(model.get_submodule(name)) for name in places.names}
    found = Places(places.names)
    for name, module in model.named_modules():
        alike = type(module) in kinds and not type(module).__module__.startswith("torch.nn.")
        if found.apart(name) and is_solid(module) and (alike or _stands_beside(model, name, places)):
            found = Places(found.names | {name})
    return [name for name, _ in model.named_modules() if name in found.names - places.names]


def _stands_beside(model: nn.Module, name: str, places: Places) -> bool:
    around = name.rpartition(".")[0]
    modules = model.get_submodule(around)
    return (
        isinstance(modules, nn.ModuleList) and sum(f"{around}.{key}" in places.around for key in modules._modules) > 1
    )


def why_none(listed: Anatomy, calls: list[Call]) -> str:
    """One line that says why what looks like blocks is none."""
    return why_not(listed.blocks, calls) or (
        f"what {listed.blocks[0].name!r} returns does not enter {listed.blocks[1].name!r}, or not without what is "
        f"older than it: these blocks are not sequential; {HOW}"
    )


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
        entered = [tuple(p.shape) for p in call.entered if len(p.shape) > 1]
        left = [tuple(p.shape) for p in call.left if len(p.shape) > 1]
        if not set(entered) & set(left):
            return (
                f"{call.name!r} is given {', '.join(map(str, entered)) or 'no tokens'} and returns "
                f"{', '.join(map(str, left)) or 'none'}: a block returns tokens of the shape that it was given; {HOW}"
            )
    return None
