"""Which step of a plain training loop a pass belongs to: with gradient accumulation several passes are one step.

A step ends when an optimizer of the model's weights has stepped, as PyTorch tells a hook that is asked of all
optimizers. Where none does (an optimizer that is not PyTorch's), every pass is a step.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

PATIENCE = 256  # passes without a step of an optimizer that has the weights: then somebody else must make the steps


class Steps:
    """Counts the steps of a loop that trains `model`, between `open` and `close`."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.now = -1  # the step of the last pass, counted from 0
        self._passes = 0  # in this step
        self._stepped = False  # an optimizer has, since the last pass
        self._waits: bool | None = None  # whether steps are told by an optimizer; None: not known yet
        self._own: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hook: Any = None

    def open(self) -> None:
        """Begins to listen. The hook of all optimizers does not keep the model alive."""
        here = weakref.ref(self)

        def see(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            steps = here()
            if steps is not None and not torch.compiler.is_compiling() and steps._is_own(optimizer):
                steps._stepped = steps._waits = True

        handle = register_optimizer_step_post_hook(see)
        self._hook = weakref.finalize(self, handle.remove)

    def close(self) -> None:
        """Takes the hook away. May be called more than once."""
        if self._hook is not None:
            self._hook()

    def begin_pass(self) -> bool:
        """A training pass begins; whether it is the first of its step, which is `now`."""
        if self.now >= 0 and not self._stepped and self._must_wait():
            self._passes += 1
            return False
        self.now, self._passes, self._stepped = self.now + 1, 1, False
        return True

    def _must_wait(self) -> bool:
        if self._waits is None:
            self._waits = self._has_optimizer()
        if self._passes >= PATIENCE:
            self._waits = False
        return self._waits

    def _has_optimizer(self) -> bool:
        """Whether there is one with weights of this model: asked once, and only if no optimizer has stepped between the
        first two passes."""
        found = [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]
        return any(map(self._is_own, found))

    def _is_own(self, optimizer: Optimizer) -> bool:
        if optimizer not in self._own and optimizer not in self._others:
            weights = {id(parameter) for parameter in self.model.parameters()}
            held = (parameter for group in optimizer.param_groups for parameter in group["params"])
            (self._own if any(id(parameter) in weights for parameter in held) else self._others).add(optimizer)
        return optimizer in self._own
