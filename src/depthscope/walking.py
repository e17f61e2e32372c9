"""The modules and weights of a model, as PyTorch's own `named_modules` and `named_parameters` give them, and faster.

PyTorch's are generators inside generators, one per level: on a small model, a handful of such walks cost as much as a
forward pass. These are plain lists, made by plain loops that call nothing for a leaf. The order and the names are the
same, and each module or weight is there once.
"""

from __future__ import annotations

from torch import nn


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules with their paths, the model itself first, as ""."""
    found = {id(model): ("", model)}

    def add(prefix: str, children: dict[str, nn.Module | None]) -> None:
        for key, child in children.items():
            if child is not None and id(child) not in found:
                found[id(child)] = prefix + key, child
                if child._modules:
                    add(f"{prefix}{key}.", child._modules)

    add("", model._modules)
    return list(found.values())


def modules(model: nn.Module) -> list[nn.Module]:
    """All modules, the model itself first."""
    found = {id(model): model}

    def add(children: dict[str, nn.Module | None]) -> None:
        for child in children.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                if child._modules:
                    add(child._modules)

    add(model._modules)
    return list(found.values())


def paths_around(path: str) -> list[str]:
    """The paths of the modules that stand around this one, from the outside, without the model itself."""
    words = path.split(".")
    return [".".join(words[:count]) for count in range(1, len(words))]


def way_to(model: nn.Module, path: str) -> list[nn.Module]:
    """The modules on the way to a path: the model itself first, and last the one that stands there."""
    way = [model]
    for word in path.split(".") if path else ():
        child = way[-1]._modules[word]
        assert child is not None
        way.append(child)
    return way


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
