"""The loop around a watched model: its hooks, what wraps and compiles the model, its steps, other processes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from depthscope.anatomy import Side
from depthscope.hooks import Machine

PATIENCE = 256  # passes without a step of an optimizer that has the weights: then somebody else must make the steps


class Hook:
    """A hook on a module. A copy of the model (a moving average of its weights, say) is not watched."""

    def __init__(self, owner: object, act: Callable[..., object]):
        self.owner, self.act = owner, act

    def __call__(self, *given: Any) -> None:
        self.act(*given)

    def __reduce__(self) -> tuple[type[NotWatched], tuple[()]]:
        return NotWatched, ()


class Counter(Hook):
    """On the model as long as the watch is open."""


class End(Hook):
    """On the model during a watched pass."""


class Writes(Hook):
    """On a layer that may write a branch, during a watched pass."""


class NotWatched:
    """What becomes of the hooks in a copy of the model."""

    def __call__(self, *_given: object) -> None:
        pass


Guard = Callable[[], AbstractContextManager[None]]


def guarded(guard: Guard, act: Callable[..., Any]) -> Callable[..., Any]:
    """The same, and what fails in it is the guard's affair."""

    def acts(*given: Any) -> Any:
        with guard():
            return act(*given)

    return acts


class GuardedMachine(Machine):
    """A machine whose hooks are guarded."""

    def __init__(self, guard: Guard, *given: Any, **more: Any):
        self._guard = guard
        super().__init__(*given, **more)

    def _hang(self, module: nn.Module, side: Side, act: Callable[[Any], Any], *, prepend: bool = False) -> None:
        super()._hang(module, side, guarded(self._guard, act), prepend=prepend)


# --- wrappers, compiled code, processes ----------------------------------------------------------------


def wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """The model and what it wraps, from the outside in."""
    while True:
        yield model
        if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        elif isinstance(model, DistributedDataParallel | DataParallel):
            if isinstance(model, DataParallel) and len(model.device_ids) > 1:
                raise ValueError("nn.DataParallel runs copies of the model in threads; use DistributedDataParallel")
            model = model.module
        else:
            return


def inside(model: nn.Module) -> nn.Module:
    """The model without its wrappers."""
    *_, inner = wrappers(model)
    return inner


def refuse_compiled_in_place(model: nn.Module) -> None:
    """Hooks of such a model are not called."""
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in wrappers(model)):
        raise ValueError(
            "the model was compiled in place, and its hooks would be passed by: use compiled = torch.compile(model) "
            "in place of model.compile(), and watch(compiled)"
        )


def refuse_compiled_code() -> None:
    """Refuses a call that the compiler is at work around: it would compile our hooks, or pass them by."""
    callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)
    if torch.compiler.is_compiling() or callback() not in (None, False):
        raise ValueError(
            "the model is called by compiled code, which passes hooks by: watch what torch.compile returned"
        )


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether the model or a module in it is compiled."""
    waiting, seen = [model], {id(model)}
    while waiting:  # in place of `modules()`, which takes longer than all the rest of a watched step's preparation
        module = waiting.pop()
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            return True
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return False


def in_backward() -> bool:
    """Whether this pass is being run again by a backward pass, for activation checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_first_process() -> bool:
    """The one that writes files, of several; true where there is one."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def in_any_process(flag: bool, device: torch.device) -> bool:
    """Whether it is true in any process of torch.distributed. All of them must call it, at the same place."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return flag
    # NCCL exchanges what is on a GPU only.
    place = device if "nccl" in str(distributed.get_backend()) else torch.device("cpu")
    found = torch.tensor([float(flag)], device=place)
    distributed.all_reduce(found, op=distributed.ReduceOp.MAX)
    return bool(found.item() > 0)


# --- steps ----------------------------------------------------------------------------------------------


class Steps:
    """Counts the steps of a loop that trains `model`, between `open` and `close`: with gradient accumulation several
    passes are one step.

    A step ends when an optimizer of the model's weights has stepped, as PyTorch tells a hook that is asked of all
    optimizers. Where none does (an optimizer that is not PyTorch's), every pass is a step.
    """

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
        if self.now >= 0 and not self._stepped:
            if self._waits is None:  # asked once, and only if no optimizer has stepped between the first two passes
                optimizers = [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]
                self._waits = any(map(self._is_own, optimizers))
            self._waits = self._waits and self._passes < PATIENCE
            if self._waits:
                self._passes += 1
                return False
        self.now, self._passes, self._stepped = self.now + 1, 1, False
        return True

    def _is_own(self, optimizer: Optimizer) -> bool:
        if optimizer not in self._own and optimizer not in self._others:
            weights = {id(parameter) for parameter in self.model.parameters()}
            held = (parameter for group in optimizer.param_groups for parameter in group["params"])
            (self._own if any(id(parameter) in weights for parameter in held) else self._others).add(optimizer)
        return optimizer in self._own
