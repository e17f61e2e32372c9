"""One block that a remedy is put into: where its hooks are hung, and what they are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from depthscope.anatomy import Anatomy, BlockAnatomy, Spot
from depthscope.hooks import Pass
from depthscope.hooks.staying import Hook, TokenHook, change_trunk, hang
from depthscope.remedies.change import Change

if TYPE_CHECKING:
    from depthscope.remedies.remedy import Remedy


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
        self._begin(hook)

    def put_inside(self, remedy: Remedy, hook: Hook, spot: Spot, station: str) -> None:
        """Hangs a hook of a remedy at a spot inside the block that is no station of it, such as attention's context."""
        self.note(remedy, hook, station)
        if isinstance(hook, TokenHook):
            hook.side, hook.path = spot.side, spot.path
        hang(spot.module, hook, spot.side)
        self._begin(hook)

    def _begin(self, hook: Hook) -> None:
        if isinstance(hook, Change) and hook.remedy.learns:
            hook.learn(self.block)  # it hangs already: taking it down takes the parameters out

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

    @property
    def is_first(self) -> bool:
        """Whether its part of the model begins with this block."""
        return self.block is self.anatomy.of_part(self.block.part)[0]

    @property
    def is_last(self) -> bool:
        """Whether its part of the model ends with this block."""
        return self.block is self.anatomy.of_part(self.block.part)[-1]
