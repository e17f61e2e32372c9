"""Dovonon et al. 2025, Fig. 3: the three definitions of smoothing over depth when H = VΛV⁻¹ is steered either way.

Pre-norm ViTs are trained on scikit-learn's digits (with `--data FOLDER` on CIFAR-10): H as it comes, Λ kept in [0, 1]
(smooth), in [−1, 0] (sharpen) and in [−1, 1] (both: the control, of the same form and size). Learning rates are
chosen for each kind on images held back from training; then fresh seeds, the same for all kinds. The figure's numbers
are not known to us: what is judged is its direction, and what steering costs or gains in accuracy, since a version of
the paper says that smoothing can help images.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from depthscope.drawing import BLUE, GREEN, GREY, VERMILION, block_axis, label, line_with_band, panels, shared_legend
from depthscope.progress import Share
from depthscope_lab.extras import require
from depthscope_lab.papers.dovonon2025.fig2 import TITLES
from depthscope_lab.papers.dovonon2025.fig3_runs import KINDS, before_and_after, best_rate, subject_of, tuned
from depthscope_lab.papers.dovonon2025.fig5_runs import Training
from depthscope_lab.papers.study import Claim, Study, judge

COLOURS = {"plain": GREY, "both": BLUE, "smooth": VERMILION, "sharpen": GREEN}
NAMES = {
    "plain": "H as it comes",
    "both": "control, Λ in [−1, 1]",
    "smooth": "H smooths, Λ in [0, 1]",
    "sharpen": "H sharpens, Λ in [−1, 0]",
}
ENOUGH = 200  # steps below which nothing is said of trained models
INFLUENCING = "Fig. 3, caption: “Influencing smoothing”"


@dataclass(frozen=True)
class Config:
    seed: int = 0
    trials: int = 5  # seeds of each kind
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    patch_size: int = 2
    images: int = 128  # that are measured
    training: Training = field(default_factory=lambda: Training(depth=12, width=64, heads=4, steps=400))
    data: str | None = None  # a folder with CIFAR-10


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Rows by kind, state (fresh, trained), seed and block: the three measures, loss and accuracy, outside_smooth,
    outside_sharpen, negative_share (of H), negative_gains (of LN); rows of state "tuning": the loss by rate."""
    subject = subject_of(config.data, config.patch_size, config.training, config.images)
    work, done = len(KINDS) * (len(config.rates) + config.trials) * config.training.steps, 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress(done / work)

    frames = []
    for kind in KINDS:
        tuning = tuned(kind, subject, config.rates, config.seed, advance)
        frames.append(tuning.assign(block=0))
        frames += [
            before_and_after(kind, subject, best_rate(tuning), config.seed + trial, advance)
            for trial in range(config.trials)
        ]
    progress(1.0)
    return pd.concat(frames, ignore_index=True).assign(data=subject.data.name)


def draw(frame: pd.DataFrame) -> Any:
    figure, axes = panels(4, 2, width=3.4, height=2.9)
    last = int(frame["block"].max())
    for row, state in enumerate(("fresh", "trained")):
        for ax, (measure, title) in zip(axes[4 * row :], TITLES.items(), strict=False):
            for kind, name in NAMES.items():
                own = frame[(frame["kind"] == kind) & (frame["state"] == state)].groupby("block")[measure]
                centre = own.mean()
                line_with_band(ax, centre.index, centre, own.std(), colour=COLOURS[kind], name=name)
            block_axis(ax, last, first=0)
            label(ax, f"{state}: {title.split(':')[0].lower()}", "block", title.split(": ")[1].split(" →")[0])
            if measure == "frequency_ratio":
                ax.set_yscale("log")
    _tuning(axes[3], frame)
    _accuracy(axes[7], frame)
    shared_legend(figure, axes[0])
    return figure


def _tuning(ax: Any, frame: pd.DataFrame) -> None:
    rows = frame[frame["state"] == "tuning"]
    for kind in NAMES:
        own = rows[rows["kind"] == kind]
        ax.plot(own["rate"], own["loss"], marker=".", color=COLOURS[kind])
    ax.set_xscale("log")
    rates = sorted(rows["rate"].unique())
    ax.set_xticks(rates, [f"{rate:g}" for rate in rates])
    ax.minorticks_off()
    label(ax, "learning rates, on images held back", "learning rate", "loss")


