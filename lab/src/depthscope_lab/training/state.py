"""From a running engine to the tensors of a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from depthscope_lab.training.task import Carry


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights and buffers by name; of tied ones the first, and name → first name for the others."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in seen:
            tied[name] = seen[place]
        else:
            seen[place] = name
            tensors[name] = tensor
    return tensors, tied


def restore_model(model: nn.Module, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    """The inverse of `model_tensors`, on the model's own device."""
    state = dict(tensors) | {name: tensors[first] for name, first in tied.items()}
    model.load_state_dict(state)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`number.key` → tensor for what every parameter has, and what is no tensor, as JSON: the same keys, groups."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for number, entries in state["state"].items():
        for key, value in entries.items():
            own = value.clone() if key == "step" and isinstance(value, Tensor) else value  # parameters may share one
            (tensors if isinstance(value, Tensor) else values)[f"{number}.{key}"] = own
    return tensors, {"values": values, "groups": state["param_groups"]}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
    """The inverse of `optimizer_tensors`."""
    state: dict[int, dict[str, Any]] = {}
    for place, value in {**rest["values"], **tensors}.items():
        number, key = place.split(".", 1)
        state.setdefault(int(number), {})[key] = value
    groups = [dict(group) | {"betas": tuple(group["betas"])} if "betas" in group else group for group in rest["groups"]]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def gather_carries(accelerator: Any, carries: Sequence[Carry]) -> dict[str, Tensor]:
    """`share.key` → tensor, of every process; empty without a memory."""
    gathered: dict[str, Tensor] = {}
    for part, carry in enumerate(carries):
        for key, tensor in (carry or {}).items():
            everyones = accelerator.gather(tensor.unsqueeze(0).contiguous())  # (processes, …)
            for process, one in enumerate(everyones):
                gathered[f"{process * len(carries) + part}.{key}"] = one
    return gathered


def carries_of(tensors: Mapping[str, Tensor], shares: range, device: torch.device) -> list[Carry]:
    """The inverse of `gather_carries`, for the shares of one process."""
    carries: list[Carry] = []
    for share in shares:
        prefix = f"{share}."
        found = {key.removeprefix(prefix): one.to(device) for key, one in tensors.items() if key.startswith(prefix)}
        carries.append(found or None)
    return carries
