"""How large the model of a Hugging Face configuration is, found out without building all of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

# num_hidden_layers, encoder_layers, n_layer, and not layer_norm_eps
_COUNTS_LAYERS = re.compile(r"layers$|(?:^|_)n(?:um)?_layer$")
_DEEP = 256  # layers: fewer are built on the meta device in no time


def require_depth(raw: Any, name: str) -> None:
    """Refuses a configuration file with more layers than this machine can hold, whatever their width."""
    from depthscope.machine import require_memory

    depth = max(_layers_in_file(raw, name), default=0)
    require_memory(0, what=f"{name} with {depth} layers", blocks=depth)


def _layers_in_file(raw: Any, owner: str) -> Iterator[int]:
    for name, value in raw.items() if isinstance(raw, dict) else ():
        if type(value) in (int, float) and _COUNTS_LAYERS.search(name):
            if not math.isfinite(value):
                raise ValueError(f"expected a number of layers as {name} of {owner}, got {value}")
            yield int(value)
        yield from _layers_in_file(value, owner)


def size_of(config: Any, build: Callable[[Any], Any], name: str) -> tuple[int, int]:
    """Layers and parameters. Of a deep model from one and two layers: a million would take an hour to build."""
    import torch

    from depthscope.machine import count_parameters, counting

    def parameters(config: Any) -> int:
        with torch.device("meta"):
            return count_parameters(build(config))

    depth = max((layers for _, _, layers in _layers(config)), default=0)
    with counting(f"the configuration of {name}"):
        if depth <= _DEEP:
            return depth, parameters(config)
        one, two = (parameters(_with_layers(config, layers)) for layers in (1, 2))
    return depth, one + (depth - 1) * (two - one)


def _layers(config: Any) -> Iterator[tuple[Any, str, int]]:
    """Every number of layers in a configuration and in those inside it: where it stands, its name, the number."""
    for name, value in vars(config).items():
        if type(value) is int and _COUNTS_LAYERS.search(name):
            yield config, name, value
        elif hasattr(value, "model_type"):
            yield from _layers(value)


def _with_layers(config: Any, layers: int) -> Any:
    """The same with `layers` layers wherever it is deep; lists with an entry per layer are cut."""
    shallow = deepcopy(config)
    for place, name, depth in list(_layers(shallow)):
        if depth > _DEEP:
            for other, value in list(vars(place).items()):
                if isinstance(value, list) and len(value) == depth:
                    setattr(place, other, value[:layers])
            setattr(place, name, layers)
    return shallow
