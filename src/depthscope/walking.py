"""The modules and weights of a model, as PyTorch's own `named_modules` and `named_parameters` give them, and faster.

PyTorch's are generators inside generators, one per level: on a small model, a handful of such walks cost as much as a
forward pass. These are plain lists, made by one loop. The order and the names are the same, and each module or weight
is there once.
"""

from __future__ import annotations

from torch import nn


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules with their paths, the model itself first, as ""."""
    found: dict[int, tuple[str, nn.Module]] = {}
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in found:
            continue
        found[id(module)] = name, module
        if module._modules:
            prefix = f"{name}." if name else ""
            inner = [(prefix + key, child) for key, child in module._modules.items() if child is not None]
            waiting.extend(reversed(inner))
    return list(found.values())


def modules(model: nn.Module) -> list[nn.Module]:
    """All modules, the model itself first."""
    found: dict[int, nn.Module] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            if module._modules:
                waiting.extend(reversed([child for child in module._modules.values() if child is not None]))
    return list(found.values())


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All weights with their names; one that stands in several places has the first name."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for path, module in named_modules(model):
        for key, weights in module._parameters.items():
            if weights is not None and id(weights) not in found:
                found[id(weights)] = f"{path}.{key}" if path else key, weights
    return list(found.values())


def parameters(model: nn.Module) -> list[nn.Parameter]:
    """All weights."""
    found = {id(p): p for module in modules(model) for p in module._parameters.values() if p is not None}
    return list(found.values())


def has_parameters(model: nn.Module) -> bool:
    """Whether there is any weight, without looking for all of them."""
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if any(weights is not None for weights in module._parameters.values()):
            return True
        waiting.extend(child for child in module._modules.values() if child is not None)
    return False
