"""What the study of the leak computes: trained language models, and deep stacks at initialisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.measures import token_similarity
from depthscope.models import Block, BlockConfig, CausalLM, Encoder, theorem, xavier
from depthscope.progress import Tick
from depthscope.remedies import DeEscalate, Ema, Prefix, apply, deescalate

WARM_UP = 50  # steps; without it post-norm blocks start with their largest updates


def _complete(at: str, mixing: str | Prefix | Ema) -> DeEscalate:
    """τ = 1, the paper's; the full mean by its explicit permission only."""
    return DeEscalate(tau=1.0, at=at, mixing=mixing, allow_leak=mixing == "full")


NONE = "no remedy"
MODELS: dict[str, DeEscalate | None] = {
    NONE: None,
    "full mean": _complete("ffn_input", "full"),
    "full mean, at output": _complete("output", "full"),
    "prefix": _complete("ffn_input", Prefix()),
    "prefix, at output": _complete("output", Prefix()),
    "prefix, κ = 1": _complete("ffn_input", Prefix(shrink=1.0)),
    "EMA": _complete("ffn_input", Ema()),
}
LEAKING = tuple(name for name, remedy in MODELS.items() if remedy is not None and remedy.mixing == "full")
CAUSAL = tuple(name for name in MODELS if name not in LEAKING and name != NONE)


@dataclass(frozen=True)
class Stack:
    """A stack at initialisation: a remedy on its trunk, or a mean taken from the FFN's branch alone."""

    remedy: DeEscalate | None = None
    branch: str | None = None  # the mixing
    causal: bool = True


STACKS: dict[str, Stack] = {
    **{name: Stack(MODELS[name]) for name in (NONE, "full mean", "prefix", "prefix, κ = 1", "EMA")},
    "full mean, branch alone": Stack(branch="full"),
    "prefix, branch alone": Stack(branch="prefix"),
    "bidirectional, full mean": Stack(MODELS["full mean"], causal=False),
    "bidirectional, full mean, branch alone": Stack(branch="full", causal=False),
}


@dataclass(frozen=True)
class Training:
    """The language model and how it is trained: n = `tokens` inputs per sequence, V = `vocabulary`."""

    vocabulary: int = 16
    tokens: int = 16
    width: int = 64
    heads: int = 4
    depth: int = 4
    steps: int = 300
    batch: int = 64
    rate: float = 1e-3
    test_sequences: int = 2048


def uniform_tokens(shape: Training, sequences: int, generator: torch.Generator) -> Tensor:
    """Independent uniform ids (sequences, n + 1): the entropy of each, given all before it, is ln V."""
    return torch.randint(shape.vocabulary, (sequences, shape.tokens + 1), generator=generator)


def train(shape: Training, remedy: DeEscalate | None, seed: int, advance: Tick) -> tuple[CausalLM, list[float]]:
    """A model and its loss at every step, on tokens never seen before. Equal seeds: equal weights, equal tokens."""
    weights, tokens = (torch.Generator().manual_seed(2 * seed + stream) for stream in (0, 1))
    # Without biases at the start the future is learnt sooner (perhaps since those of nn.Linear outweigh embeddings).
    config = BlockConfig(shape.width, shape.heads, initialise=xavier)
    model = CausalLM(shape.depth, config, vocabulary=shape.vocabulary, context=shape.tokens, generator=weights)
    if remedy is not None:
        apply(model, remedy)
    optimiser = torch.optim.AdamW(model.parameters(), lr=shape.rate)
    warm_up = min(WARM_UP, shape.steps // 4)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser,
        lambda step: min((step + 1) / warm_up, 1 - step / shape.steps),  # up, then down to 0
    )
    losses = []
    for _ in range(shape.steps):
        ids = uniform_tokens(shape, shape.batch, tokens)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
        advance()
    return model.eval(), losses


@torch.no_grad()
def losses_in_one_pass(model: nn.Module, ids: Tensor) -> Tensor:
    """ids (sequences, n + 1) → (sequences, n): all positions at once, as in training."""
    return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")


@torch.no_grad()
def losses_token_by_token(model: nn.Module, ids: Tensor) -> Tensor:
    """The same with the sequence cut behind each position: there is no future to look at, as in writing."""
    return torch.stack(
        [F.cross_entropy(model(ids[:, :end])[:, -1], ids[:, end], reduction="none") for end in range(1, ids.shape[1])],
        dim=1,
    )


def evaluate(shape: Training, model: CausalLM, seed: int) -> Iterator[dict[str, float | str]]:
    """Rows of the test: the two losses and their standard errors over sequences, and the first loss per position.

    A sequence is one observation: the losses of its tokens hang together.
    """
    ids = uniform_tokens(shape, shape.test_sequences, torch.Generator().manual_seed(~seed & 0xFFFF_FFFF))
    whole, cut = (torch.cat([way(model, part) for part in ids.split(512)]) for way in _WAYS)
    for quantity, losses in (("one pass", whole), ("token by token", cut)):
        yield {"quantity": quantity, **mean_and_error(losses.mean(dim=1))}
    yield {"quantity": "largest difference", "value": (whole - cut).abs().max().item()}
    for position, losses in enumerate(whole.unbind(dim=1), start=1):
        yield {"quantity": "one pass, position", "position": position, **mean_and_error(losses)}


_WAYS = (losses_in_one_pass, losses_token_by_token)


def mean_and_error(values: Tensor) -> dict[str, float]:
    values = values.double()
    return {"value": values.mean().item(), "error": values.std().item() / len(values) ** 0.5}


@dataclass(frozen=True)
class Depth:
    """The stacks: post-norm blocks with dσ² = 1, which collapse, and random tokens."""

    blocks: int = 60
    tokens: int = 64
    width: int = 256
    heads: int = 8
    samples: int = 4
    draws: int = 3  # of weights and tokens


@torch.no_grad()
def similarity(shape: Depth, stack: Stack, seed: int) -> list[float]:
    """t_sim, mean over samples, of what leaves each block; equal seeds: equal weights, equal tokens."""
    generator = torch.Generator().manual_seed(seed)
    config = BlockConfig(shape.width, shape.heads, causal=stack.causal, initialise=theorem)
    encoder = Encoder(shape.blocks, config, generator=generator)
    x = torch.randn(shape.samples, shape.tokens, shape.width, generator=generator)
    if stack.remedy is not None:
        apply(encoder, stack.remedy)
    found = []
    for block in encoder.blocks:
        assert isinstance(block, Block)
        if stack.branch is not None:
            block.ffn.register_forward_pre_hook(_branch_hook(stack.branch))
        x = block(x)
        found.append(token_similarity(x).mean().item())
    return found


def _branch_hook(mixing: str) -> Callable[[nn.Module, tuple[Tensor]], tuple[Tensor]]:
    """Only what the FFN reads changes; the trunk goes on past it as it was."""
    return lambda _ffn, tokens: (deescalate(tokens[0], 1.0, mixing=mixing),)