def _accuracy(ax: Any, frame: pd.DataFrame) -> None:
    rows = frame[(frame["state"] == "trained") & (frame["block"] == 0)]
    for place, kind in enumerate(NAMES):
        own = rows[rows["kind"] == kind]["accuracy"]
        ax.scatter([place] * len(own), own, color=COLOURS[kind], s=16)
        ax.hlines(own.mean(), place - 0.25, place + 0.25, color=COLOURS[kind], linewidth=1.6)
    ax.set_xticks(range(len(NAMES)), list(NAMES))
    label(ax, "test accuracy, by seed", "", "accuracy")


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    enough = config.training.steps >= ENOUGH
    runs = frame[(frame["state"] == "trained") & (frame["block"] == 0)]
    accuracy = runs.pivot(index="seed", columns="kind", values="accuracy")
    return [
        _kept_inside(frame),
        _order(frame, "fresh", enough=True),
        _order(frame, "trained", enough),
        _angle_and_rank(frame, enough),
        _depth(frame, "smooth", enough),
        _depth(frame, "sharpen", enough),
        _learned(accuracy, enough),
        _gain(accuracy, "smooth", "plain", enough),
        _gain(accuracy, "sharpen", "plain", enough),
        _gain(accuracy, "smooth", "both", enough),
        _gain(accuracy, "sharpen", "both", enough),
        _rates(frame, enough),
        _gains_of_norms(frame, enough),
    ]


def _kept_inside(frame: pd.DataFrame) -> Claim:
    rows = frame[(frame["state"] == "trained") & (frame["block"] > 0)]
    most = {kind: rows[rows["kind"] == kind][f"outside_{kind}"].max() for kind in ("smooth", "sharpen")}
    plain = rows[rows["kind"] == "plain"]
    free = float(plain[["outside_smooth", "outside_sharpen"]].min(axis=1).max())
    return judge(
        "the eigenvalues of every block's H stay in their interval through training",
        paper="“a simple way to parameterize the weights … to influence smoothing” (abstract)",
        ours=", ".join(f"{kind}: at most {value:.0e} outside" for kind, value in most.items())
        + f"; without steering up to {free:.2f}",
        tolerance="1e-3: eigenvalues are those of the product W_V W_O in float32, with V's condition number",
        holds=max(most.values()) < 1e-3,
    )


def _last(frame: pd.DataFrame, state: str, measure: str) -> pd.DataFrame:
    """What leaves the last block: seeds × kinds."""
    rows = frame[(frame["state"] == state) & (frame["block"] == frame["block"].max())]
    return rows.pivot(index="seed", columns="kind", values=measure)


def _order(frame: pd.DataFrame, state: str, enough: bool) -> Claim:
    ratio = _last(frame, state, "frequency_ratio")
    when = "before training" if state == "fresh" else "after training"
    return judge(
        f"{when}, tokens stay more different where H sharpens than where H smooths (input convergence)",
        paper=INFLUENCING,
        ours="‖HFC‖/‖LFC‖ behind the last block: "
        + ", ".join(f"{kind} {ratio[kind].mean():.3f} ± {ratio[kind].std():.3f}" for kind in KINDS),
        tolerance="sharpen above smooth in every seed",
        holds=bool((ratio["sharpen"] > ratio["smooth"]).all()) if enough else None,
        note=_too_few(enough),
    )


def _angle_and_rank(frame: pd.DataFrame, enough: bool) -> Claim:
    cosine, rank = (_last(frame, "trained", measure) for measure in ("cosine_similarity", "effective_rank"))
    return judge(
        "after training, the other two definitions agree: smaller angles and a lower rank if H smooths",
        paper=INFLUENCING,
        ours="; ".join(
            f"{kind}: cosine {cosine[kind].mean():.3f}, effective rank {rank[kind].mean():.1f}" for kind in KINDS
        ),
        tolerance="in every seed: a larger mean cosine and a smaller effective rank than with a sharpening H",
        holds=bool(((cosine["smooth"] > cosine["sharpen"]) & (rank["smooth"] < rank["sharpen"])).all())
        if enough
        else None,
        note=_too_few(enough),
    )


def _depth(frame: pd.DataFrame, kind: str, enough: bool) -> Claim:
    """Whether a steered model really smooths, or sharpens: its last block against what enters."""
    rows = frame[(frame["state"] == "trained") & (frame["kind"] == kind)]
    ratio = rows.pivot(index="seed", columns="block", values="frequency_ratio")
    change = ratio.iloc[:, -1] / ratio.iloc[:, 0]
    falls = kind == "smooth"
    return judge(
        f"after training, a model whose H {'smooths' if falls else 'sharpens'} makes tokens "
        f"{'more alike' if falls else 'more different'} over its depth",
        paper="the sign of Λ decides, if nothing but X + AXH acts (theory); the model has norms and FFNs too",
        ours=f"‖HFC‖/‖LFC‖ of the last block over that of the entrance: {change.mean():.2f} "
        f"({change.min():.2f} to {change.max():.2f})",
        tolerance=f"{'below' if falls else 'above'} 1 in every seed",
        holds=bool((change < 1).all() if falls else (change > 1).all()) if enough else None,
        note=_too_few(enough),
    )


