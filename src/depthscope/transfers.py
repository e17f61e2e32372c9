"""What is asked of a device. Each answer makes the host wait until the device has done all that it was given."""

from __future__ import annotations

import torch
from torch import Tensor


def fetched(tensors: list[Tensor]) -> list[Tensor]:
    """The same numbers in float64 on the host: every device is asked once for all that it has, and the processes that
    share a tensor for its parts."""
    tensors = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in tensors]
    found: list[Tensor] = [torch.empty(0)] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        here = [number for number, tensor in enumerate(tensors) if tensor.device == device]
        wide = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPU has no float64
        flat = torch.cat([tensors[number].detach().to(wide).reshape(-1) for number in here]).cpu().double()
        for number, part in zip(here, flat.split([tensors[number].numel() for number in here]), strict=True):
            found[number] = part.reshape(tensors[number].shape)
    return found


def may_be_any(flags: Tensor) -> bool:
    """Whether any is true, where that spares work; another device than the CPU is not asked: yes, there may be."""
    return flags.device.type != "cpu" or bool(flags.any())
