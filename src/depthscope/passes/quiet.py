"""Running somebody's model and leaving no trace, also after an exception."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn


def uncompiled(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """The model behind `torch.compile`, whose graph would pass by our hooks, and a note that says so."""
    original = getattr(model, "_orig_mod", None)
    if isinstance(original, nn.Module):
        return original, ["the model was compiled: its original was run, uncompiled"]
    return model, []


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, no fused fast path; all of it restored, and the random state.

    PyTorch's `nn.TransformerEncoder` has a fused fast path that calls no submodule: it is switched off
    meanwhile. Modules compiled in place (`model.compile()`) or inside the model run uncompiled meanwhile.
    """
    modules = list(model.modules())
    training = [module for module in modules if module.training]
    compiled = [(module, module._compiled_call_impl) for module in modules if _is_compiled(module)]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    graphs = any(isinstance(getattr(module, "_orig_mod", None), nn.Module) for module in modules)
    eager = torch.compiler.set_stance("force_eager") if graphs else nullcontext()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=list(devices)), torch.no_grad(), eager:
        try:
            for module in training:
                module.training = False
            for module, _ in compiled:
                module._compiled_call_impl = None
            torch.backends.mha.set_fastpath_enabled(False)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            for module, implementation in compiled:
                module._compiled_call_impl = implementation
            for module in training:
                module.training = True


def full_precision(tokens: Tensor) -> AbstractContextManager[object]:
    """Without autocast, where the tokens are."""
    kind = tokens.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None
