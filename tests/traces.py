"""Everything that measuring a model could leave behind in it."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def hooks_of(model: nn.Module) -> list[int]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [len(getattr(module, kind)) for module in model.modules() for kind in kinds]


def state_of(model: nn.Module) -> dict[str, Any]:
    """What must be the same before and after."""
    return {
        "keys": list(model.state_dict()),
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": hooks_of(model),
        "training": [module.training for module in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grads": [p.grad is None for p in model.parameters()],
        "attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
        "grad_mode": torch.is_grad_enabled(),
        "fast_path": torch.backends.mha.get_fastpath_enabled(),
        "functions": (F.scaled_dot_product_attention, F.softmax),
    }
