"""Gradients by role in the model of Yu & Zhang 2024, Fig. 1: what the flat total norm hides.

BERT with 100 blocks as Hugging Face initialises it (post-norm), the very same layers wired as pre-norm, and the same
BERT de-escalated (τ = 1 at the end of each block). Per block: the norm of the gradient by what the weights are for, how
alike the tokens are that attention reads, and what attention adds to the trunk. Beside it stands the law of
`theory.gradients`: ‖∂W_Q,K‖/‖∂W_V,O‖ ≈ c·t_div.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from depthscope import drawing
from depthscope.anatomy import anatomy_of
from depthscope.hooks import Listen, Machine, Visit, undisturbed
from depthscope.measures import ALIKE, token_diversity
from depthscope.models import BlockConfig, Encoder, FeedForward, pre_norm
from depthscope.models.families import build_family
from depthscope.probing import probe
from depthscope.probing.roles import CAN_LEARN
from depthscope.progress import Share
from depthscope.remedies import DeEscalate, apply, remove
from depthscope.text import read_text
from depthscope.theory import expected_gradient_ratio
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.subjects import as_batch, ids_of
from depthscope_lab.papers.vocabulary import Claim, Work, axis, curve, judge, line, spell

STATIONS = {"output": "", "attention_input": "read_", "attention_branch": "branch_"}  # what stands before a measure
MODELS = ("post-norm", "pre-norm", "de-escalated")
COLOURS = dict(zip(MODELS, (drawing.VERMILION, drawing.BLUE, drawing.GREEN), strict=True))
ROLES = {
    "weight_gradient": ("all weights", drawing.BLACK),
    "values_output_gradient": ("values, output", drawing.GREEN),
    "ffn_gradient": ("FFN", drawing.SKY),
    "norms_gradient": ("norms", drawing.ORANGE),
    "queries_keys_gradient": ("queries, keys", drawing.VERMILION),
}
_BASE, _SIGMA = 768, 0.02  # BERT-base: width, and the standard deviation of its weights
LAW = 1.25  # the factor within which the law must hold on average where tokens are alike
SLOPE = 0.1  # how far from 1 its power may be, or two standard errors
_LINE = CAN_LEARN  # drawn: below it attention hardly learns
HALF = 0.5  # of its size in post-norm: an attention branch that is smaller is discounted


@dataclass(frozen=True)
class Config:
    seed: int = 0
    depth: int = 100
    width: int = 256  # weights are scaled so that dσ² is that of BERT-base, of width 768
    tokens: int = 64
    samples: int = 1  # each is a pass of its own


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows: model, block, measure, value (mean over the sequences), and the text's hash."""
    text = read_text(None)
    ids = ids_of(text, config.tokens, config.samples)["input_ids"]
    bert: Any = build_family("bert", config.depth, config.width, seed=config.seed)
    with torch.no_grad():
        for layer in bert.encoder.layer.modules():
            if isinstance(layer, nn.Linear) and config.width != _BASE:
                layer.weight *= (_BASE / config.width) ** 0.5
    advance, frames = Work(len(MODELS) * config.depth * config.samples, progress), []
    measures, stations = ["token_similarity", "token_diversity", "branch_ratio"], list(STATIONS)
    for name in MODELS:
        with _wired(bert, name, config) as (model, inputs):
            given = [inputs(ids[sample : sample + 1]) for sample in range(config.samples)]
            profile = probe(model, given, measures=measures, stations=stations, gradients=True, progress=advance)
            kept = profile.frame[profile.frame["block"] > 0]
            kept = kept.assign(measure=kept["station"].map(STATIONS).str.cat(kept["measure"]))
            frames.append(kept.groupby(["block", "measure"])["value"].mean().reset_index().assign(model=name))
            frames.append(_law(model, given, config).assign(model=name))
        gc.collect()
    return pd.concat(frames, ignore_index=True).assign(text_sha256=text.sha256)


