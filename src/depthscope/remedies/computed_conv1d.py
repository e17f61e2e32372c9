"""The layer of GPT-2 (a linear one, stored transposed) with a computed weight; a module of its own, as it needs
transformers."""

from __future__ import annotations

from transformers.pytorch_utils import Conv1D

from depthscope.remedies.reparameterise import Computed


class ComputedConv1D(Computed, Conv1D):  # type: ignore[misc]
    """In the place of Hugging Face's."""

    transposed = False
