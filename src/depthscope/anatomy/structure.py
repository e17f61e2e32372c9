"""What an anatomy is made of: blocks, the spots where their stations can be seen, projections."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from torch import Tensor, nn

from depthscope.stations import Placement, trunk_of

Side = Literal["in", "out"]
Path = tuple[int | str, ...]  # steps into what a module returns, or into (args, kwargs): (0, 1) is its second argument


@dataclass(frozen=True)
class Spot:
    """A place where a token matrix passes: what goes into a module, or what comes out of it.

    `path` leads to the tokens among the arguments or in what is returned; None: they are the first token matrix there.
    Where whoever calls the module adds what it returns to what it was given, `added_to` is the path of the latter: the
    tokens of the trunk are the sum.
    """

    module: nn.Module
    side: Side
    path: Path | None = None
    added_to: Path | None = None


Role = Literal["queries_keys", "values_output", "ffn", "norms", "other"]  # what weights are for


@dataclass(frozen=True)
class Piece:
    """A parameter, or the parts of it that `cut` takes out of a tensor of its shape: its own, or its gradient's."""

    parameter: Tensor
    cut: Callable[[Tensor], tuple[Tensor, ...]] | None = None  # None: all of it

    def of(self, values: Tensor) -> tuple[Tensor, ...]:
        return (values,) if self.cut is None else self.cut(values)


