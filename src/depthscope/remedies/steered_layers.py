"""Layers whose weight is computed from V and Λ: what a value or an output projection becomes while H is steered.

The weight of such a layer is no parameter but a property: it is always that of the V and Λ of this moment, for forward
passes, measures of weights and saving alike. A state_dict has it under its old key besides V and Λ, so that a saved
model can be loaded without depthscope; what stands there is left alone when V and Λ are loaded.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from depthscope.remedies.eigenform import Eigenform

Role = Literal["value", "output", "fused"]
QUERY_KEY = "reparameterised_query_key"


class Steered:
    """A layer of an importable class, for copies and pickles: it takes the class of the layer that it was."""

    form: Eigenform
    role: Role
    transposed: bool  # whether the weight is stored (out, in), as in `nn.Linear`

    @property
    def weight(self) -> Tensor:
        """As the layer that it was would have it."""
        if self.role == "output":
            found = self.form.output()
        elif self.role == "value":
            found = self.form.vectors()
        else:
            found = torch.cat([getattr(self.form.owner, QUERY_KEY), self.form.vectors()], dim=1)
        return found.mT if self.transposed else found

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        weight = self.weight
        destination[f"{prefix}weight"] = weight if keep_vars else weight.detach().clone().contiguous()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}weight", None)  # what is computed is not loaded
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]


class SteeredLinear(Steered, nn.Linear):  # type: ignore[override]
    """In the place of PyTorch's."""

    transposed = True


def steered_kind(layer: nn.Module) -> type[nn.Module] | None:
    """The class that a layer can take; None: there is none for it."""
    if type(layer) is nn.Linear:
        return SteeredLinear
    if type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils":
        from depthscope.remedies.steered_conv1d import SteeredConv1D

        return SteeredConv1D
    return None
