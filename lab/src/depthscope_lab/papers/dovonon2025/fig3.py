"""Dovonon et al. 2025, Fig. 3: the three definitions of smoothing over depth when H = VΛV⁻¹ is steered either way.

Pre-norm ViTs are trained on scikit-learn's digits (with `--data FOLDER` on CIFAR-10): H as it comes, Λ kept in [0, 1]
(smooth), in [−1, 0] (sharpen) and in [−1, 1] (both: the control). The figure's numbers are not known to us: what is
judged is its direction, and what steering costs or gains in accuracy, since a version of the paper says that smoothing
can help images.

The control has the same form and size as the steered ones (eigenvalues drawn evenly from an interval, root mean square
.58) and the signs of neither: what it gains against H as it comes is not the steering's. Each kind gets the learning
rate that is best on images held back from training (never the test images), with a seed of its own, and is then
trained with fresh seeds on all training images.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from depthscope.drawing import BLUE, GREEN, GREY, VERMILION, panels, shared_legend
from depthscope.probing import probe
from depthscope.progress import Share, Tick
from depthscope.remedies.reparameterise import INTERVALS
from depthscope.value_spectra.weights import WHOLE, spectra
from depthscope_lab.extras import require
from depthscope_lab.papers.dovonon2025.fig2 import TITLES
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.trained import loss_of_task, means_of_task, steps
from depthscope_lab.papers.vocabulary import Claim, Work, axis, curve, judge, line, rows
from depthscope_lab.training.data import LabelledImages, load_cifar10, load_digits
from depthscope_lab.training.images import ImageClassification
from depthscope_lab.training.recipes import RECIPES

KINDS = {  # a variant of the recipe, how it is called, its colour
    "plain": ("pre", "H as it comes", GREY),
    "both": ("pre+reparameterise(interval=[-1, 1])", "control, Λ in [−1, 1]", BLUE),
    "smooth": ("pre+reparameterise(interval=smooth)", "H smooths, Λ in [0, 1]", VERMILION),
    "sharpen": ("pre+reparameterise(interval=sharpen)", "H sharpens, Λ in [−1, 0]", GREEN),
}
ENOUGH = 200  # steps below which nothing is said of trained models
LEARNED = 0.3  # accuracy, three times that of chance
WARM_UP = 20  # steps
TUNING_SEED = 1000  # added to the study's own
INFLUENCING = "Fig. 3, caption: “Influencing smoothing”"


@dataclass(frozen=True)
class Config:
    seed: int = 0
    trials: int = 5  # seeds of each kind
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    depth: int = 12
    width: int = 64
    heads: int = 4
    patch_size: int = 2
    steps: int = 400
    batch: int = 64
    images: int = 128  # that are measured
    data: str | None = None  # a folder with CIFAR-10


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Rows by kind, state (fresh, trained), seed and block: the three measures, accuracy, outside_smooth,
    outside_sharpen; rows of state "tuning": the loss by rate."""
    data = load_digits() if config.data is None else load_cifar10(config.data)
    work = Work(len(KINDS) * (len(config.rates) + config.trials) * config.steps, progress)
    frames: list[pd.DataFrame] = []
    held_back, seed = data.for_tuning(), config.seed + TUNING_SEED
    for kind in KINDS:
        about: dict[str, Any] = {"kind": kind, "state": "tuning", "seed": seed}
        tried = []
        for rate in config.rates:
            model, task = _model(kind, held_back, config, seed)
            tried.append(about | {"rate": rate} | _trained(model, task, config, rate, work))
        frames.append(tuning := pd.DataFrame(tried).assign(block=0))
        for seed_of_trial in range(config.seed, config.seed + config.trials):
            model, task = _model(kind, data, config, seed_of_trial)
            pixels = task.normalised(data.test_images[: config.images])
            about = {"kind": kind, "seed": seed_of_trial, "rate": best_rate(tuning)}
            frames.append(_measured(model.eval(), pixels).assign(**about, state="fresh"))
            found = _trained(model, task, config, best_rate(tuning), work)
            frames.append(_measured(model, pixels).assign(**about, state="trained", **found))
    return pd.concat(frames, ignore_index=True).assign(data=data.name)


def best_rate(tuning: pd.DataFrame) -> float:
    return float(tuning.sort_values("loss")["rate"].iloc[0])


def _model(kind: str, data: LabelledImages, config: Config, seed: int) -> tuple[nn.Module, ImageClassification]:
    shape = {"depth": config.depth, "width": config.width, "ffn_width": 2 * config.width, "heads": config.heads}
    rest = {"patch_size": config.patch_size, "batch_size": config.batch, "augment": False, "seed": seed}
    recipe = RECIPES["vit-digits" if config.data is None else "vit-cifar10"](KINDS[kind][0])
    task = ImageClassification(recipe.changed(**shape, **rest), data)  # type: ignore[arg-type]
    return task.build(), task


