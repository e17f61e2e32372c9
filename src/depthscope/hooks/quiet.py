"""Running somebody's model and leaving no trace, also after an exception, and one measurement at a time."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack, _pop_mode

from depthscope import walking
from depthscope.undoing import TemporaryHook, temporary_hooks, undone, unhook


def uncompiled(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """The model behind `torch.compile`, whose graph would pass by our hooks, and a note that says so."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a model, a torch.nn.Module, got {model!r}")
    original = getattr(model, "_orig_mod", None)
    if isinstance(original, nn.Module):
        return original, ["the model was compiled: its original was run, uncompiled"]
    return model, []


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, no fused fast path; all of it restored, and the random state.

    PyTorch's `nn.TransformerEncoder` has a fused fast path that calls no submodule: it is switched off
    meanwhile. Modules compiled in place (`model.compile()`) or inside the model run uncompiled meanwhile.

    Part of that is global in PyTorch, so that a measurement in another thread waits until this one has ended. A model
    that is being measured cannot be measured a second time meanwhile, by another thread or by a hook: that is refused.
    """
    before = _Before(model)
    graphs = any("_orig_mod" in module._modules for module in before.modules)
    with undone(before.restore):
        before.wait_for_turn()
        before.remember_what_is_global()
        for module in before.training:
            module.training = False
        for module, _ in before.compiled:
            module._compiled_call_impl = None
        torch.backends.mha.set_fastpath_enabled(False)
        torch.set_grad_enabled(False)
        with torch.compiler.set_stance("force_eager") if graphs else nullcontext():
            yield


class _Before:
    """How everything was. `restore` may be called again, and does nothing to what was never changed."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.thread, self.system_thread = threading.get_ident(), threading.get_native_id()
        self.modules = walking.modules(model)
        self.training = [module for module in self.modules if module.training]
        self.compiled = [(module, module._compiled_call_impl) for module in self.modules if _is_compiled(module)]
        self.hooks = temporary_hooks(self.modules)
        self.remembers = False

    def wait_for_turn(self) -> None:
        """One thread measures at a time, in the order in which they came; an interrupt could leave a lock locked.

        A thread that measures may take as long as it computes. If it stands still, waiting in its turn for something
        (a hook of its model may have begun this very thread, and wait for its end), neither would ever go on.
        """
        _MEASURING.append(self)
        earlier = _MEASURING[: _MEASURING.index(self)]
        mine = set(map(id, self.modules))
        for other in earlier:
            if not mine.isdisjoint(map(id, other.modules)):
                where = "in this thread" if other.thread == self.thread else "in another thread"
                raise ValueError(
                    f"this {type(self.model).__name__} is being measured already, {where}: "
                    "measure it afterwards, or measure a copy.deepcopy of it"
                )
        used, since = (0, -1), time.monotonic()
        while (first := _MEASURING[0]).thread != self.thread:
            if time.monotonic() - since > PATIENCE:
                if (now := (first.system_thread, _computed(first.system_thread))) == used:
                    raise ValueError(
                        f"a {type(first.model).__name__} is being measured in another thread, which has computed "
                        f"nothing for {PATIENCE} seconds and keeps this {type(self.model).__name__} from being "
                        "measured: does a hook of it wait for this thread? Measure from one thread, or one after the "
                        "other"
                    )
                used, since = now, time.monotonic()
            time.sleep(0.005)

    def remember_what_is_global(self) -> None:
        self.fast_path = torch.backends.mha.get_fastpath_enabled()
        self.gradients = torch.is_grad_enabled()
        self.modes = len(_get_current_function_mode_stack())
        self.functions = F.scaled_dot_product_attention, F.softmax
        self.random = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        self.other_random = random.getstate(), np.random.get_state()  # noqa: NPY002
        self.remembers = True

    def restore(self) -> None:
        if self.remembers:
            if self.thread == threading.get_ident():
                self._restore_what_is_this_thread_s()
            torch.backends.mha.set_fastpath_enabled(self.fast_path)
            F.scaled_dot_product_attention, F.softmax = self.functions  # type: ignore[assignment]
            for module, implementation in self.compiled:
                module._compiled_call_impl = implementation
            for module in self.training:
                module.training = True
            unhook(self.modules, lambda hook: isinstance(hook, TemporaryHook) and id(hook) not in self.hooks)
            self.remembers = False  # from now on all this may be another measurement's
        if self in _MEASURING:
            _MEASURING.remove(self)

    def _restore_what_is_this_thread_s(self) -> None:
        """And the random state, which a process that was forked must not ask for: its locks may be locked for ever."""
        torch.set_grad_enabled(self.gradients)
        while len(_get_current_function_mode_stack()) > self.modes:
            _pop_mode()
        torch.set_rng_state(self.random[0])
        torch.cuda.set_rng_state_all(self.random[1])
        random.setstate(self.other_random[0])
        np.random.set_state(self.other_random[1])  # noqa: NPY002


PATIENCE = 60  # seconds that one who measures may stand still while another waits for it
_MEASURING: list[_Before] = []  # those of the first one's thread measure; one more if a hook measures another model


def _computed(thread: int) -> int:
    """Processor time that a thread of this process has used, in the system's ticks; 0 if it has ended.

    Asked of the system: `sys._current_frames` can lock up a process whose other threads allocate. Where the system does
    not say (outside Linux), time goes on, so that nobody is taken to stand still.
    """
    if not os.path.isdir("/proc/self/task"):
        return time.monotonic_ns()
    try:
        with open(f"/proc/self/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])  # in user and in system mode


def _end_what_other_threads_measured() -> None:
    """In a process that was forked: the one thread that it has is the only one that can measure."""
    for other in [other for other in _MEASURING if other.thread != threading.get_ident()]:
        other.restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_what_other_threads_measured)


def full_precision(tokens: Tensor) -> AbstractContextManager[object]:
    """Without autocast, where the tokens are."""
    kind = tokens.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None
