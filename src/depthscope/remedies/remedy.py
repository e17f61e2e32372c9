"""What a remedy is: a change at stations of the trunk, with a name, that can be put into a model and recorded.

A remedy is a frozen dataclass that inherits `Remedy`. Its fields are its options: they are recorded, shown and
compared, and nothing but its own file and the recommender knows its class. `REMEDIES` has every class by its name;
other packages add theirs with `register_remedy` or an entry point in the group `depthscope.remedies`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from inspect import isabstract
from typing import Any, ClassVar, Literal

from torch import nn

from depthscope.anatomy import Anatomy, BlockAnatomy
from depthscope.hooks import Pass
from depthscope.hooks.staying import Hook, TokenHook, change_trunk
from depthscope.registry import Registry

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
        self.note(remedy, hook, station)
        change_trunk(self.block, station, hook)
        # What a hook learns is added to the model once the hook hangs: taking it down takes the parameters out.
        if remedy.learns and (learn := getattr(hook, "learn", None)) is not None:
            learn(self.block)

    def note(self, remedy: Remedy | None, hook: Hook, station: str) -> None:
        """Notes on a hook whose and where it is; None: it only listens."""
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
    numbers: ClassVar[Mapping[str, float]] = {}  # options that are finite numbers → what they must be above

    def __post_init__(self) -> None:
        for name, above in self.numbers.items():
            number: Any = getattr(self, name)
            if number is None and getattr(type(self), name, 0) is None:
                continue  # it may be left out
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                raise ValueError(f"expected {name} to be a finite number, got {number!r}")
            if not number > above:
                raise ValueError(f"expected {name} above {above:g}, got {number}")
            object.__setattr__(self, name, float(number))  # so that JSON can hold it
        for name in ("allow_leak", "learnable"):
            if not isinstance(flag := getattr(self, name, False), bool):
                raise ValueError(f"expected {name} to be true or false, got {flag!r}")
        if not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"expected every to be a whole number of at least 1, got {self.every}")
        if self.blocks is None:
            return
        chosen = tuple(self.blocks)
        if self.every != 1:
            raise ValueError("expected blocks or every, got both")
        if not chosen or any(not isinstance(number, int) or number < 1 for number in chosen):
            raise ValueError(f"expected blocks to hold numbers from 1, got {chosen}")
        object.__setattr__(self, "blocks", chosen)

    def blocks_of(self, anatomy: Anatomy, depth: int) -> list[tuple[int, BlockAnatomy]]:
        """The blocks that it goes into, with their numbers; `depth` blocks run in a pass.

        Blocks that share their weights are one module, and cannot be chosen one by one.
        """
        blocks, every, count = self.blocks, self.every, len(anatomy.blocks)
        if (blocks is not None or every != 1) and depth > count:
            raise ValueError("the blocks of this model share their weights: a remedy goes into all of them or none")
        if every > count:
            raise ValueError(f"expected every of at most {count}, the model's depth, got {every}")
        if blocks is not None and max(blocks) > count:
            raise ValueError(f"expected blocks from 1 to {count}, the model's depth, got {max(blocks)}")
        numbered = enumerate(anatomy.blocks, start=1)
        return [(i, block) for i, block in numbered if (i % every == 0 if blocks is None else i in blocks)]

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
        """Whether it adds parameters to the model: by an option `learnable`, unless a remedy says more."""
        return bool(getattr(self, "learnable", False))


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


RIGHT_TO_LEFT = (
    "its tokens see later ones and not earlier ones (right to left), and every mean of a remedy would show them the "
    "earlier ones; let the model read its sequences turned round, from left to right"
)


def refuse_leak(remedy: Remedy, site: Site) -> None:
    """Full mixing in a causal model lets tokens see later ones; where tokens see only later ones, every mean lets them
    see earlier ones. Both only if they are asked for by name."""
    mixing = remedy.mixing_in(site)
    if remedy.allow_leak or mixing == "none":
        return
    if mixing == "full" and site.causal is not False:
        which = "is causal" if site.causal else "may be causal (pass causal=False to apply if it is not)"
        raise ValueError(f"{remedy.name} with full mixing in a model that {which}: {leak(remedy)}")
    if site.anatomy.right_to_left:
        raise ValueError(f"{remedy.name} in {site.block.name!r}: {RIGHT_TO_LEFT}, or allow_leak=True does it")


def leak(remedy: Remedy) -> str:
    """Why full mixing is refused in a causal model, and what to do instead."""
    instead = f"{remedy.without_leak}, or " if remedy.without_leak else ""
    return (
        "each token would see later ones, so that the model learns to read the answer and fails when it must write it; "
        f"{instead}allow_leak=True does it all the same"
    )
