"""The adaptive softmax of Grave et al. 2017, tied to the input embedding, as Transformer-XL uses it on WikiText-103.

Words are sorted by frequency. The frequent ones stand in the head with one entry per cluster of rare words;
a rare word's probability is that of its cluster times its own within the cluster. All words have the full
width (the authors' `div_val` 1), and one matrix serves the input and the output.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIKITEXT103_CUTOFFS = (20_000, 40_000, 200_000)


def cutoffs_below(vocabulary: int, cutoffs: tuple[int, ...] = WIKITEXT103_CUTOFFS) -> tuple[int, ...]:
    """Those cutoffs that leave something behind them; none for a small vocabulary: a plain softmax."""
    return tuple(cutoff for cutoff in cutoffs if cutoff < vocabulary)


class TiedAdaptiveSoftmax(nn.Module):
    """Embedding and output of a language model in one weight (vocabulary, d).

    log p(w) = log softmax(head)_w                                      for w < c₁
    log p(w) = log softmax(head)_{c₁+k} + log softmax(cluster k)_w      for cutoff k ≤ w < cutoff k + 1

    with head = [W_{<c₁}; C] x + [b_{<c₁}; b_C] and cluster k = W_{c_k ≤ w < c_{k+1}} x + b. Without cutoffs it
    is a plain tied softmax.
    """

    def __init__(self, vocabulary: int, width: int, cutoffs: tuple[int, ...] = ()):
        super().__init__()
        edges = (0, *cutoffs, vocabulary)
        if any(low >= high for low, high in pairwise(edges)):
            raise ValueError(
                f"expected cutoffs that rise between 0 and the vocabulary of {vocabulary} words, got {cutoffs}"
            )
        self.cutoffs = (*cutoffs, vocabulary)
        self.weight = nn.Parameter(torch.empty(vocabulary, width))
        self.bias = nn.Parameter(torch.empty(vocabulary))
        # Without clusters they are empty and in no loss: distributed training would wait for their gradients.
        self.cluster_weight = nn.Parameter(torch.empty(len(cutoffs), width), requires_grad=bool(cutoffs))
        self.cluster_bias = nn.Parameter(torch.empty(len(cutoffs)), requires_grad=bool(cutoffs))

    def embed(self, ids: Tensor) -> Tensor:
        """ids (…) → (…, d), unscaled."""
        return F.embedding(ids, self.weight)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """−log p(target) in nats: hidden (…, d), targets (…) → (…). Clusters that no target is in cost nothing.

        On the meta device, where targets are not known, all are taken for frequent words.
        """
        x, words = hidden.flatten(0, -2), targets.flatten()
        cluster = torch.zeros_like(words)  # 0: the head
        for cutoff in self.cutoffs[:-1]:
            cluster += words >= cutoff
        in_head = torch.where(cluster == 0, words, self.cutoffs[0] - 1 + cluster)
        losses = F.cross_entropy(self._head(x), in_head, reduction="none")
        for k, (low, high) in enumerate([] if words.is_meta else self._clusters(), start=1):
            rows = (cluster == k).nonzero().squeeze(1)
            if len(rows):
                logits = F.linear(x[rows], self.weight[low:high], self.bias[low:high])
                within = F.cross_entropy(logits, words[rows] - low, reduction="none")
                losses = losses.index_add(0, rows, within)
        return losses.view(targets.shape)

    def _head(self, x: Tensor) -> Tensor:
        shortlist = self.cutoffs[0]
        words = F.linear(x, self.weight[:shortlist], self.bias[:shortlist])
        if len(self.cutoffs) == 1:
            return words
        return torch.cat([words, F.linear(x, self.cluster_weight, self.cluster_bias)], dim=-1)

    def _clusters(self) -> list[tuple[int, int]]:
        return list(pairwise(self.cutoffs))