@contextmanager
def _wired(bert: Any, name: str, config: Config) -> Iterator[tuple[nn.Module, Any]]:
    """The model, and what makes its inputs of ids (1, n). Pre-norm has the very layers of BERT: nothing is copied."""
    if name != "pre-norm":
        if name == "de-escalated":
            apply(bert, DeEscalate(1.0))
        yield bert, as_batch
        if name == "de-escalated":
            remove(bert)
        return
    heads = bert.config.num_attention_heads
    block = BlockConfig(config.width, heads, ffn=partial(FeedForward, activation=nn.GELU), placement=pre_norm)
    with torch.device("meta"):
        encoder = Encoder(config.depth, block, final_norm=False)
    blocks: Any = encoder.blocks
    for ours, layer in zip(blocks, bert.encoder.layer, strict=True):
        theirs = layer.attention.self
        ours.attention.query, ours.attention.key, ours.attention.value = theirs.query, theirs.key, theirs.value
        ours.attention.output = layer.attention.output.dense
        ours.ffn[0], ours.ffn[2] = layer.intermediate.dense, layer.output.dense
        ours.norm1, ours.norm2 = layer.attention.output.LayerNorm, layer.output.LayerNorm
    with torch.no_grad():
        yield encoder, lambda ids: {"x": bert.embeddings(ids)}


def _law(model: nn.Module, inputs: list[dict[str, Tensor]], config: Config) -> pd.DataFrame:
    """By block: over how many directions the tokens' differences spread that attention reads, and the law's ratio."""
    sigma = _SIGMA * (_BASE / config.width) ** 0.5
    rows: list[dict[str, float]] = []

    def see(visit: Visit, _station: str, tokens: Tensor, _source: Tensor) -> None:
        x = tokens.double()
        apart = x - x[:, :1]
        apart = apart - apart.mean(dim=-2, keepdim=True)
        gram = apart @ apart.mT  # (1, n, n), with the eigenvalues of the covariance
        spread = gram.diagonal(dim1=-2, dim2=-1).sum(-1).square() / gram.square().sum(dim=(-2, -1))
        energy = x.square().sum(dim=(-2, -1)) / x.shape[1]
        ratio = expected_gradient_ratio(token_diversity(x), spread, energy, (sigma,) * 4)
        rows.append({"block": visit.number, "directions": float(spread.mean()), "law": float(ratio.mean())})

    with undisturbed(model), Machine(model, anatomy_of(model), Listen({"attention_input"}, see)):
        for batch in inputs:
            model(**batch)
    means = pd.DataFrame(rows).groupby("block").mean()
    return means.reset_index().melt(id_vars="block", var_name="measure", value_name="value")


def draw(frame: pd.DataFrame) -> Any:
    figure, axes = drawing.panels(2, 2, width=5.0, height=3.4)
    by_role, ratios, branches = axes[:2], *axes[2:]
    last = int(frame["block"].max())
    for ax, model in zip(by_role, ("post-norm", "de-escalated"), strict=True):
        for measure, (name, colour) in ROLES.items():
            line(ax, curve(frame, model=model, measure=measure), colour, name)
        axis(ax, f"{model}: gradient by role", "block", "‖∂loss/∂weights‖", log=True, last=last)
    for model, colour in COLOURS.items():
        line(ratios, _ratio(frame, model), colour, model)
        if model != "de-escalated":  # where the mean is taken out the law's premise is
            law = curve(frame, model=model, measure="law")
            line(ratios, law, colour, f"law, {model}", linewidth=1.2, linestyle=":")
        rest = curve(frame, model=model, measure="branch_token_diversity")
        line(branches, curve(frame, model=model, measure="branch_branch_ratio"), colour, f"size, {model}")
        line(branches, rest, colour, f"differs, {model}", linewidth=1.2, linestyle="--")
    ratios.axhline(_LINE, color=drawing.BLACK, linewidth=0.8)
    axis(ratios, "queries and keys over values and output", "block", "ratio of gradients", log=True, last=last)
    share = "size over the trunk; share that differs"
    axis(branches, "what attention adds to the trunk", "block", share, log=True, last=last)
    drawing.legend_below(axes, columns=3)
    return figure