@dataclass(frozen=True)
class Projections:
    """W_Q, W_K, W_V, W_O per head, acting on row vectors: q = x W_Q + b_Q, branch = Σ_h P_h (x W_V + b_V) W_O + b_O.

    Grouped-query keys and values are repeated for the heads that share them. Queries and keys are as they leave their
    projections: norms and rotations may follow. In latent attention (DeepSeek) a norm stands between x and the values:
    W_V acts on what leaves that norm, `latent`, and queries and keys have no such matrix.

    `roles` has their parameters, by what they are for; each number of a parameter that is named there is in
    one of its pieces.
    """

    query: Tensor | None  # (h, d, d_k)
    key: Tensor | None  # (h, d, d_k)
    value: Tensor  # (h, d, d_v)
    output: Tensor | None  # (h, d_v, d); None: the heads are concatenated and nothing follows
    query_bias: Tensor | None = None  # (h, d_k)
    key_bias: Tensor | None = None  # (h, d_k)
    value_bias: Tensor | None = None  # (h, d_v)
    output_bias: Tensor | None = None  # (d)
    latent: Spot | None = None  # what the values are projected from; None: what attention reads
    roles: Mapping[Role, tuple[Piece, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class FusedValues:
    """The values among what one module returns for queries, keys and values: `cut` takes them out of what stands at
    `spot`, (…, n, width) → (…, n, g·d_v), side by side. It is a function that can be imported, or a partial of one."""

    spot: Spot
    cut: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Addition:
    """A residual addition, by stations: what `trunk` has and what `branch` has add up to what `result` has."""

    trunk: str
    branch: str
    result: str
    beside: str | None = None  # a second branch that is added with the first, where the two are parallel

    @property
    def stations(self) -> tuple[str, ...]:
        """All of them, the result last."""
        return (self.trunk, self.branch, *((self.beside,) if self.beside else ()), self.result)


@dataclass(frozen=True)
class BlockAnatomy:
    """One block module. It is applied more than once in models that share weights (ALBERT).

    Attention's weights P act between two spots: what stands at `values` (X W_V + b_V, all heads side by side) is mixed
    by P into what stands at `context`, which the output projection reads. `ffn` has the modules of the FFN in the order
    in which they are called. Where one of these is None or empty, the family does not show it. In a block that has a
    mixer in the place of attention (Mamba), the mixer's branch is at `attention_branch`.
    """

    name: str
    module: nn.Module
    spots: Mapping[str, Spot]  # station → where it is seen; stations that cannot be seen are missing
    placement: Placement | None = None
    attention: nn.Module | None = None  # the module inside which self-attention happens
    cross_attention: nn.Module | None = None
    projections: Callable[[], Projections] | None = None
    norms: tuple[nn.Module, ...] = ()  # in the order in which they are called
    part: str = ""  # "encoder", "decoder", "vision", "text", … in models that have several
    causal: bool | None = None  # where the block itself says so; None: as the whole model
    causal_arguments: Mapping[str, int] = field(default_factory=dict)  # of its call, with their positions: one that is
    # given says that the call may be causal, as in PyTorch's layers
    family: str = ""  # where the model has blocks of several
    token_axis: int | None = None  # where the model has blocks of several layouts
    values: Spot | None = None  # None where query, key and value are fused in one module
    fused_values: FusedValues | None = None  # where they are fused in a way that is known
    context: Spot | None = None
    ffn: tuple[nn.Module, ...] = ()
    extra_keys: int = 0  # last columns of attention's softmax that stand for no token (the sink of gpt-oss)

    def without(self, stations: Sequence[str]) -> BlockAnatomy:
        """The same, but for stations that no module shows."""
        return replace(self, spots={name: spot for name, spot in self.spots.items() if name not in stations})

    @cached_property
    def by_spot(self) -> list[tuple[Spot, list[str]]]:
        """Every spot once, with the stations that are seen there."""
        found: dict[Spot, list[str]] = {}
        for station, spot in self.spots.items():
            found.setdefault(spot, []).append(station)
        return list(found.items())

    @cached_property
    def trunk(self) -> tuple[str, ...]:
        """The stations between which steps lead, in order."""
        return tuple(station for station in trunk_of(self.placement) if station in self.spots)

    @property
    def branches(self) -> tuple[str, ...]:
        """The stations of all that is added to the trunk, whether they can be seen or not."""
        own = ("attention_branch",) if self.placement == "mixer" else ("attention_branch", "ffn_branch")
        return own if self.cross_attention is None else (*own, "cross_attention_branch")

    @property
    def additions(self) -> tuple[Addition, ...]:
        """Those of `all_additions` whose stations can all be seen."""
        return tuple(a for a in self.all_additions if self.spots.keys() >= set(a.stations))

    @property
    def all_additions(self) -> tuple[Addition, ...]:
        """The residual additions that the placement implies, in order; none where it is not known."""
        if self.placement in (None, "streams"):
            return ()
        if self.placement in ("parallel", "mixer"):
            beside = "ffn_branch" if self.placement == "parallel" else None
            return (Addition("input", "attention_branch", "output", beside),)
        is_post, trunk = self.placement == "post", "after_attention"
        found = [Addition("input", "attention_branch", trunk)]
        if "after_cross_attention" in self.spots:
            read, trunk = "cross_attention_input" if is_post else trunk, "after_cross_attention"
            found.append(Addition(read, "cross_attention_branch", trunk))
        last = Addition("ffn_input", "ffn_branch", "after_ffn") if is_post else Addition(trunk, "ffn_branch", "output")
        return (*found, last)


@dataclass(frozen=True)
class Anatomy:
    """The map from a model's modules to blocks and stations."""

    family: str
    blocks: tuple[BlockAnatomy, ...]
    token_axis: int = 1  # 0: activations are (n, batch, d)
    mask_argument: str | None = "attention_mask"  # the argument of the model's forward that marks real tokens
    causal: bool | None = None  # None: not known from the configuration, or not the same in all parts
    notes: tuple[str, ...] = ()  # what could not be found
    mask_hint: Tensor | str | None = None  # true for real tokens, as the user says: (batch, n), or an argument's name
    left_out: tuple[str, ...] = ()  # what looks like blocks, and is none of these
    spelled: str | None = None  # what `blocks=` must say to find these blocks without inputs; None: nothing
    applications: int | None = None  # of the blocks in the pass in which they were found
    guessed: bool = False  # these are blocks by their looks, and nobody has seen them run
    causal_by: Literal["", "user", "tried"] = ""  # who says whether it is causal: the family, the user, or a trial
    sees_some_later: bool = False  # by trial: tokens see some later ones, but not all; it counts as causal
    right_to_left: bool = False  # by trial: tokens see later ones, and no earlier ones
    streams: bool = False  # activations are (batch, n, streams, d), as with hyper-connections; or, where `folded`
    folded: int = 1  # says how many there are, (batch · streams, n, d) with those of a sequence side by side
    between: tuple[int, ...] | None = None  # applications before which something else stands; None: not looked for

    @property
    def maps(self) -> bool:
        """Whether activations may be maps (batch, height, width, d): only where it was said or seen what is passed."""
        return not self.streams and any(
            "input" in block.spots and block.spots["input"].path is not None for block in self.blocks
        )

    def axis_of(self, block: BlockAnatomy) -> int:
        """Where the tokens of a block stand: 1 for (batch, n, d), 0 for (n, batch, d)."""
        return self.token_axis if block.token_axis is None else block.token_axis

    def with_token_axis(self, token_axis: int) -> Anatomy:
        """The same with tokens on this axis in every block."""
        blocks = tuple(replace(block, token_axis=None) for block in self.blocks)
        return replace(self, token_axis=token_axis, blocks=blocks)

    def with_causality(self, causal: bool) -> Anatomy:
        """The same with this causality in every block."""
        return replace(self, causal=causal, blocks=tuple(replace(block, causal=causal) for block in self.blocks))

    def of_part(self, part: str) -> tuple[BlockAnatomy, ...]:
        """The blocks of one part."""
        return tuple(block for block in self.blocks if block.part == part)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts in order; one empty name where the model is one trunk."""
        return tuple(dict.fromkeys(block.part for block in self.blocks))


@dataclass(frozen=True)
class Family:
    """How the blocks of a family are recognised (by class name) and taken apart."""

    name: str
    library: str  # where the class must come from: names such as "Block" are not unique
    block_classes: tuple[str, ...]
    describe: Callable[[str, nn.Module], BlockAnatomy]
    causal: Callable[[nn.Module], bool | None]
    token_axis: int = 1
    mask_argument: str | None = "attention_mask"
    streams: bool = False  # activations are (batch, n, streams, d), as with hyper-connections
    token_axis_of: Callable[[nn.Module], int] | None = None  # where it depends on the module
    notes: tuple[str, ...] = ()  # what a reader of every profile of the family must know


def check_family(family: Family) -> None:
    """Refuses what is no family, and one that could never be recognised."""
    if not isinstance(family, Family):
        raise ValueError(f"expected a Family, got {family!r}")
    classes = family.block_classes
    if not family.library or not classes or isinstance(classes, str) or not all(isinstance(c, str) for c in classes):
        raise ValueError(f"family {family.name!r} must name its library, and the classes of its blocks as a tuple")


def is_named_norm(module: nn.Module) -> bool:
    """Whether a module is a norm by the name of its class."""
    return "norm" in type(module).__name__.lower()
