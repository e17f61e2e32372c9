"""A thousand post-norm blocks on digits: the prescription of `theory.prescribe`, and what does as well without it.

Ours. The ViT of the recipe `vit-digits`, narrow; its head reads all tokens side by side (a class token learns next to
nothing in as few steps at 60 blocks). Every variant gets the best of the same rates, chosen with seed 0 on a fifth of
the training images; then fresh seeds, on all training images, judged on the test images. At 1000 blocks all variants
come first, so that a study that was stopped has something to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from depthscope import drawing
from depthscope.progress import Share
from depthscope_lab.papers.deep.narrow_vits import (
    CHANCE,
    LEARNED,
    Run,
    Shape,
    found_or_trained,
    groups_of,
    same_as,
)
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.trained import chosen_rates
from depthscope_lab.papers.vocabulary import Claim, Work, axis, judge, range_line, rows
from depthscope_lab.training.protocol import edge_of

LABELS = {  # of the curves, in this order
    "prescribed": "prescribed (α and τ)",
    "alpha": "α alone",
    "tau": "τ alone",
    "post": "classic post-norm",
    "pre": "pre-norm",
    "deep-norm": "DeepNorm",
    "layer-scale": "LayerScale",
}
PUBLISHED = ("pre", "deep-norm", "layer-scale")
HALF, ALIKE = 0.5, 0.8  # of another's progress (ln 10 − test loss): what lags behind it, what is close to it
COLLAPSED, HELD = 0.99, 0.9  # t_sim, mean over all blocks
CAN_LEARN = 0.01  # ‖∂W_Q,K‖ / ‖∂W_V,O‖ of a block whose attention can learn
COLUMNS = ["variant", "depth", "rate", "seed", "counts", "quantity", "step", "block", "value"]


@dataclass(frozen=True)
class Config:
    form: str = "full"
    depth: int = 1000
    others: tuple[int, ...] = (200, 50, 100, 500)  # other depths, in this order
    variants: tuple[str, ...] = tuple(LABELS)
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
    more: int = 2  # rates beyond these, at most, where the best is at their edge
    trials: int = 3  # seeds at `depth`
    trials_elsewhere: int = 1  # at the other depths
    shape: Shape = field(default_factory=Shape)
    seed: int = 0


def compute(config: Config, progress: Share, folder: Path) -> pd.DataFrame:
    """Trains what is not there yet in `folder`; one row per number.

    Quantities: train_loss (step), loss and accuracy at the end, t_sim and roles (step, block), without (block): what
    the loss rises by if these blocks are left out. `block` is the last one of a run of neighbours.
    """
    stages = [(config.depth, config.trials), *((other, config.trials_elsewhere) for other in config.others)]
    tried = len(config.rates) + config.more
    work = Work(len(config.variants) * sum(depth * (tried + trials) for depth, trials in stages), progress)
    found: list[dict[str, Any]] = []

    def loss_of(variant: str, depth: int, rate: float, seed: int, counts: bool) -> float:
        run, told = Run(same_as(variant, config.shape.prescription(depth)), depth, rate, seed, counts), work.part(depth)
        one = found_or_trained(run, config.shape, folder / config.form, told)
        told(1.0)  # also where it was read, or broke off
        found.extend(row | {"variant": variant} for row in rows_of(one))
        return math.inf if one["loss"] is None else float(one["loss"])

    for depth, trials in stages:
        tune = partial(_tuned, loss_of, depth, config.seed)
        chosen = chosen_rates(config.variants, config.rates, config.more, tune, partial(_skip, work, depth))
        for seed in range(config.seed + 1, config.seed + 1 + trials):
            for variant, rate in chosen.items():
                loss_of(variant, depth, rate, seed, True)
    return pd.DataFrame(found, columns=COLUMNS)


def _skip(work: Work, depth: int, runs: int) -> None:
    work(runs * depth)


def _tuned(loss_of: Any, depth: int, seed: int, variant: str, rate: float) -> float:
    return loss_of(variant, depth, rate, seed, False)  # type: ignore[no-any-return]


def rows_of(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row per number of a run; a number that is not finite is nan."""
    ends = [group.stop for group in groups_of(found["run"]["depth"])]

    def row(quantity: str, value: float | None, step: int = 0, block: int = 0) -> dict[str, Any]:
        number = math.nan if value is None else value
        return {**found["run"], "quantity": quantity, "step": step, "block": block, "value": number}

    yield from (row("train_loss", value, step) for step, value in enumerate(found["losses"], start=1))
    yield from (row(name, found[name]) for name in ("loss", "accuracy"))
    for look in found["looks"]:
        for quantity in ("t_sim", "roles"):
            pairs = zip(ends, look[quantity], strict=False)
            yield from (row(quantity, value, look["step"] + 1, block) for block, value in pairs)
    if found["without"]:
        whole, losses = found["without"]
        for block, value in zip(ends, losses, strict=True):
            yield row("without", None if value is None or whole is None else value - whole, 0, block)


