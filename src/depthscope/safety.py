"""A model is left as it was, also after Ctrl-C, and measured by one thread at a time.

An interrupt may come between any two lines, those of an `except` or a `finally` included. So whatever is undone here
may be undone twice, and is: the second time begins anew what an interrupt broke off.
"""

from __future__ import annotations

import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack, _pop_mode

from depthscope import walking

PATIENCE = 60  # seconds after which somebody who waits for another thread's measurement says so


class ByThread(threading.local):
    """What every thread has for itself: a model may be called from several at once.

    Each thread finds its own, made by `__init__` without arguments. A copy of it, or what is unpickled, is as if no
    thread had looked yet. `torch.compile` traces it.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


# --- undoing ------------------------------------------------------------------------------------------


@contextmanager
def undone(undo: Callable[[], object], *, only_after_failure: bool = False) -> Iterator[None]:
    """Calls `undo` on the way out, or only if an exception passes; `undo` may be called more than once."""
    try:
        try:
            yield
        except BaseException:
            undo()
            raise
        if not only_after_failure:
            undo()
    except BaseException:
        undo()
        raise


class TemporaryHook:
    """A hook that hangs on a model only while it is measured: `undisturbed` takes down what was left hanging."""

    def __init__(self, act: Callable[..., Any]):
        self.act = act

    def __call__(self, *given: Any) -> Any:
        return self.act(*given)


def unhook(where: nn.Module | Iterable[nn.Module], unwanted: Callable[[Any], bool]) -> None:
    """Takes the forward hooks and pre-hooks down for which `unwanted(hook)` is true: all of a model's, or only those on
    modules that are listed, by whoever knows where they hang."""
    for module, key, hook in hooks_on(where):
        if unwanted(hook):
            stores: list[Any] = [
                module._forward_pre_hooks_with_kwargs,
                module._forward_hooks_with_kwargs,
                module._forward_hooks_always_called,
                module._forward_pre_hooks,
                module._forward_hooks,
            ]
            for store in stores:
                store.pop(key, None)


def hooks_on(where: nn.Module | Iterable[nn.Module]) -> list[tuple[nn.Module, int, Any]]:
    """The forward hooks and pre-hooks of a model, or of modules that are listed, each with its module and its key."""
    return [
        (module, key, hook)
        for module in (walking.modules(where) if isinstance(where, nn.Module) else where)
        for store in (module._forward_pre_hooks, module._forward_hooks)
        if store
        for key, hook in store.items()
    ]


# --- measuring ----------------------------------------------------------------------------------------


@contextmanager
def undisturbed(model: nn.Module, modules: list[nn.Module] | None = None) -> Iterator[None]:
    """Eval mode, no gradients, no fused fast path; all of it restored, and the random state.

    PyTorch's `nn.TransformerEncoder` has a fused fast path that calls no submodule: it is switched off
    meanwhile. Modules compiled in place (`model.compile()`) or inside the model run uncompiled meanwhile.

    Part of that is global in PyTorch, so that a measurement in another thread waits until this one has ended. A model
    that is being measured cannot be measured a second time meanwhile, by another thread or by a hook: that is refused.
    `modules`: all of the model's, where somebody has listed them already.
    """
    before = _Before(model, walking.modules(model) if modules is None else modules)
    with undone(before.restore):
        before.wait_for_turn()
        before.remember_what_is_global()
        for module in before.training:
            module.training = False
        for module, _ in before.compiled:
            module._compiled_call_impl = None
        torch.backends.mha.set_fastpath_enabled(False)
        torch.set_grad_enabled(False)
        with torch.compiler.set_stance("force_eager") if before.has_graphs else nullcontext():
            yield


class _Before:
    """How everything was. `restore` may be called again, and does nothing to what was never changed."""

    def __init__(self, model: nn.Module, modules: list[nn.Module]):
        self.model = model
        self.thread = threading.get_ident()
        self.modules = modules
        self.training: list[nn.Module] = []
        self.compiled: list[tuple[nn.Module, Any]] = []
        self.has_graphs = self.remembers = False
        for module in modules:
            if module.training:
                self.training.append(module)
            if (implementation := getattr(module, "_compiled_call_impl", None)) is not None:
                self.compiled.append((module, implementation))
            if "_orig_mod" in module._modules:
                self.has_graphs = True
        self.hooks = {id(hook) for _, _, hook in hooks_on(modules) if isinstance(hook, TemporaryHook)}

    def wait_for_turn(self) -> None:
        """One thread measures at a time, in the order in which they came. A list, since an interrupt between two lines
        could leave a lock locked."""
        _MEASURING.append(self)
        since = time.monotonic()
        for other in _MEASURING[: _MEASURING.index(self)]:
            mine = set(map(id, self.modules))
            if not mine.isdisjoint(map(id, other.modules)):
                where = "in this thread" if other.thread == self.thread else "in another thread"
                raise ValueError(
                    f"this {type(self.model).__name__} is being measured already, {where}: "
                    "measure it afterwards, or measure a copy.deepcopy of it"
                )
        while (first := _MEASURING[0]).thread != self.thread:
            if time.monotonic() - since > PATIENCE:
                since = float("inf")
                warnings.warn(
                    f"this {type(self.model).__name__} waits to be measured until another thread has measured a "
                    f"{type(first.model).__name__}: if a hook of that waits for this thread, neither will end",
                    stacklevel=4,
                )
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


_MEASURING: list[_Before] = []  # those of the first one's thread measure; one more if a hook measures another model


def _end_what_other_threads_measured() -> None:
    """In a process that was forked: the one thread that it has is the only one that can measure."""
    for other in [other for other in _MEASURING if other.thread != threading.get_ident()]:
        other.restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_what_other_threads_measured)


def uncompiled(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """The model inside of `torch.compile`, whose graph would pass by our hooks, and a note that says so."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a model, a torch.nn.Module, got {model!r}")
    original = getattr(model, "_orig_mod", None)
    if isinstance(original, nn.Module):
        return original, ["the model was compiled: its original was run, uncompiled"]
    return model, []


def full_precision(tokens: Tensor) -> AbstractContextManager[object]:
    """Without autocast, where the tokens are."""
    kind = tokens.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
