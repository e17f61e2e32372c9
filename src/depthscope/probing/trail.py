"""What the tokens that pass are compared with: one block's way through its stations, as states with names."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from depthscope.measures import Bounded, TokenNorms
from depthscope.probing.ledger import Kind, Ledger
from depthscope.probing.sweep import Kept, Swept


@dataclass
class Seen:
    """What is kept of a token matrix after it has passed."""

    ledger: Ledger
    row: int  # its own there
    numbers: dict[str, Tensor | Bounded] = field(default_factory=dict)
    kept: Kept | None = None  # what the tokens that leave the block are compared with
    compared: Kept | None = None  # what these were compared with, where they passed
    outliers: Tensor | None = None  # (batch, n), if there are any
    left_out: Tensor | None = None  # (batch, n), outliers that are not measured
    norm_ratios: Tensor | None = None  # (batch, n), norm of each token over the median
    unasked: tuple[Swept, Tensor | None] | None = None  # of a device, which is asked for outliers after the pass

    @property
    def kind(self) -> Kind:
        return self.ledger.kind

    @property
    def norms(self) -> TokenNorms:
        return self.ledger.norms(self.row)


@dataclass
class Trail:
    """Where the pass is. Two states, and two events that move them:

    | event         | `entered`, what the running block reads | `trunk`, the trunk station heard last |
    | ------------- | --------------------------------------- | ------------------------------------- |
    | `enter(seen)` | seen                                    | seen                                  |
    | `move(seen)`  | stays                                   | seen                                  |

    `enter` comes at the first block, where something has happened between two blocks, and at the end of a block: its
    output enters the next one. Both states are None before the first `enter`. Apart from them, the tensor that was
    looked at last is known again if it is passed on unchanged.
    """

    entered: Seen | None = None
    trunk: Seen | None = None
    _newest: tuple[weakref.ref[Tensor], int, Seen] | None = None

    def enter(self, seen: Seen) -> None:
        """These tokens enter the block that runs now, or the one that runs next."""
        self.entered = self.trunk = seen

    def move(self, seen: Seen) -> None:
        """The trunk has come to the next station."""
        self.trunk = seen

    def keep(self, source: Tensor, seen: Seen) -> None:
        """This tensor has been looked at."""
        self._newest = None if source.is_inference() else (weakref.ref(source), source._version, seen)

    def known(self, source: Tensor) -> Seen | None:
        """What was seen of this very tensor, if it was looked at last and has not been written to since."""
        if self._newest is None or self._newest[0]() is not source or self._newest[1] != source._version:
            return None
        return self._newest[2]


def same_tokens(before: Seen, after: Seen) -> bool:
    """Whether the same tokens were left out at both ends of a step."""
    if before.left_out is None or after.left_out is None:
        return before.left_out is after.left_out
    return torch.equal(before.left_out, after.left_out)