def draw(frame: pd.DataFrame) -> Any:
    counted = rows(frame, counts=True)
    if counted.empty:
        return drawing.empty("nothing is trained yet")
    blocks = counted["depth"].max()
    deepest = rows(counted, depth=blocks)
    figure, axes = drawing.panels(3, 2)
    for (variant, label), colour in zip(LABELS.items(), drawing.PALETTE, strict=False):
        own = rows(deepest, variant=variant)
        roles = rows(own, quantity="roles")
        for ax, chosen, x in (
            (axes[0], rows(own, quantity="train_loss"), "step"),
            (axes[1], rows(counted, variant=variant, quantity="loss"), "depth"),
            (axes[2], rows(roles, step=roles["step"].max()), "block"),
            (axes[5], rows(own, quantity="without"), "block"),
        ):
            range_line(ax, chosen.groupby(x)["value"], colour, label)
    axes[1].set_xscale("log")
    axes[5].set_yscale("symlog", linthresh=1e-3)
    axis(axes[0], f"training, {blocks} blocks", "step", "loss")
    axis(axes[1], "depth against loss", "blocks", "test loss")
    axis(axes[2], "can attention learn? (last step)", "block", "‖∂W_Q,K‖ / ‖∂W_V,O‖", log=True)
    axis(axes[5], "blocks left out", "block", "rise of the test loss")
    for ax, variant in ((axes[3], "alpha"), (axes[4], "prescribed")):
        own = rows(deepest, variant=variant, quantity="t_sim")
        for step, values in own.pivot_table(index="step", columns="block", values="value").iterrows():
            ax.plot(values.index, values, label=f"step {step}")
        drawing.similarity_axis(ax)
        axis(ax, f"t_sim, {LABELS[variant]}", "block", "t_sim after the FFN")
        if len(own):
            drawing.legend_inside(ax)
    drawing.shared_legend(figure, axes[0], columns=4)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    """Progress is ln 10 − test loss: how far below equal odds; a run that failed has made none.

    What was not trained is not judged, and in the quick form nothing is: its few steps tell no variant from another.
    """
    counted = rows(frame, counts=True)

    def ends(variant: str, quantity: str, depth: int = config.depth) -> pd.Series:
        chosen = rows(counted, variant=variant, quantity=quantity, depth=depth)
        return chosen.set_index("seed")["value"].fillna(CHANCE if quantity == "loss" else 0.0)

    def looks(variant: str, quantity: str) -> pd.DataFrame:
        chosen = rows(counted, variant=variant, quantity=quantity, depth=config.depth)
        return chosen.pivot_table(index=["seed", "step"], columns="block", values="value")

    def means(variant: str) -> pd.Series:
        return looks(variant, "t_sim").mean(axis=1).groupby("step").mean()

    def learning(variant: str) -> float:
        table = looks(variant, "roles")
        steps_ = table.index.get_level_values("step")
        return float((table[steps_ == steps_.max()] >= CAN_LEARN).mean(axis=1).mean())

    def shares(variant: str) -> pd.Series:
        """(Σc)²/(count·Σc²) by seed: 1 if all runs of blocks cost the same, 1/count if one alone costs anything."""
        costs = looks(variant, "without").clip(lower=0)
        return (costs.sum(axis=1) ** 2 / (costs.shape[1] * (costs**2).sum(axis=1))).dropna()

    gained = {name: float((CHANCE - ends(name, "loss")).mean()) for name in LABELS}
    missing = {name for name, value in gained.items() if math.isnan(value)}
    ours, deep, shallow = gained["prescribed"], config.depth, float((CHANCE - ends("prescribed", "loss", 50)).mean())
    loss, accuracy, classic = ends("prescribed", "loss"), ends("prescribed", "accuracy"), ends("post", "accuracy")
    alone, held = means("alpha"), means("prescribed")
    best = max(PUBLISHED, key=lambda name: gained[name])
    tested = {v: (ends(v, "loss"), ends(v, "accuracy").mean()) for v in ("prescribed", *PUBLISHED)}
    told = "; ".join(
        f"{LABELS[v]} {own.mean():.3f} ({own.min():.3f} to {own.max():.3f}), accuracy {right:.1%}"
        for v, (own, right) in tested.items()
    )
    can = {v: learning(v) for v in ("prescribed", "post", "pre") if len(looks(v, "roles"))}
    use = {v: shares(v) for v in ("prescribed", "pre")}
    notes = "ours: tried once before this study, with other α and τ"
    page = "ours: docs/theory/order-and-chaos.md"

    def said(
        claim: str, paper: str, needs: set[str], ours: Any, tolerance: str, holds: Any, note: str = ""
    ) -> Claim:  # `ours` and `holds` are asked only where these variants were trained
        there = not needs & missing
        verdict = holds() if there and config.form != "quick" else None
        return judge(claim, paper, ours() if there else "not computed", tolerance, verdict, note)

    return [
        said(
            "the prescription trains 1000 post-norm blocks",
            notes,
            {"prescribed"},
            lambda: (
                f"test loss {loss.min():.3f} to {loss.max():.3f}, accuracy {accuracy.min():.1%} to "
                f"{accuracy.max():.1%}, {len(loss)} seed(s)"
            ),
            f"every seed: test loss at most {LEARNED:g} ln 10 = {LEARNED * CHANCE:.2f}, accuracy at least 20 %",
            lambda: loss.max() <= LEARNED * CHANCE and accuracy.min() >= 0.2,
            _note(frame, config),
        ),
        said(
            "both α and τ are needed",
            notes,
            {"prescribed", "alpha", "tau"},
            lambda: f"progress: prescribed {ours:.3f}, α alone {gained['alpha']:.3f}, τ alone {gained['tau']:.3f}",
            f"α alone and τ alone: mean progress at most {HALF:g} of the prescription's, each",
            lambda: max(gained["alpha"], gained["tau"]) <= HALF * ours and ours > 0,
        ),
        said(
            "classic post-norm does not train",
            notes,
            {"post"},
            lambda: f"accuracy {classic.max():.1%} at most",
            "every seed: accuracy at most 20 %",
            lambda: classic.max() <= 0.2,
        ),
        said(
            "training makes the collapse where τ = 0",
            notes,
            {"alpha", "prescribed"},
            lambda: f"α alone {alone.iloc[0]:.3f} → {alone.iloc[-1]:.4f}; prescribed {held.iloc[-1]:.3f} at the end",
            f"α alone: mean t_sim over blocks below {HELD:g} at step 1 and above {COLLAPSED:g} at the last step; "
            f"prescribed: below {HELD:g} at the last step",
            lambda: alone.iloc[0] < HELD and alone.iloc[-1] > COLLAPSED and held.iloc[-1] < HELD,
        ),
        said(
            "the prescription is as good as the best published control",
            page,
            {"prescribed", *PUBLISHED},
            lambda: (
                f"{ours / gained[best] if gained[best] > 0 else math.inf:.2f} of the progress of {LABELS[best]} "
                f"(test loss: {told})"
            ),
            f"mean progress at least {ALIKE:g} of the best of pre-norm, DeepNorm and LayerScale; it may be better",
            lambda: gained[best] <= 0 or ours / gained[best] >= ALIKE,
        ),
        said(
            "under the prescription attention can learn in every block",
            page,
            {"prescribed", "post"},
            lambda: "of the blocks: " + ", ".join(f"{LABELS[name]} {share:.0%}" for name, share in can.items()),
            f"last step: ‖∂W_Q,K‖ at least {CAN_LEARN:.0%} of ‖∂W_V,O‖ in at least 90 % of the blocks (prescribed), "
            "and in at most 50 % (classic post-norm)",
            lambda: can["prescribed"] >= 0.9 and can["post"] <= 0.5,
        ),
        said(
            "the prescribed model uses more of its depth than pre-norm",
            page,
            {"prescribed", "pre"},
            lambda: (
                "effective share: "
                + "; ".join(f"{LABELS[v]} {own.min():.2f} to {own.max():.2f}" for v, own in use.items() if len(own))
            ),
            "effective share of the runs of blocks whose omission costs something, (Σc)²/(count·Σc²) with c the rise "
            "of the test loss: the least seed of the prescription is above the greatest of pre-norm",
            lambda: None if any(own.empty for own in use.values()) else use["prescribed"].min() > use["pre"].max(),
        ),
        said(
            "the prescription holds its progress from 50 to 1000 blocks",
            page,
            {"prescribed"},
            lambda: f"progress {shallow:.3f} at 50 blocks, {ours:.3f} at {deep}",
            f"mean progress at 1000 blocks at least {HALF:g} of that at 50 (one seed there)",
            lambda: None if math.isnan(shallow) else ours >= HALF * shallow > 0,
        ),
    ]


def _note(frame: pd.DataFrame, config: Config) -> str:
    """Rates that were chosen, and those that are the last of the rates that were tried."""
    ends = rows(frame, quantity="loss", depth=config.depth)
    counts = ends["counts"].astype(bool)
    chosen = []
    for variant, rate in ends[counts].groupby("variant", sort=False)["rate"].first().items():
        edge = edge_of(dict.fromkeys(ends.loc[~counts & (ends["variant"] == variant), "rate"], 0.0), rate)
        chosen.append(f"{LABELS[str(variant)]} {rate:g}" + (f" (the {edge} that was tried)" if edge else ""))
    shape, rates = config.shape, ", ".join(chosen)
    return f"{config.depth} blocks × {shape.width}, {shape.steps} steps of {shape.batch} images; rates: {rates}"


TINY = Shape(width=16, ffn_width=16, heads=2, patch_size=4, batch=8, steps=4, left_out_on=8)
QUICK = Config("quick", 60, (), ("prescribed", "alpha"), (3e-4, 1e-3), more=0, trials=1, shape=TINY)
STUDY = Study("depth-1000", Config(), QUICK, compute, draw, claims, in_folder=True)