def _ratio(frame: pd.DataFrame, model: str) -> pd.Series:
    above, below = (curve(frame, model=model, measure=f"{role}_gradient") for role in ("queries_keys", "values_output"))
    return above / below


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    of_post = {name: curve(frame, model="post-norm", measure=name) for name in frame["measure"].unique()}
    collapses = bool(of_post["read_token_similarity"].iloc[-1] > ALIKE)
    ratio = {model: _ratio(frame, model) for model in MODELS}
    post, pre = ratio["post-norm"], ratio["pre-norm"]
    norms = {role: of_post[f"{role}_gradient"] for role in ("queries_keys", "values_output", "ffn")}
    falls = {role: norm.iloc[0] / norm.iloc[-1] for role, norm in norms.items()}
    able = {model: int((own >= CAN_LEARN).sum()) for model, own in ratio.items()}
    # §1.3, asked twice: of the size of what attention adds, and of the part of it that differs between tokens.
    discount = "“does not discount, explicitly or implicitly, the role of self-attention” (§1.3)"
    late = slice(len(post) // 2, None)  # the second half: where post-norm has collapsed
    size, differs = (
        {m: curve(frame, model=m, measure=f"branch_{name}").iloc[late].mean() for m in MODELS}
        for name in ("branch_ratio", "token_diversity")
    )
    carried = {m: size[m] * differs[m] ** 0.5 for m in MODELS}

    # The law, where tokens are alike.
    alike = of_post["read_token_similarity"] >= ALIKE
    measured, law, holds = post[alike], of_post["law"][alike], False
    found = "fewer than five blocks read tokens that are alike"
    if enough := len(measured) >= 5:
        off = measured / law
        mean = float(np.exp(np.log(off).mean()))
        (slope, _), spread = np.polyfit(np.log(law), np.log(measured), 1, cov=True)
        error = float(spread[0, 0] ** 0.5)
        found = (
            f"measured over predicted {mean:.2f} on average ({off.min():.2f} to {off.max():.2f}) in the {len(off)} "
            f"blocks that read t_sim ≥ {ALIKE:g}; ratio {measured.iloc[0]:.2g} → {measured.iloc[-1]:.2g}; "
            f"in logarithms the slope against the law is {slope:.2f} ± {error:.2f}"
        )
        holds = 1 / LAW < mean < LAW and bool(abs(slope - 1) < max(SLOPE, 2 * error))
    return [
        judge(
            "gradients do not vanish in post-norm, by role",
            "“gradient vanishing or exploding is not occurring” (§1.1)",
            f"from the first block to the last, queries and keys fall by a factor of {falls['queries_keys']:.3g}, "
            f"values and output by {falls['values_output']:.3g}, the FFN by {falls['ffn']:.3g}",
            "a factor of 10 in every role",
            max(falls.values()) < 10,
            lacks="" if collapses else "the tokens do not become alike in so few blocks",
        ),
        judge(
            "the gradient of queries and keys goes like t_div: ratio to values and output = c·t_div",
            "not in the paper; c = (‖X‖²/n)σ²/√r from `theory.expected_gradient_ratio`, nothing fitted",
            found,
            f"a factor of {LAW:g} on average (geometric), and a slope within {SLOPE:g}, or two standard errors, "
            "of 1: each block has one draw of its weights, which scatters",
            holds,
            when=collapses and enough,
        ),
        judge(
            "de-escalation lets attention learn in every block, post-norm does not",
            "not in the paper",
            f"blocks with ‖∂W_Q,K‖ ≥ {CAN_LEARN:.0%} of ‖∂W_V,O‖: "
            + ", ".join(f"{count} of {len(post)} ({model})" for model, count in able.items()),
            "all blocks, against fewer than all",
            able["de-escalated"] == len(post) > able["post-norm"],
            when=collapses,
        ),
        judge(
            "in pre-norm queries and keys lose their gradient too, but more slowly",
            "not in the paper; “t_sim still rises” in pre-norm (§3.1, Fig. 4)",
            f"from block 1 to {len(pre)} the ratio falls from {pre.iloc[0]:.2g} to {pre.iloc[-1]:.2g}; in post-norm "
            f"from {post.iloc[0]:.2g} to {post.iloc[-1]:.2g}",
            "lower at the end than at the start, and above post-norm there",
            pre.iloc[-1] < pre.iloc[0] and pre.iloc[-1] > post.iloc[-1],
        ),
        judge(
            "de-escalation does not discount self-attention: the size of its branch",
            discount,
            f"branch over trunk in the second half of the blocks: {spell('{} {:.2g}', size)}",
            f"at least {HALF:g} of its size in post-norm",
            size["de-escalated"] >= HALF * size["post-norm"],
            when=collapses,
        ),
        judge(
            "de-escalation does not discount self-attention: what its branch carries",
            discount,
            f"share of the branch's energy that differs between tokens: {spell('{} {:.2g}', differs)}; "
            f"size of that part over the trunk: {spell('{} {:.2g}', carried)}",
            "the part that differs is no smaller than in post-norm",
            carried["de-escalated"] >= carried["post-norm"],
            when=collapses,
        ),
    ]


PAPER = {"paper": Config(width=768, tokens=128, samples=2)}  # 9 GB
STUDY = Study("gradient-roles", Config(), Config(depth=48, width=128, tokens=32), compute, draw, claims, scales=PAPER)