def _learned(accuracy: pd.DataFrame, enough: bool) -> Claim:
    return judge(
        "all kinds have learned",
        paper="ours: what an untrained model costs in accuracy says nothing",
        ours=", ".join(f"{kind} {accuracy[kind].mean():.1%}" for kind in KINDS),
        tolerance="three times the accuracy of chance, 30 %, in every seed",
        holds=bool((accuracy > 0.3).all(axis=None)) if enough else None,
        note=_too_few(enough),
    )


def _gain(accuracy: pd.DataFrame, kind: str, other: str, enough: bool) -> Claim:
    difference = (accuracy[kind] - accuracy[other]).to_numpy()
    helps = "smoothing helps images: it raises" if kind == "smooth" else "sharpening raises"
    against = "" if other == "plain" else ", also against the control with both signs"
    mean, half = interval(difference)
    decided = mean - half > 0 or mean + half < 0
    return judge(
        f"{helps} the test accuracy{against}",
        paper="a middle version's abstract: smoothing can help image classification; the final one drops it"
        if kind == "smooth"
        else "not in the paper; the other direction of the same control",
        ours=f"{100 * mean:+.1f} points against {NAMES[other]}, 95 % interval {100 * (mean - half):+.1f} to "
        f"{100 * (mean + half):+.1f}, {len(difference)} seeds" + ("" if decided else ": no difference shown"),
        tolerance="the interval (Student's, of the differences seed by seed) lies above 0",
        holds=bool(mean - half > 0) if enough else None,
        note=_too_few(enough),
    )


def interval(differences: Any, level: float = 0.95) -> tuple[float, float]:
    """Mean and half width of Student's interval for the mean of independent differences; infinite for a single one."""
    found = np.asarray(differences, dtype=float)
    if len(found) < 2:
        return float(found.mean()), float("inf")
    quantile = require("scipy.stats").t.ppf((1 + level) / 2, len(found) - 1)
    return float(found.mean()), float(quantile * found.std(ddof=1) / np.sqrt(len(found)))


def _rates(frame: pd.DataFrame, enough: bool) -> Claim:
    """A best rate at the edge of the grid may be better beyond it."""
    rows = frame[frame["state"] == "tuning"]
    chosen = {kind: best_rate(rows[rows["kind"] == kind]) for kind in KINDS}
    edges = [kind for kind, rate in chosen.items() if rate in (rows["rate"].min(), rows["rate"].max())]
    return judge(
        "the learning rates are compared fairly: the best of each kind lies inside the grid",
        paper="ours",
        ours=", ".join(f"{kind} {rate:g}" for kind, rate in chosen.items())
        + (f"; at the edge: {', '.join(edges)}" if edges else ""),
        tolerance="none of them at the edge",
        holds=not edges if enough else None,
        note=_too_few(enough),
    )


def _gains_of_norms(frame: pd.DataFrame, enough: bool) -> Claim:
    rows = frame[(frame["state"] == "trained") & (frame["block"] > 0)]
    most = rows.groupby("kind")["negative_gains"].max()
    return judge(
        "training does not turn the steering round by the sign of layer norm's weights",
        paper="“the sign of layer normalization weights can influence this effect” (abstract); whether it does is ours",
        ours="largest share of negative weights of a norm: " + ", ".join(f"{kind} {most[kind]:.1%}" for kind in KINDS),
        tolerance="less than 5 % in every block and seed",
        holds=bool((most < 0.05).all()) if enough else None,
        note=_too_few(enough),
    )


def _too_few(enough: bool) -> str:
    return "" if enough else f"needs {ENOUGH} steps"


STUDY = Study(
    "dovonon2025-fig3",
    full=Config(),
    quick=Config(
        trials=2,
        rates=(1e-3, 3e-3, 1e-2),
        patch_size=4,
        images=16,
        training=Training(depth=3, width=16, heads=2, steps=6, batch=16),
    ),
    compute=compute,
    draw=draw,
    claims=claims,
    with_data=Config(trials=3, patch_size=4, training=Training(depth=6, width=64, heads=4, steps=300)),
)
