"""The modules and weights of a model, as PyTorch's own `named_modules` and `named_parameters` give them, and faster.

PyTorch's are generators inside generators, one per level: on a small model, a handful of such walks cost as much as a
forward pass. These are plain lists, made by one plain loop that calls nothing for a leaf. The order and the names are
the same, and each module or weight is there once.
"""

from __future__ import annotations

from torch import nn


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules with their paths, the model itself first, as ""."""
    found = {id(model): ("", model)}
    _add(found, "", model._modules)
    return list(found.values())


def _add(found: dict[int, tuple[str, nn.Module]], prefix: str, children: dict[str, nn.Module | None]) -> None:
    # No function inside another that calls itself: that is a cycle, which waits for the garbage collector.
    for key, child in children.items():
        if child is not None and id(child) not in found:
            found[id(child)] = prefix + key, child
            if child._modules:
                _add(found, f"{prefix}{key}.", child._modules)


def modules(model: nn.Module) -> list[nn.Module]:
    """All modules, the model itself first."""
    return [module for _, module in named_modules(model)]


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
    return weights_in(modules(model))


def weights_in(listed: list[nn.Module]) -> list[nn.Parameter]:
    """The weights that these modules have themselves, each once."""
    return list({id(w): w for module in listed for w in module._parameters.values() if w is not None}.values())


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
