"""What is around a model that is watched: wrappers, compiled code, a backward pass, other processes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


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
