"""What `depth-1000` asks, with the thresholds that decide. Progress is ln 10 − test loss: how far below equal odds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from depthscope_lab.papers.deep.depth_1000_runs import CHANCE, LEARNED
from depthscope_lab.papers.deep.variants import LABELS
from depthscope_lab.papers.study import Claim, judge, rows
from depthscope_lab.training.protocol import edge_of

HALF = 0.5  # of the prescription's progress: a control that stays below it lacks what the prescription has
ALIKE = 0.8  # of the best control's progress, from which on the prescription counts as close
COLLAPSED, HELD = 0.99, 0.9  # t_sim, mean over all blocks
CAN_LEARN = 0.01  # ‖∂W_Q,K‖ / ‖∂W_V,O‖ of a block whose attention can learn
PUBLISHED = ("pre", "deep-norm", "layer-scale")
OURS = "ours: docs/theory/order-and-chaos.md"
NOTES = "ours: tried once before this study, with other α and τ"

Answer = tuple[str, bool | None]  # our numbers in words, and whether the claim holds
NOTHING: Answer = ("not computed", None)


def claims(frame: pd.DataFrame, config: Any) -> list[Claim]:
    """The quick form shows its numbers and judges nothing: its few steps tell no variant from another."""
    found = _Numbers(rows(frame, counts=True), config.depth)
    note = _note(frame, config)
    made = []
    for place, (answer, (claim, source, tolerance)) in enumerate(CLAIMS.items()):
        said, holds = answer(found)
        shown = {"paper": source, "ours": said, "tolerance": tolerance, "note": "" if place else note}
        made.append(judge(claim, holds=None if config.form == "quick" else holds, **shown))
    return made


class _Numbers:
    """The numbers of the runs that count, by variant; a run that failed has made no progress."""

    def __init__(self, counted: pd.DataFrame, depth: int):
        self.all, self.depth = counted, depth

    def ends(self, variant: str, quantity: str, depth: int | None = None) -> pd.Series:
        chosen = rows(self.all, variant=variant, quantity=quantity, depth=depth or self.depth)
        return chosen.set_index("seed")["value"].fillna(CHANCE if quantity == "loss" else 0.0)

    def progress(self, variant: str, depth: int | None = None) -> float:
        """Mean over seeds; nan if there is none."""
        return float((CHANCE - self.ends(variant, "loss", depth)).mean())

    def looks(self, variant: str, quantity: str) -> pd.DataFrame:
        """Rows seed and step, columns block."""
        chosen = rows(self.all, variant=variant, quantity=quantity, depth=self.depth)
        return chosen.pivot_table(index=["seed", "step"], columns="block", values="value")


def _trains(found: _Numbers) -> Answer:
    loss, accuracy = found.ends("prescribed", "loss"), found.ends("prescribed", "accuracy")
    if loss.empty:
        return NOTHING
    said = f"test loss {loss.min():.3f} to {loss.max():.3f}, accuracy {accuracy.min():.1%} to {accuracy.max():.1%}"
    return f"{said}, {len(loss)} seed(s)", bool(loss.max() <= LEARNED * CHANCE and accuracy.min() >= 0.2)


def _both_needed(found: _Numbers) -> Answer:
    ours = found.progress("prescribed")
    others = {name: found.progress(name) for name in ("alpha", "tau")}
    if pd.isna([ours, *others.values()]).any():
        return NOTHING
    said = ", ".join(f"{LABELS[name]} {value:.3f}" for name, value in others.items())
    return f"progress: prescribed {ours:.3f}, {said}", bool(max(others.values()) <= HALF * ours and ours > 0)


def _classic(found: _Numbers) -> Answer:
    accuracy = found.ends("post", "accuracy")
    return NOTHING if accuracy.empty else (f"accuracy {accuracy.max():.1%} at most", bool(accuracy.max() <= 0.2))


def _collapse(found: _Numbers) -> Answer:
    alone, ours = found.looks("alpha", "t_sim").mean(axis=1), found.looks("prescribed", "t_sim").mean(axis=1)
    if alone.empty or ours.empty:
        return NOTHING
    first, last, held = (
        by_step.groupby("step").mean().iloc[place] for by_step, place in ((alone, 0), (alone, -1), (ours, -1))
    )
    said = f"α alone {first:.3f} → {last:.4f}; prescribed {held:.3f} at the end"
    return said, bool(first < HELD and last > COLLAPSED and held < HELD)


def _as_good(found: _Numbers) -> Answer:
    ours = found.progress("prescribed")
    others = {name: found.progress(name) for name in PUBLISHED}
    if pd.isna([ours, *others.values()]).any():
        return NOTHING
    best = max(others, key=lambda name: others[name])
    said = "; ".join(
        f"{LABELS[name]} {found.ends(name, 'loss').mean():.3f} ({found.ends(name, 'loss').min():.3f} to "
        f"{found.ends(name, 'loss').max():.3f}), accuracy {found.ends(name, 'accuracy').mean():.1%}"
        for name in ("prescribed", *PUBLISHED)
    )
    ratio = ours / others[best] if others[best] > 0 else float("inf")
    return f"{ratio:.2f} of the progress of {LABELS[best]} (test loss: {said})", bool(ratio >= ALIKE)


def _can_learn(found: _Numbers) -> Answer:
    shares = {}
    for name in ("prescribed", "post", "pre"):
        table = found.looks(name, "roles")
        if table.empty:
            if name != "pre":
                return NOTHING
            continue
        last = table[table.index.get_level_values("step") == table.index.get_level_values("step").max()]
        shares[name] = float((last >= CAN_LEARN).mean(axis=1).mean())
    said = ", ".join(f"{LABELS[name]} {share:.0%}" for name, share in shares.items())
    return f"of the blocks: {said}", bool(shares["prescribed"] >= 0.9 and shares["post"] <= 0.5)


def _uses(found: _Numbers) -> Answer:
    shares = {name: _effective_share(found.looks(name, "without")) for name in ("prescribed", "pre")}
    if any(values.empty for values in shares.values()):
        return "a model that has learned is needed of both, and there is none of one of them", None
    said = "; ".join(f"{LABELS[name]} {values.min():.2f} to {values.max():.2f}" for name, values in shares.items())
    return f"effective share: {said}", bool(shares["prescribed"].min() > shares["pre"].max())


def _effective_share(table: pd.DataFrame) -> pd.Series:
    """(Σc)²/(count·Σc²) of each seed: 1 if all runs of blocks cost the same, 1/count if one alone costs anything."""
    costs = table.clip(lower=0)
    return (costs.sum(axis=1) ** 2 / (costs.shape[1] * (costs**2).sum(axis=1))).dropna()


def _holds(found: _Numbers) -> Answer:
    deep, shallow = found.progress("prescribed"), found.progress("prescribed", 50)
    if pd.isna([deep, shallow]).any():
        return NOTHING
    return f"progress {shallow:.3f} at 50 blocks, {deep:.3f} at {found.depth}", bool(deep >= HALF * shallow > 0)


def _note(frame: pd.DataFrame, config: Any) -> str:
    """Rates that were chosen, and those that are the last of the rates that were tried."""
    ends = rows(frame, quantity="loss", depth=config.depth)
    counts = ends["counts"].astype(bool)
    chosen = []
    for variant, rate in ends[counts].groupby("variant", sort=False)["rate"].first().items():
        tried = ends.loc[~counts & (ends["variant"] == variant), "rate"]
        edge = edge_of(dict.fromkeys(tried, 0.0), rate)
        chosen.append(f"{LABELS[str(variant)]} {rate:g}" + (f" (the {edge} that was tried)" if edge else ""))
    shape, rates = config.shape, ", ".join(chosen)
    return f"{config.depth} blocks × {shape.width}, {shape.steps} steps of {shape.batch} images; rates: {rates}"


CLAIMS: dict[Callable[[_Numbers], Answer], tuple[str, str, str]] = {  # the claim, whose it is, what decides
    _trains: (
        "the prescription trains 1000 post-norm blocks",
        NOTES,
        f"every seed: test loss at most {LEARNED:g} ln 10 = {LEARNED * CHANCE:.2f}, accuracy at least 20 %",
    ),
    _both_needed: (
        "both α and τ are needed",
        NOTES,
        f"α alone and τ alone: mean progress at most {HALF:g} of the prescription's, each",
    ),
    _classic: ("classic post-norm does not train", NOTES, "every seed: accuracy at most 20 %"),
    _collapse: (
        "training makes the collapse where τ = 0",
        NOTES,
        f"α alone: mean t_sim over blocks below {HELD:g} at step 1 and above {COLLAPSED:g} at the last step; "
        f"prescribed: below {HELD:g} at the last step",
    ),
    _as_good: (
        "the prescription is as good as the best published control",
        OURS,
        f"mean progress at least {ALIKE:g} of the best of pre-norm, DeepNorm and LayerScale; it may be better",
    ),
    _can_learn: (
        "under the prescription attention can learn in every block",
        OURS,
        f"last step: ‖∂W_Q,K‖ at least {CAN_LEARN:.0%} of ‖∂W_V,O‖ in at least 90 % of the blocks (prescribed), "
        "and in at most 50 % (classic post-norm)",
    ),
    _uses: (
        "the prescribed model uses more of its depth than pre-norm",
        OURS,
        "effective share of the runs of blocks whose omission costs something, (Σc)²/(count·Σc²) with c the rise of "
        "the test loss: the least seed of the prescription is above the greatest of pre-norm",
    ),
    _holds: (
        "the prescription holds its progress from 50 to 1000 blocks",
        OURS,
        f"mean progress at 1000 blocks at least {HALF:g} of that at 50 (one seed there)",
    ),
}
