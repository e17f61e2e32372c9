"""What a remedy is: a change at stations of the trunk, with a name, that can be put into a model and recorded.

A remedy is a frozen dataclass that inherits `Remedy`. Its fields are its options: they are recorded, shown and
compared, and nothing but its own file and the recommender knows its class. `REMEDIES` has every class by its name;
other packages add theirs with `register_remedy` or an entry point in the group `depthscope.remedies`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from inspect import isabstract
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import nn

from depthscope.anatomy import Anatomy, BlockAnatomy, Spot
from depthscope.hooks import Pass
from depthscope.hooks.staying import Hook, TokenHook, change_trunk, hang
from depthscope.registry import Registry
from depthscope.remedies.selection import check_selection

if TYPE_CHECKING:
    from depthscope.remedies.recommendation import Recommendation

Mixing = Literal["none", "causal", "full", "by call"]  # "by call": each call of the block decides between the two


@dataclass(frozen=True)
class Site:
    """One block that a remedy is put into."""

    model: nn.Module
    anatomy: Anatomy
    block: BlockAnatomy
    number: int  # counted from 1
    causal: bool | None  # None: not known
    running: Pass  # what the hooks of one `apply` know of the pass that is running

    def put(self, remedy: Remedy, hook: TokenHook, station: str) -> None:
        """Hangs a hook of a remedy at a station of this block, and notes on it whose and where it is.

        What it changes is the trunk, also where a pre-norm model shows only the copy that a norm reads; on a branch, it
        is the branch.
        """
        self._note(remedy, hook, station)
        change_trunk(self.block, station, hook)

    def put_inside(self, remedy: Remedy, hook: Hook, spot: Spot, station: str) -> None:
        """Hangs a hook of a remedy at a spot inside the block that is no station of it, such as attention's context."""
        self._note(remedy, hook, station)
        if isinstance(hook, TokenHook):
            hook.side, hook.path = spot.side, spot.path
        hang(spot.module, hook, spot.side)

    def _note(self, remedy: Remedy, hook: Hook, station: str) -> None:
        hook.remedy, hook.block, hook.part, hook.station = remedy, self.block.name, self.block.part, station

    @property
    def call_decides(self) -> bool:
        """Whether causality is an argument of each call of the block, and nobody has said more."""
        return bool(self.block.causal_arguments) and self.causal is None

    @property
    def unseen(self) -> str:
        """What to do about a station that this block does not show, for the message that says so."""
        tried = self.anatomy.family == "unknown" and len(self.block.spots) <= 2
        return "; apply(…, inputs=a batch) tries whether the structure of the blocks shows it" if tried else ""

    @property
    def is_first(self) -> bool:
        """Whether its part of the model begins with this block."""
        return self.block is self.anatomy.of_part(self.block.part)[0]

    @property
    def is_last(self) -> bool:
        """Whether its part of the model ends with this block."""
        return self.block is self.anatomy.of_part(self.block.part)[-1]


@dataclass(frozen=True)
class Remedy(ABC):
    """The protocol. A subclass is a frozen dataclass whose fields are the remedy's options; these all have."""

    blocks: tuple[int, ...] | None = field(default=None, kw_only=True)  # numbers from 1; None: all
    every: int = field(default=1, kw_only=True)  # k: only every k-th block
    allow_leak: bool = field(default=False, kw_only=True)  # full mixing is wanted even in a causal model

    name: ClassVar[str] = ""  # in records, on the command line
    always_shown: ClassVar[tuple[str, ...]] = ()  # options that printed code shows also at their defaults
    option_types: ClassVar[tuple[type, ...]] = ()  # dataclasses that its options may hold, for the record
    without_leak: ClassVar[str] = ""  # how its user gets a causal form, for the message that refuses a leak

    def __post_init__(self) -> None:
        if not isinstance(self.allow_leak, bool):
            raise ValueError(f"expected allow_leak to be true or false, got {self.allow_leak!r}")
        object.__setattr__(self, "blocks", check_selection(self.blocks, self.every))

    @abstractmethod
    def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
        """The stations that it changes in a block: the same remedy does not go there twice."""

    @abstractmethod
    def install(self, site: Site) -> None:
        """Puts its hooks into one block (`site.put(self, hook, station)`), or refuses with a ValueError."""

    def mixing_in(self, site: Site) -> Mixing:
        """Whether a token's new value depends on other tokens, and on which."""
        return "none"

    @property
    def learns(self) -> bool:
        """Whether it adds parameters to the model."""
        return False

    def settled(self, measure: Callable[..., Recommendation], beside: tuple[Remedy, ...]) -> tuple[Remedy, ...]:
        """The remedies to put in: this one with numbers in the place of what is to be measured.

        `measure(**options)` is `recommend` on the model and the inputs given to `apply`; `beside` are all remedies of
        that call.
        """
        return (self,)


def _check(kind: type[Remedy]) -> None:
    if not (isinstance(kind, type) and issubclass(kind, Remedy) and is_dataclass(kind)):
        raise ValueError(f"expected a dataclass that inherits Remedy, got {kind!r}")
    if isabstract(kind):
        raise ValueError(f"{kind.__name__} must define {', '.join(sorted(kind.__abstractmethods__))}")
    if not kind.name:
        raise ValueError(f"{kind.__name__} must have a name")


REMEDIES: Registry[type[Remedy]] = Registry("remedy", "depthscope.remedies", check=_check)


def register_remedy(kind: type[Remedy]) -> type[Remedy]:
    """Adds a class of remedies by its name; usable as a decorator."""
    return REMEDIES.register(kind)


def list_remedies() -> tuple[str, ...]:
    """The remedies that there are.

    Returns:
        Their names, as the command line takes them.

    Example:
        >>> import depthscope
        >>> "de-escalation" in depthscope.list_remedies()
        True
    """
    return tuple(REMEDIES)


def refuse_leak(remedy: Remedy, site: Site) -> None:
    """Full mixing in a causal model lets tokens see later ones: only if it is asked for by name."""
    if remedy.mixing_in(site) == "full" and site.causal is not False and not remedy.allow_leak:
        which = "is causal" if site.causal else "may be causal (pass causal=False to apply if it is not)"
        raise ValueError(f"{remedy.name} with full mixing in a model that {which}: {leak(remedy)}")


RIGHT_TO_LEFT = (
    "its tokens see later ones and not earlier ones (right to left), and every mean of a remedy would show them the "
    "earlier ones; let the model read its sequences turned round, from left to right"
)


def refuse_right_to_left(remedy: Remedy, site: Site) -> None:
    """Means are over all tokens, or over those so far: where tokens see only later ones, both would leak."""
    if site.anatomy.right_to_left and remedy.mixing_in(site) != "none" and not remedy.allow_leak:
        raise ValueError(f"{remedy.name} in {site.block.name!r}: {RIGHT_TO_LEFT}, or allow_leak=True does it")


def warn_of_the_prefix_mean(stacklevel: int) -> None:
    """Doubt counts as causal, and whoever has a bidirectional model should know."""
    warnings.warn(
        "cannot tell whether this model is causal: the prefix mean is used, in which no token sees a later one; "
        "pass causal=False to apply for the full mean, or inputs= to find out",
        stacklevel=stacklevel,
    )


def leak(remedy: Remedy) -> str:
    """Why full mixing is refused in a causal model, and what to do instead."""
    instead = f"{remedy.without_leak}, or " if remedy.without_leak else ""
    return (
        "each token would see later ones, so that the model learns to read the answer and fails when it must write it; "
        f"{instead}allow_leak=True does it all the same"
    )
