"""The logit lens: what the model would predict if a block were its last, against what it predicts.

KL(p_final ‖ p_block) in nats, how often the first choice is the final one, and how many of the five likeliest tokens
are (nostalgebraist 2020; as in Csordás et al. 2025, arXiv 2505.13898).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy
from depthscope.inputs import Batch
from depthscope.probing.losses import ids_in, logits_in
from depthscope.usage.followed import Means, taken
from depthscope.usage.forward import ForwardPass
from depthscope.usage.tail import Tail, TailWatch, agrees

TOP = 5
_CHUNK = 2**23  # logits at a time: 32 MB of float32, whatever the vocabulary


class Lens:
    """Of one model: the tail is looked for in every pass, since what modules return is only there."""

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        self.model = model
        self.watch = TailWatch(model, anatomy)
        self.means = Means()
        self.why_not = ""  # where there is no lens

    def see(self, batch: Batch, returned: Any, forward: ForwardPass) -> None:
        """After a pass: every block's followed tokens through the tail."""
        if self.why_not or forward.last is None:
            return
        visit, tokens, source = forward.last
        ids = _ids(batch, visit.part)
        logits = None if ids is None else logits_in(self.model, returned, ids, visit.shape[-1])
        if logits is None:
            self.why_not = "the model returns no logits for every token: no logit lens (load it with its head)"
            return
        config: Any = getattr(self.model, "config", None)
        tail = self.watch.way(source, logits, getattr(config, "final_logit_softcapping", None))
        places = forward.followed(tokens, visit.real)
        ours = forward.kept[visit.number]
        if tail is None or not agrees(tail, ours, taken(logits.reshape(*tokens.shape[:2], -1), places)):
            self.why_not = (
                "what stands between the last block and the logits is no chain of modules that makes the model's own "
                "logits again: no logit lens"
            )
            return
        for chunk in torch.arange(len(ours), device=ours.device).split(max(1, _CHUNK // logits.shape[-1])):
            self._compare(tail, forward.kept, chunk, visit.number)

    def _compare(self, tail: Tail, kept: dict[int, Tensor], chunk: Tensor, last: int) -> None:
        final = torch.log_softmax(tail.logits(kept[last][chunk]), dim=-1)  # (k, v)
        top = final.topk(min(TOP, final.shape[-1]), dim=-1).indices  # (k, 5)
        p = final.exp()
        for block, tokens in kept.items():
            if tokens.shape != kept[last].shape:
                continue  # tokens that were merged on the way have no counterpart at the end
            lens = final if block == last else torch.log_softmax(tail.logits(tokens[chunk]), dim=-1)
            choice = lens.topk(top.shape[-1], dim=-1).indices
            both = (choice.unsqueeze(-1) == top.unsqueeze(-2)).any(dim=-1)
            kl = torch.where(p > 0, p * (final - lens), 0.0).sum(dim=-1, dtype=torch.float64).clamp(min=0)
            for name, value in (
                ("lens_kl", kl),
                ("lens_top1", choice[:, 0] == top[:, 0]),
                ("lens_top5", both),
            ):
                self.means.add(block, name, value.double().mean(), len(chunk))


def _ids(batch: Batch, part: str) -> Tensor | None:
    """What the blocks in question read: a decoder has ids of its own."""
    own = batch.kwargs.get("decoder_input_ids")
    return own if part.startswith("decoder") and isinstance(own, Tensor) else ids_in(batch)
