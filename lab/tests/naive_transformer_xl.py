"""Transformer-XL by its equations, token by token and head by head: what the fast form is held against.

Dai et al. 2019, §3.3, with the authors' code for what the paper leaves open; one stream, float64, no tricks.
"""

import math

import torch
from torch import Tensor

from depthscope_lab.models.transformer_xl import Context, TransformerXL, TransformerXLBlock


class NaiveStream:
    """One row of a batch: remembers everything, and looks only as far as the context says."""

    def __init__(self, model: TransformerXL, context: Context):
        self.model, self.context = model, context
        self.inputs: list[list[Tensor]] = [[] for _ in model.blocks]  # every token's input of every block
        self.ffn_inputs: list[list[Tensor]] = [[] for _ in model.blocks]  # after the first norm

    def read(self, ids: list[int]) -> list[Tensor]:
        """One segment: what the softmax reads, for each token."""
        start = len(self.inputs[0])
        remembered = range(max(0, start - self.context.memory), start)
        x = [self.model.softmax.weight[word] * math.sqrt(self.model.config.width) for word in ids]
        for number, block in enumerate(self.model.blocks):
            self.inputs[number] += x
            seen = list(remembered) + list(range(start, start + len(ids)))
            x = self._block(block, number, start, seen)
        if self.model.config.final_norm:
            x = [layer_norm(token, self.model.final_norm) for token in x]
        return x

    def _block(self, block: TransformerXLBlock, number: int, start: int, seen: list[int]) -> list[Tensor]:
        inputs, pre = self.inputs[number], block.placement == "pre"
        tokens = range(start, len(inputs))
        after = []
        for i in tokens:
            keys = [j for j in seen if j <= i and (not self.context.same_length or i - j < self.context.memory)]
            read = {j: layer_norm(inputs[j], block.norm1) if pre else inputs[j] for j in {*keys, i}}
            y = inputs[i] + self._attend(block, i, keys, read)
            after.append(y if pre else layer_norm(y, block.norm1))
        if pre:
            return [y + ffn(block, layer_norm(y, block.norm2)) for y in after]
        self.ffn_inputs[number] += after
        mended = [self._deescalate(block, number, i, tokens) for i in tokens]
        return [layer_norm(y + ffn(block, y), block.norm2) for y in mended]

    def _attend(self, block: TransformerXLBlock, i: int, keys: list[int], read: dict[int, Tensor]) -> Tensor:
        a, model = block.attention, self.model
        d = model.config.width
        size = d // a.heads
        outputs = []
        for head in range(a.heads):
            rows = slice(head * size, (head + 1) * size)
            q = a.query.weight[rows] @ read[i]
            scores = []
            for j in keys:
                distance = i - j if self.context.clamp is None else min(i - j, self.context.clamp)
                r = a.position.weight[rows] @ sinusoid(distance, d)
                k = a.key.weight[rows] @ read[j]
                scores.append(((q + model.u[head]) @ k + (q + model.v[head]) @ r) / math.sqrt(size))
            total = sum(math.exp(s) for s in scores)
            p = [math.exp(s) / total for s in scores]
            outputs.append(sum(p[c] * (a.value.weight[rows] @ read[j]) for c, j in enumerate(keys)))
        return a.output.weight @ torch.cat(outputs)

    def _deescalate(self, block: TransformerXLBlock, number: int, i: int, segment: range) -> Tensor:
        x, how = self.ffn_inputs[number], block.carried_mean
        if how is None:
            return x[i]
        if how.leaks:
            return x[i] - how.tau * sum(x[j] for j in segment) / len(segment)
        if i == 0 and how.mean.shrink is None:
            return x[i]
        beta = getattr(how.mean, "decay", 1.0)
        weights = [beta ** (i - j) for j in range(i + 1)]
        mean = sum(w * x[j] for j, w in enumerate(weights)) / (sum(weights) + (how.mean.shrink or 0))
        return x[i] - how.tau * mean


def layer_norm(x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    centred = x - x.sum() / len(x)
    return centred / math.sqrt(float(centred @ centred) / len(x) + norm.eps) * norm.weight + norm.bias


def ffn(block: TransformerXLBlock, x: Tensor) -> Tensor:
    first, last = block.ffn[0], block.ffn[3]
    return last.weight @ (first.weight @ x + first.bias).clamp(min=0) + last.bias


def sinusoid(distance: int, width: int) -> Tensor:
    angles = [distance / 10000 ** (2 * k / width) for k in range(width // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


def log_probability(model: TransformerXL, x: Tensor, word: int) -> float:
    """Head first, then the cluster, each as a softmax written out."""
    softmax = model.softmax
    first, *rest = softmax.cutoffs
    head = [float(softmax.weight[w] @ x + softmax.bias[w]) for w in range(first)]
    head += [float(w @ x + b) for w, b in zip(softmax.cluster_weight, softmax.cluster_bias, strict=True)]
    partition = math.log(sum(map(math.exp, head)))
    if word < first:
        return head[word] - partition
    low = first
    for cluster, high in enumerate(rest):
        if word < high:
            inside = [float(softmax.weight[w] @ x + softmax.bias[w]) for w in range(low, high)]
            return head[first + cluster] - partition + inside[word - low] - math.log(sum(map(math.exp, inside)))
        low = high
    raise AssertionError(f"word {word} is beyond the vocabulary")
