"""What a tokenizer tells of the inputs: the text of a token, and whether sequences begin as the model is used to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from depthscope.inputs import Batch

# The argument with the ids that the blocks of a part read; of other parts (images) no token has a text.
_IDS = {"": "input_ids", "encoder": "input_ids", "text": "input_ids", "decoder": "decoder_input_ids"}


class Spelling:
    """The ids of a batch, and the tokenizer that can spell them; without one of the two no token has a text."""

    def __init__(self, tokenizer: Any = None, batch: Batch | None = None):
        self.decode = getattr(tokenizer, "decode", None)
        self.given: dict[str, Any] = {} if batch is None else batch.kwargs

    def text(self, part: str, shape: tuple[int, int], sample: int, place: int) -> str:
        """The text of one token of the blocks' (batch, n); "" if it has none."""
        ids = self.given.get(_IDS.get(part, ""))
        if self.decode is None or not isinstance(ids, Tensor) or tuple(ids.shape) != shape:
            return ""
        return str(self.decode([int(ids[sample, place])]))


def without_first_token(tokenizer: Any, batch: Batch) -> int:
    """Sequences that do not begin with the token that the tokenizer has for it (BOS); 0 if it has none."""
    first, ids = getattr(tokenizer, "bos_token_id", None), batch.kwargs.get("input_ids")
    if first is None or not isinstance(ids, Tensor) or ids.ndim != 2:
        return 0
    mask = batch.kwargs.get("attention_mask")
    real = mask != 0 if isinstance(mask, Tensor) and mask.shape == ids.shape else torch.ones_like(ids, dtype=torch.bool)
    begins = ids.gather(1, real.int().argmax(dim=1, keepdim=True).to(ids.device)).squeeze(1)
    return int((begins != first).sum())
