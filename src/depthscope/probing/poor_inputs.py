"""Whether a model's ids say something: how many the tokenizer does not know, and whether they repeat themselves."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor

from depthscope.inputs import Batch

_RUN = 8  # tokens in a row: a text of four letters has 65,536 of them, a line that repeats itself as many as its length
_MOST = 64  # sequences that are looked at


class IdsSeen:
    """Counts over the batches of a probe; nothing is kept of inputs that are no ids."""

    def __init__(self) -> None:
        self.tokens = self.unknown = self.foreign = self.runs = 0
        self.sequences = self.without_first = 0  # of all, and that do not begin with the tokenizer's first token
        self.first_token = ""
        self.known = False  # whether a tokenizer said what is unknown
        self.rows: list[bytes] = []
        self.different: set[bytes] = set()

    @staticmethod
    def asked(batch: Batch) -> list[Tensor]:
        """The ids (batch, n) and which are real, where they are; nothing of inputs that are no ids."""
        ids = batch.kwargs.get("input_ids", next(iter(batch.args), None))
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.is_complex():
            return []
        mask = batch.kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            return [ids, mask != 0]
        return [ids, torch.ones_like(ids, dtype=torch.bool)]

    def see(self, tokenizer: Any, answers: list[Tensor]) -> None:
        """What was asked for, on the host."""
        if not answers:
            return
        ids, real = answers[0].long(), answers[1] != 0
        self.tokens += int(real.sum())
        self.sequences += len(ids)
        if tokenizer is not None:
            self.known = True
            unknown, first = (getattr(tokenizer, f"{name}_token_id", None) for name in ("unk", "bos"))
            self.unknown += 0 if unknown is None else int(((ids == unknown) & real).sum())
            if isinstance(tokenizer, Sized):
                self.foreign += int(((ids >= len(tokenizer)) & real).sum())
            if first is not None:
                self.first_token = str(getattr(tokenizer, "bos_token", ""))
                self.without_first += int((ids.gather(1, real.int().argmax(dim=1, keepdim=True)) != first).sum())
        for row, there in zip(ids[: _MOST - len(self.rows)], real, strict=False):
            words = row[there].contiguous()
            self.rows.append(words.numpy().tobytes())
            if len(words) >= _RUN:
                runs = words.unfold(0, _RUN, 1).contiguous().numpy()
                self.different |= {run.tobytes() for run in runs}
                self.runs += len(runs)

    def to_dict(self) -> dict[str, Any]:
        """Shares; what was not seen is left out."""
        if not self.tokens:
            return {}
        found = {"different": len(self.different) / self.runs} if self.runs else {}
        if self.known:
            found |= {"unknown": self.unknown / self.tokens, "foreign": self.foreign / self.tokens}
        return {**found, "equal": len(self.rows) > 1 and len(set(self.rows)) == 1}

    def notes(self) -> list[str]:
        """Of a causal model: whether its sequences begin as it was trained."""
        if not self.without_first:
            return []
        return [
            f"{self.without_first} of {self.sequences} sequences do not begin with {self.first_token!r}, the "
            "tokenizer's first token (BOS): a model that was trained with it may behave differently without"
        ]
