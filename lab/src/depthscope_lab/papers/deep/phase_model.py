"""Many Vision Transformers at once that differ in α and τ only, as plain functions of stacked weights.

A deep, narrow model spends half of its time in calling operations. Here K models run in one: their weights have a
leading axis of models, every product is a batched one, and α and τ are tensors of one number per model. Equal to
`VisionTransformer` with `ResidualWeight(α)` and `DeEscalate(τ, at="output")`, outputs and gradients.

Shapes: K models, L blocks, B images of n tokens (the class token first), width d. Tokens are (K, B·n, d).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from depthscope.models import VisionTransformer
from depthscope.models.attention import join_heads, split_heads
from depthscope_lab.papers.simulation.blocks import NORM_EPS

QKV = "attention.qkv"  # W_Q, W_K, W_V one above the other, so that one product has all three
_PROJECTIONS = ("query", "key", "value")


@dataclass(frozen=True)
class Stack:
    """The weights of K models. `blocks` has (L, K, …), `ends` what stands before and behind the blocks, (K, …)."""

    blocks: dict[str, Tensor]
    ends: dict[str, Tensor]
    alpha: Tensor  # (K,)
    tau: Tensor  # (K,)
    heads: int
    pre_norm: bool
    patch: int

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.blocks.values(), *self.ends.values()]


def stacked(model: VisionTransformer, alphas: list[float], taus: list[float]) -> Stack:
    """K copies of a model, each with its own α and τ."""
    count = len(alphas)
    first: Any = model.encoder.blocks[0]

    def copies(value: Tensor, dim: int) -> Tensor:
        """With an axis of K models at `dim`."""
        shape = list(value.shape)
        shape.insert(dim, count)
        return value.detach().unsqueeze(dim).expand(shape).clone().requires_grad_()

    states: list[dict[str, Tensor]] = [dict(block.named_parameters()) for block in model.encoder.blocks]
    for state in states:
        for kind in ("weight", "bias"):
            state[f"{QKV}.{kind}"] = torch.cat([state.pop(f"attention.{name}.{kind}") for name in _PROJECTIONS])
    whole = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    ends = {name: value for name, value in model.named_parameters() if not name.startswith("encoder.blocks.")}
    dtype = model.head.weight.dtype
    return Stack(
        {name: copies(value, 1) for name, value in whole.items()},
        {name: copies(value, 0) for name, value in ends.items()},
        torch.tensor(alphas, dtype=dtype),
        torch.tensor(taus, dtype=dtype),
        heads=first.attention.heads,
        pre_norm=first.wiring.placement == "pre",
        patch=model.embed.kernel_size[0],
    )


def scores_of(stack: Stack, images: Tensor) -> Tensor:
    """images (B, channels, s, s), the same for all models → class scores (K, B, classes)."""
    x, n = _embedded(stack, images)
    alpha, tau = stack.alpha[:, None, None], stack.tau[:, None, None, None]
    run = _pre_norm if stack.pre_norm else _post_norm
    names = list(stack.blocks)
    for values in zip(*(value.unbind() for value in stack.blocks.values()), strict=True):
        x = run(dict(zip(names, values, strict=True)), x, alpha, n, stack.heads)
        tokens = x.unflatten(1, (-1, n))
        x = torch.addcmul(tokens, tau, tokens.mean(dim=2, keepdim=True), value=-1).flatten(1, 2)
    if stack.pre_norm:
        x = _norm(stack.ends, "encoder.final_norm", x)
    read = x.unflatten(1, (-1, n))[:, :, 0]  # (K, B, d)
    return torch.baddbmm(stack.ends["head.bias"].unsqueeze(1), read, stack.ends["head.weight"].mT)


def _embedded(stack: Stack, images: Tensor) -> tuple[Tensor, int]:
    """The tokens that enter block 1, and how many each image has."""
    ends, count = stack.ends, len(stack.alpha)
    patches = F.unfold(images, stack.patch, stride=stack.patch).mT  # (B, patches, pixels)
    weight = ends["embed.weight"].flatten(2)  # (K, d, pixels)
    tokens = torch.einsum("bnp,kdp->kbnd", patches, weight) + ends["embed.bias"][:, None, None, :]
    first = ends["class_token"].expand(-1, len(images), -1, -1)  # (K, B, 1, d): the stored one is (1, 1, d)
    tokens = torch.cat([first.reshape(count, len(images), 1, -1), tokens], dim=2) + ends["positions"]
    return tokens.flatten(1, 2), tokens.shape[2]


def _post_norm(block: dict[str, Tensor], x: Tensor, alpha: Tensor, n: int, heads: int) -> Tensor:
    x = _norm(block, "norm1", torch.addcmul(x, alpha, _attention(block, x, n, heads)))
    return _norm(block, "norm2", torch.addcmul(x, alpha, _ffn(block, x)))


def _pre_norm(block: dict[str, Tensor], x: Tensor, alpha: Tensor, n: int, heads: int) -> Tensor:
    x = torch.addcmul(x, alpha, _attention(block, _norm(block, "norm1", x), n, heads))
    return torch.addcmul(x, alpha, _ffn(block, _norm(block, "norm2", x)))


def _attention(block: dict[str, Tensor], x: Tensor, n: int, heads: int) -> Tensor:
    projected = _linear(block, QKV, x).unflatten(1, (-1, n))  # (K, B, n, 3d)
    q, k, v = (split_heads(part, heads) for part in projected.chunk(3, dim=-1))  # (K, B, h, n, d/h)
    attended = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1) @ v
    return _linear(block, "attention.output", join_heads(attended).flatten(1, 2))


def _ffn(block: dict[str, Tensor], x: Tensor) -> Tensor:
    return _linear(block, "ffn.2", _linear(block, "ffn.0", x).relu_())


def _linear(block: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return torch.baddbmm(block[f"{name}.bias"].unsqueeze(1), x, block[f"{name}.weight"].mT)


def _norm(block: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    gain, bias = (block[f"{name}.{kind}"].unsqueeze(1) for kind in ("weight", "bias"))
    return torch.addcmul(bias, F.layer_norm(x, x.shape[-1:], eps=NORM_EPS), gain)
