"""The mean of the whole sequence lets a causal model see the future; a causal mean does not. Ours.

Yu & Zhang 2024 subtract the mean over all tokens also in Transformer-XL, a language model. On independent
uniform tokens no model that sees only the past can have a loss below ln V, so whatever goes below has looked
ahead. Causal language models, post-norm, are trained with each form; and 60-block stacks at initialisation show
that the causal forms keep tokens apart all the same, if they act on the trunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope import drawing
from depthscope.measures import token_similarity
from depthscope.models import BlockConfig, CausalLM, Encoder, theorem, xavier
from depthscope.progress import Share, Tick
from depthscope.remedies import DeEscalate, Ema, Prefix, apply, deescalate
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.trained import steps
from depthscope_lab.papers.vocabulary import Claim, Work, axis, curve, judge, line, rows, spell

WARM_UP = 50  # steps; without it post-norm blocks start with their largest updates
BELOW, NOT_BELOW = 10, 3  # standard errors
APART, COLLAPSED = 0.2, 0.95
NONE = "no remedy"


def _complete(at: str, mixing: str | Prefix | Ema) -> DeEscalate:
    """τ = 1, the paper's; the full mean by its explicit permission only."""
    return DeEscalate(tau=1.0, at=at, mixing=mixing, allow_leak=mixing == "full")


MODELS: dict[str, DeEscalate | None] = {
    NONE: None,
    "full mean": _complete("ffn_input", "full"),
    "full mean, at output": _complete("output", "full"),
    "prefix": _complete("ffn_input", Prefix()),
    "prefix, at output": _complete("output", Prefix()),
    "prefix, κ = 1": _complete("ffn_input", Prefix(shrink=1.0)),
    "EMA": _complete("ffn_input", Ema()),
}
LEAKING = ("full mean", "full mean, at output")
CAUSAL = tuple(name for name in MODELS if name not in (NONE, *LEAKING))


# Stacks at initialisation: a remedy on the trunk, or a mean that is taken from the FFN's branch alone.
STACKS: dict[str, DeEscalate | str | None] = {
    **{name: MODELS[name] for name in (NONE, "full mean", "prefix", "prefix, κ = 1", "EMA")},
    "full mean, branch alone": "full",
    "prefix, branch alone": "prefix",
}
_LOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    NONE: (drawing.BLACK, {"linewidth": 3.2}),
    "full mean": (drawing.VERMILION, {}),
    "full mean, at output": (drawing.ORANGE, {}),
    "prefix": (drawing.BLUE, {}),
    "prefix, at output": (drawing.SKY, {"linestyle": "--"}),
    "prefix, κ = 1": (drawing.GREEN, {"linestyle": "--"}),
    "EMA": (drawing.PURPLE, {"linestyle": ":", "linewidth": 2.2}),
    "full mean, branch alone": (drawing.VERMILION, {"linestyle": "--"}),
    "prefix, branch alone": (drawing.BLUE, {"linestyle": "--"}),
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


@dataclass(frozen=True)
class Depth:
    """The stacks: post-norm blocks with dσ² = 1, which collapse, and random tokens."""

    blocks: int = 60
    tokens: int = 64
    width: int = 256
    heads: int = 8
    samples: int = 4
    draws: int = 3  # of weights and tokens


