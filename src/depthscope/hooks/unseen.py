"""What is refused of blocks that nobody has seen run before a remedy was put in: `apply` without inputs.

Their looks say that they are blocks, and the first pass must not say otherwise.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from depthscope.hooks.tokens import count_ways, distinct, floating_in
from depthscope.safety import ByThread


class UnseenBlocks(ByThread):
    """What the running pass of this thread has shown of them."""

    def __init__(self) -> None:
        self.ids: tuple[int, ...] | None = None  # the shape of the ids that the model is called with
        self.begin()

    def begin(self) -> None:
        """A pass begins."""
        self.entered: tuple[weakref.ref[Tensor], int] | None = None  # what the block before was given, and its version
        self.candidates: list[weakref.ref[Tensor]] = []  # what could be the tokens of the block before
        self.passed: tuple[Tensor, Tensor | None] | None = None  # in the first pass: what entered and left a block

    def see_ids(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called with these: ids (batch, n) tell where the tokens of blocks that were guessed stand."""
        ids = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.ndim == 2 and v.dtype == torch.long]
        self.ids = tuple(ids[0].shape) if ids else None

    def enter(self, block: str, tokens: Tensor, token_axis: int, *, is_first_pass: bool) -> None:
        """Tokens enter a block whose looks alone say that it is one. Ids (batch, n) must not say that they stand on the
        first axis; and in the first pass what a block returns must not be added outside of it to what it was given."""
        shape, ids = tuple(tokens.shape), self.ids
        if ids is not None and token_axis == 1 and len(shape) == 3 and shape[:2] == ids[::-1] != ids:
            raise ValueError(
                f"ids are {ids}, and the axes of what enters {block!r}, {shape}, look like (tokens, batch, width): "
                "pass token_axis=0, or inputs= to apply"
            )
        entered, left = self.passed or (None, None)
        self.passed = (tokens.detach(), None) if is_first_pass else None
        if entered is None or left is None or not tokens.shape == entered.shape == left.shape:
            return
        with torch.no_grad():
            if torch.allclose(tokens, entered + left) and not torch.allclose(tokens, left):
                raise ValueError(
                    f"what the block before {block!r} returns is added to its tokens outside of it: pass inputs= to "
                    "apply, so that a remedy can be put at the sum"
                )

    def see_left(self, tokens: Tensor | None) -> None:
        """What leaves a block that was guessed, after all remedies."""
        if self.passed is not None and tokens is not None:
            self.passed = self.passed[0], tokens.detach()

    def refuse_several(self, block: str, before: Tensor, given: Any, returned: Any) -> None:
        """Several tensors could be the tokens. What every block is given unchanged is not."""
        entered = distinct(tensor for _, tensor in floating_in(given))
        left = [tensor.shape for tensor in distinct(tensor for _, tensor in floating_in(returned))]
        ways = count_ways([tensor.shape for tensor in entered], left)
        if ways > 1 and not torch.compiler.is_compiling():
            known, self.candidates = self.candidates, [weakref.ref(tensor) for tensor in entered]
            new = [tensor for tensor in entered if not any(tensor is ref() for ref in known)]
            if not known or any(before is tensor for tensor in new):
                ways = count_ways([tensor.shape for tensor in (new if known else [before])], left)
        if ways > 1:
            raise ValueError(
                f"several tensors could be the tokens of {block!r}: pass inputs=, so that a pass can tell, or say it "
                f"with blocks=, such as '{block}@0>0' for its first argument and the first item that it returns"
            )

    def refuse_side_by_side(self, block: str, before: Tensor, after: Tensor) -> None:
        """The same tokens have entered the block before, and it has made others of them: these blocks are no chain."""
        entered = None if before.is_inference() else (weakref.ref(before), before._version)
        if self.entered is not None and self.entered[0]() is before and self.entered == entered:
            raise ValueError(
                f"{block!r} is given the same tokens as the block before it, and not what that one returned: these "
                "blocks are not sequential; depthscope.remove(model), and name the blocks with blocks="
            )
        self.entered = entered if after is not before else None