def _trained(
    model: nn.Module, task: ImageClassification, config: Config, rate: float, advance: Tick
) -> dict[str, float]:
    """AdamW with a short warm-up and a linear descent; loss and accuracy on the test images."""
    warm_up = min(WARM_UP, config.steps // 4) or 1
    optimiser = torch.optim.AdamW(model.train().parameters(), lr=rate, weight_decay=0.1)

    def falling(step: int) -> float:
        return rate * min((step + 1) / warm_up, 1 - step / config.steps)

    for _ in steps(partial(loss_of_task, task, model), optimiser, config.steps, rate=falling):
        advance()
    return {name.removeprefix("test_"): value for name, value in means_of_task(task, model).items()}


def _measured(model: nn.Module, pixels: Any) -> pd.DataFrame:
    """Of block 0 (what enters) and every block: the three measures, mean over images, and the spectrum of H.

    outside: how far an eigenvalue of the block's H lies outside [−1, 0] and [0, 1] at the most (imaginary part
    included).
    """
    frame = rows(probe(model, pixels, measures=tuple(TITLES), stations="output").frame, station="output")
    wide = frame.groupby(["block", "measure"])["value"].mean().unstack("measure").reset_index()
    wide.columns.name = None
    values = rows(spectra(model).frame, head=WHOLE)
    for name, (low, high) in INTERVALS.items():
        beyond = (low - values["real"]).clip(lower=0) + (values["real"] - high).clip(lower=0) + values["imag"].abs()
        wide[f"outside_{name}"] = wide["block"].map(beyond.groupby(values["block"]).max())
    return wide


def draw(frame: pd.DataFrame) -> Any:
    figure, axes = panels(4, 2, width=3.4, height=2.9)
    tuning, accuracy, last = axes[3], axes[7], int(frame["block"].max())
    rates = sorted(rows(frame, state="tuning")["rate"].unique())
    for place, (kind, (_, name, colour)) in enumerate(KINDS.items()):
        own = rows(frame, kind=kind)
        for row, state in enumerate(("fresh", "trained")):
            for ax, (measure, title) in zip(axes[4 * row :], TITLES.items(), strict=False):
                values = rows(own, state=state).groupby("block")[measure]
                line(ax, values.mean(), colour, name, values.std())
                (words, rest), log = title.split(": "), measure == "frequency_ratio"
                axis(ax, f"{state}: {words.lower()}", "block", rest.split(" →")[0], log=log, first=0, last=last)
        line(tuning, curve(own, "loss", by="rate", state="tuning"), colour, marker=".", linewidth=1.5)
        reached = rows(own, state="trained", block=0)["accuracy"]
        accuracy.scatter([place] * len(reached), reached, color=colour, s=16)
        accuracy.hlines(reached.mean(), place - 0.25, place + 0.25, color=colour, linewidth=1.6)
    tuning.set_xscale("log")
    tuning.set_xticks(rates, [f"{rate:g}" for rate in rates])
    tuning.minorticks_off()
    accuracy.set_xticks(range(len(KINDS)), list(KINDS))
    axis(tuning, "learning rates, on images held back", "learning rate", "loss")
    axis(accuracy, "test accuracy, by seed", "", "accuracy")
    shared_legend(figure, axes[0])
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    lacks = "" if config.steps >= ENOUGH else f"needs {ENOUGH} steps"
    trained, tuning = rows(frame, state="trained"), rows(frame, state="tuning")
    blocks = trained[trained["block"] > 0]
    outside = {kind: rows(blocks, kind=kind)[f"outside_{kind}"].max() for kind in ("smooth", "sharpen")}
    free = rows(blocks, kind="plain")[["outside_smooth", "outside_sharpen"]].min(axis=1).max()
    accuracy = rows(trained, block=0).pivot(index="seed", columns="kind", values="accuracy")
    unlearned = lacks or ("" if (accuracy > LEARNED).all(axis=None) else f"needs an accuracy of {LEARNED} in every run")
    cosine, rank = (_last(frame, "trained", measure) for measure in ("cosine_similarity", "effective_rank"))
    chosen = {kind: best_rate(rows(tuning, kind=kind)) for kind in KINDS}
    edges = [kind for kind, rate in chosen.items() if rate in (tuning["rate"].min(), tuning["rate"].max())]
    note = f"at the edge of the rates, so that one beyond may be better: {', '.join(edges)}" if edges else ""
    return [
        judge(
            "the eigenvalues of every block's H stay in their interval through training",
            "“a simple way to parameterize the weights … to influence smoothing” (abstract)",
            ", ".join(f"{kind}: at most {value:.0e} outside" for kind, value in outside.items())
            + f"; without steering up to {free:.2f}",
            "1e-3: eigenvalues are those of the product W_V W_O in float32, with V's condition number",
            max(outside.values()) < 1e-3,
            kind="check",
        ),
        _order(frame, "fresh", ""),
        _order(frame, "trained", lacks),
        judge(
            "after training, the other two definitions agree: smaller angles and a lower rank if H smooths",
            INFLUENCING,
            "; ".join(
                f"{kind}: cosine {cosine[kind].mean():.3f}, effective rank {rank[kind].mean():.1f}" for kind in KINDS
            ),
            "in every seed: a larger mean cosine and a smaller effective rank than with a sharpening H",
            ((cosine["smooth"] > cosine["sharpen"]) & (rank["smooth"] < rank["sharpen"])).all(),
            lacks=lacks,
        ),
        *(_depth(trained, kind, lacks) for kind in ("smooth", "sharpen")),
        *(_gain(accuracy, kind, note, unlearned) for kind in ("smooth", "sharpen")),
    ]


def _last(frame: pd.DataFrame, state: str, measure: str) -> pd.DataFrame:
    """What leaves the last block: seeds × kinds."""
    own = rows(frame, state=state, block=frame["block"].max())
    return own.pivot(index="seed", columns="kind", values=measure)


def _order(frame: pd.DataFrame, state: str, lacks: str) -> Claim:
    ratio = _last(frame, state, "frequency_ratio")
    when = "before training" if state == "fresh" else "after training"
    return judge(
        f"{when}, tokens stay more different where H sharpens than where H smooths (input convergence)",
        INFLUENCING,
        "‖HFC‖/‖LFC‖ after the last block: "
        + ", ".join(f"{kind} {ratio[kind].mean():.3f} ± {ratio[kind].std():.3f}" for kind in KINDS),
        "sharpen above smooth in every seed",
        (ratio["sharpen"] > ratio["smooth"]).all(),
        lacks=lacks,
    )


def _depth(trained: pd.DataFrame, kind: str, lacks: str) -> Claim:
    """Whether a steered model really smooths, or sharpens: its last block against what enters."""
    ratio = rows(trained, kind=kind).pivot(index="seed", columns="block", values="frequency_ratio")
    change = ratio.iloc[:, -1] / ratio.iloc[:, 0]
    does, more, side = ("smooths", "alike", "below") if kind == "smooth" else ("sharpens", "different", "above")
    return judge(
        f"after training, a model whose H {does} makes tokens more {more} over its depth",
        "the sign of Λ decides, if nothing but X + AXH acts (theory); the model has norms and FFNs too",
        f"‖HFC‖/‖LFC‖ of the last block over that of the entrance: {change.mean():.2f} "
        f"({change.min():.2f} to {change.max():.2f})",
        f"{side} 1 in every seed",
        ((change < 1) if side == "below" else (change > 1)).all(),
        lacks=lacks,
    )


def _gain(accuracy: pd.DataFrame, kind: str, note: str, lacks: str) -> Claim:
    """Against the control with both signs, which has H of the same form and size; plain H has not."""
    difference = (accuracy[kind] - accuracy["both"]).to_numpy()
    mean, half = interval(difference)
    decided = mean - half > 0 or mean + half < 0
    helps, paper = "sharpening raises", "not in the paper; the other direction of the same control"
    if kind == "smooth":
        helps = "smoothing helps images: it raises"
        paper = "a middle version's abstract: smoothing can help image classification; the final one drops it"
    return judge(
        f"{helps} the test accuracy against the control with both signs",
        paper,
        f"{100 * mean:+.1f} points, 95 % interval {100 * (mean - half):+.1f} to "
        f"{100 * (mean + half):+.1f}, {len(difference)} seeds{'' if decided else ': no difference shown'}",
        "the interval (Student's, of the differences seed by seed) lies above 0",
        mean - half > 0 if decided or kind == "sharpen" else None,
        note,
        lacks=lacks,
    )


def interval(differences: Any, level: float = 0.95) -> tuple[float, float]:
    """Mean and half width of Student's interval for the mean of independent differences; infinite for a single one."""
    found = np.asarray(differences, dtype=float)
    if len(found) < 2:
        return float(found.mean()), float("inf")
    quantile = require("scipy.stats").t.ppf((1 + level) / 2, len(found) - 1)
    return float(found.mean()), float(quantile * found.std(ddof=1) / np.sqrt(len(found)))


QUICK = Config(trials=2, depth=3, width=16, heads=2, patch_size=4, steps=6, batch=16, images=16)
ON_CIFAR = Config(trials=3, depth=6, patch_size=4, steps=300)
STUDY = Study("dovonon2025-fig3", Config(), QUICK, compute, draw, claims, with_data=ON_CIFAR)