@dataclass(frozen=True)
class Config:
    seed: int = 0
    training: Training = field(default_factory=Training)
    stacks: Depth = field(default_factory=Depth)


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows: part, case, step, block, draw (−1 where none), quantity, value, error (nan where none).

    `training`: the loss of every step. `test`: on fresh tokens, all positions in one pass and token by token. `stack`:
    t_sim after every block. `floor`: ln V.
    """
    shape, depth, columns = config.training, config.stacks, ["step", "block", "draw"]
    work = Work(shape.steps * len(MODELS) + len(STACKS) * depth.draws, progress)
    floor = {"part": "floor", "case": "uniform tokens", "quantity": "loss", "value": math.log(shape.vocabulary)}
    frames = [pd.DataFrame([floor])]
    for case, remedy in MODELS.items():
        model, losses = train(shape, remedy, config.seed, work)
        own = pd.DataFrame({"step": range(1, shape.steps + 1), "value": losses, "quantity": "loss"})
        frames.append(own.assign(part="training", case=case))
        frames.append(pd.DataFrame(evaluate(shape, model, config.seed)).assign(part="test", case=case))
    for case, draw in product(STACKS, range(depth.draws)):
        found = similarity(depth, case, config.seed * depth.draws + draw)
        own = pd.DataFrame({"block": range(1, depth.blocks + 1), "value": found, "quantity": "token_similarity"})
        frames.append(own.assign(part="stack", case=case, draw=draw))
        work()
    frame = pd.concat(frames, ignore_index=True)
    frame = frame.fillna(dict.fromkeys(columns, -1)).astype(dict.fromkeys(columns, int))
    return frame[["part", "case", *columns, "quantity", "value", "error"]]


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
    warm_up, losses = min(WARM_UP, shape.steps // 4), []

    def loss_of(_step: int) -> Tensor:
        ids = uniform_tokens(shape, shape.batch, tokens)
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def rate(step: int) -> float:
        return shape.rate * min((step + 1) / warm_up, 1 - step / shape.steps)  # up, then down to 0

    for _, loss in steps(loss_of, optimiser, shape.steps, rate=rate):
        losses.append(loss)
        advance()
    return model.eval(), losses


@torch.no_grad()
def losses_in_one_pass(model: nn.Module, ids: Tensor) -> Tensor:
    """ids (sequences, n + 1) → (sequences, n): all positions at once, as in training."""
    return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")


@torch.no_grad()
def losses_token_by_token(model: nn.Module, ids: Tensor) -> Tensor:
    """The same with the sequence cut after each position: there is no future to look at, as in writing."""
    ends = range(1, ids.shape[1])
    found = [F.cross_entropy(model(ids[:, :end])[:, -1], ids[:, end], reduction="none") for end in ends]
    return torch.stack(found, dim=1)


def evaluate(shape: Training, model: CausalLM, seed: int) -> Iterator[dict[str, float | str]]:
    """Rows of the test: the two losses and their standard errors over sequences.

    A sequence is one observation: the losses of its tokens hang together.
    """
    ids = uniform_tokens(shape, shape.test_sequences, torch.Generator().manual_seed(~seed & 0xFFFF_FFFF))
    ways = (losses_in_one_pass, losses_token_by_token)
    whole, cut = (torch.cat([way(model, part) for part in ids.split(512)]).double() for way in ways)
    yield {"quantity": "largest difference", "value": (whole - cut).abs().max().item()}
    for quantity, losses in (("one pass", whole), ("token by token", cut)):
        error = losses.mean(dim=1).std().item() / len(losses) ** 0.5
        yield {"quantity": quantity, "value": losses.mean().item(), "error": error}


@torch.no_grad()
def similarity(shape: Depth, case: str, seed: int) -> list[float]:
    """t_sim, mean over samples, of what leaves each block; equal seeds: equal weights, equal tokens."""
    generator, change = torch.Generator().manual_seed(seed), STACKS[case]
    config = BlockConfig(shape.width, shape.heads, causal=True, initialise=theorem)
    encoder = Encoder(shape.blocks, config, generator=generator)
    x = torch.randn(shape.samples, shape.tokens, shape.width, generator=generator)
    if isinstance(change, DeEscalate):
        apply(encoder, change)
    found, blocks = [], encoder.blocks
    for block in blocks:
        if isinstance(change, str):  # only what the FFN reads changes; the trunk goes on past it as it was
            block.ffn.register_forward_pre_hook(  # type: ignore[union-attr, operator]
                lambda _ffn, tokens: (deescalate(tokens[0], 1.0, mixing=change),)
            )
        x = block(x)
        found.append(token_similarity(x).mean().item())
    return found


def draw(frame: pd.DataFrame) -> Any:
    figure, (learning, testing, stack) = drawing.panels(3, width=4.2, height=4.2)
    floor = rows(frame, part="floor")["value"].iloc[0]
    for case, (colour, look) in _LOOKS.items():
        if case in MODELS:
            line(learning, curve(frame, by="step", part="training", case=case), colour, case, **look)
        if case in STACKS:
            line(stack, curve(frame, part="stack", case=case), colour, case, **look)
    for shift, quantity, colour, name in (
        (-0.2, "one pass", drawing.BLUE, "all positions in one pass"),
        (0.2, "token by token", drawing.ORANGE, "token by token: no future"),
    ):
        values = curve(frame, by="case", part="test", quantity=quantity)[list(MODELS)]
        testing.barh([number + shift for number in range(len(values))], values, height=0.38, color=colour, label=name)
    for mark in (learning.axhline, testing.axvline):
        mark(floor, color=drawing.GREY, linewidth=1, linestyle="--", label="ln V, the floor")
    testing.set_yticks(range(len(MODELS)), list(MODELS))
    testing.invert_yaxis()
    top, y = (0, 1.1 * floor), "loss, nats per token"
    axis(learning, "Training on random tokens", "step", y, ylim=top, xlim=(0, None))
    axis(testing, "Tested on fresh tokens", y, "remedy")
    last = int(frame["block"].max())
    axis(stack, "Causal stack at initialisation", "block", "t_sim", ylim=(0, 1.02), last=last)
    drawing.legend_below([learning, stack], columns=2)
    drawing.legend_below(testing, columns=1)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    depth, honest = config.stacks, [NONE, *CAUSAL]
    floor = float(rows(frame, part="floor")["value"].iloc[0])
    tests = rows(frame, part="test")
    whole, cut = (rows(tests, quantity=name).set_index("case") for name in ("one pass", "token by token"))
    most = rows(tests, quantity="largest difference").set_index("case")["value"][honest].max()
    stack = rows(frame, part="stack", block=depth.blocks).groupby("case")["value"].mean()
    trunks, branches = stack[["prefix", "prefix, κ = 1", "EMA", "full mean"]], stack.filter(like="branch alone")

    def losses(found: pd.DataFrame, cases: Sequence[str]) -> str:
        own = found.loc[list(cases)]
        return "; ".join(f"{case} {row['value']:.4f} ± {row['error']:.2g}" for case, row in own.iterrows())

    def above(found: pd.DataFrame, cases: Sequence[str]) -> pd.Series:
        """The floor, in standard errors; negative below."""
        own = found.loc[list(cases)]
        return (own["value"] - floor) / own["error"]

    not_below = f"at most {NOT_BELOW} standard errors (over sequences) below ln V = {floor:.4f}"
    return [
        judge(
            "with the mean of the whole sequence, the loss of a causal model goes below the floor",
            "its Transformer-XL subtracts that mean at the FFN input; no word on causality",
            f"{losses(whole, LEAKING)}; floor {floor:.4f}",
            f"more than {BELOW} standard errors (over sequences) below ln V",
            (above(whole, LEAKING) < -BELOW).all(),
            f"ln V / n = {floor / config.training.tokens:.3f} is left at best: the last target is in no input",
        ),
        judge(
            "without a remedy, and with each causal mean, the loss does not go below the floor",
            "not in the paper; ours: no one can guess a uniform token from those before it",
            losses(whole, honest),
            not_below,
            (above(whole, honest) >= -NOT_BELOW).all(),
        ),
        judge(
            "read token by token, without a future to look at, the leaking models lose their advantage",
            "not in the paper; this is how a language model writes",
            losses(cut, LEAKING),
            not_below,
            (above(cut, LEAKING) >= -NOT_BELOW).all(),
        ),
        judge(
            "with each causal mean, one pass and token by token give the same loss",
            "not in the paper; ours: no position sees a later one",
            f"largest difference of a token's loss: {most:.0e}",
            "1e-4 nats: rounding of float32 in sums of other lengths",
            most < 1e-4,
            kind="check",
        ),
        judge(
            "a mean taken away at the FFN input keeps tokens apart on the trunk, and not on the branch alone",
            "at the FFN input, for Transformer-XL; whether on the trunk is not said",
            f"t_sim after block {depth.blocks}: {NONE} {stack[NONE]:.4f}; trunk: {spell('{} {:.3f}', trunks, '; ')}; "
            f"branch: {spell('{} {:.3f}', branches, '; ')}",
            f"below {APART} on the trunk (unrelated tokens have 1/n = {1 / depth.tokens:.3f}), above {COLLAPSED} on "
            "the branch alone and without a remedy",
            trunks.max() < APART and min(branches.min(), stack[NONE]) > COLLAPSED,
        ),
    ]


TINY = Training(vocabulary=4, tokens=4, width=32, depth=2, steps=60, batch=32, rate=5e-3, test_sequences=512)
QUICK = Config(training=TINY, stacks=Depth(tokens=32, width=64, heads=4, samples=2, draws=1))
STUDY = Study("causal-leak", Config(), QUICK, compute, draw, claims)
