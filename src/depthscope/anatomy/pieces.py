"""Parts of parameters, and what weights are for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

Role = Literal["queries_keys", "values_output", "ffn", "norms", "other"]


@dataclass(frozen=True)
class Piece:
    """A parameter, or the parts of it that `cut` takes out of a tensor of its shape: its own, or its gradient's."""

    parameter: Tensor
    cut: Callable[[Tensor], tuple[Tensor, ...]] | None = None  # None: all of it

    def of(self, values: Tensor) -> tuple[Tensor, ...]:
        return (values,) if self.cut is None else self.cut(values)


class HiddenWeights(ValueError):
    """A layer that a wrapper, such as an adapter of one's own, stands in the place of: its matrix is not known. What
    its parameters are for is known all the same."""

    def __init__(self, layer: nn.Module, roles: Mapping[Role, tuple[Piece, ...]]):
        super().__init__(
            f"expected a linear layer with a weight, got {type(layer).__name__}: merge the adapter into the weights, "
            "or give the wrapper a property `weight`"
        )
        self.roles = roles


def pieces_of_layers(*layers: nn.Module | None) -> tuple[Piece, ...]:
    """All parameters of layers, also those that an adapter has put into them."""
    return tuple(Piece(parameter) for layer in layers if layer is not None for parameter in layer.parameters())


def thirds(values: Tensor, dim: int, first: int, last: int) -> tuple[Tensor, ...]:
    """Some of the three equal parts along an axis: queries, keys and values of one layer."""
    return values.chunk(3, dim=dim)[first:last]
