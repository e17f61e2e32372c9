"""What the study `remedies` claims; each statement and its tolerance were fixed before the first result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from depthscope_lab.papers.fair import measured, ranked, with_bounds
from depthscope_lab.papers.study import Claim, curve, judge
from depthscope_lab.training.variants import variant_of

CHANCE = math.log(10)  # the loss of equal odds for ten classes
TRAINS = 0.9 * CHANCE  # at most, in every seed
AT_CHANCE = 0.97 * CHANCE  # at least, in the mean
PREDICTS = 0.5  # of Spearman's rank correlation, at least
INITIAL = "token_similarity_at_initialisation"

Row = Mapping[str, Any]
Said = tuple[str, str, str, bool | None]  # the claim, our numbers, what decides, whether it holds


def claims(frame: pd.DataFrame, config: Any) -> list[Claim]:
    """A verdict on each; the quick form, whose few steps tell no variant from another, judges nothing."""
    found = ranked(frame)
    depths = sorted(set(frame["depth"]))
    by_depth = {depth: {row["variant"]: row for row in found if row["depth"] == depth} for depth in depths}
    shallow, middle, deep = depths[0], depths[len(depths) // 2], depths[-1]
    said = [
        _deescalation_trains(by_depth[deep], deep),
        _none_beats_pre_norm(by_depth[shallow], shallow),
        _post_norm_is_worse(by_depth[middle], middle),
        _remedies_help_post_norm(by_depth[middle], middle),
        *(_similarity_predicts(by_depth[depth], depth, frame) for depth in sorted({middle, deep})),
    ]
    note, quick = _note(config, found), config.form == "quick"
    return [
        judge(claim, paper="ours", ours=ours, tolerance=tolerance, holds=None if quick else holds, note=note)
        for claim, ours, tolerance, holds in said
    ]


def _deescalation_trains(at: Mapping[str, Row], depth: int) -> Said:
    post, ours = at["post"], at["deescalated"]
    return (
        f"at {depth} blocks the de-escalated post-norm model trains where plain post-norm stays at chance",
        f"test loss: de-escalated {with_bounds(ours)}, post-norm {with_bounds(post)}",
        f"de-escalated at most 0.9 ln 10 = {TRAINS:.3f} in every seed; post-norm's mean at least 0.97 ln 10 = "
        f"{AT_CHANCE:.3f}, or a run of it failed",
        _high(ours) <= TRAINS and _loss(post) >= AT_CHANCE,
    )


def _none_beats_pre_norm(at: Mapping[str, Row], depth: int) -> Said:
    low = at["pre"].get("test_loss_low")
    better = [row for row in at.values() if low is not None and _high(row) < low]
    named = ", ".join(f"{row['variant']} {with_bounds(row)}" for row in sorted(better, key=_loss)) or "none"
    return (
        f"at {depth} blocks no remedy beats pre-norm with a tuned rate",
        f"pre-norm {with_bounds(at['pre'])}; below its interval: {named}",
        "no other interval lies wholly below that of pre-norm",
        None if low is None else not better,
    )


def _post_norm_is_worse(at: Mapping[str, Row], depth: int) -> Said:
    post, best = at["post"], min(at.values(), key=_loss)
    return (
        f"at {depth} blocks post-norm needs a remedy: with a tuned rate it is worse than the best",
        f"post-norm {with_bounds(post)}; best: {best['variant']} {with_bounds(best)}",
        "their intervals do not overlap, or a run of post-norm failed",
        post["rank"] in ("worse", ""),
    )


def _remedies_help_post_norm(at: Mapping[str, Row], depth: int) -> Said:
    others = [row for name, row in at.items() if variant_of(name).remedies]
    low = at["post"].get("test_loss_low")
    help_it = [row for row in others if _high(row) < (math.inf if low is None else low)]
    return (
        f"at {depth} blocks most remedies that are put into a post-norm model make it better",
        f"{len(help_it)} of {len(others)}: {', '.join(row['variant'] for row in sorted(help_it, key=_loss)) or 'none'}",
        "more than half of them have an interval wholly below that of plain post-norm",
        2 * len(help_it) > len(others),
    )


def _similarity_predicts(at: Mapping[str, Row], depth: int, frame: pd.DataFrame) -> Said:
    initial = curve(measured(frame), "variant", quantity=INITIAL, depth=depth)
    correlation = rank_correlation([initial[name] for name in at], [min(_loss(row), CHANCE) for row in at.values()])
    return (
        f"at {depth} blocks t_sim at initialisation predicts which variants train",
        f"Spearman's correlation of t_sim behind the last FFN and test loss: {correlation:.2f}, {len(at)} variants",
        f"at least {PREDICTS:g}; a variant that failed or is above chance counts as at chance",
        None if math.isnan(correlation) else correlation >= PREDICTS,
    )


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks, equal values sharing their mean rank; nan where all are equal."""
    ranks = pd.DataFrame({"one": one, "other": other}).rank()
    return float(ranks["one"].corr(ranks["other"]))


def _loss(row: Row) -> float:
    """The mean over the seeds; infinite if all failed."""
    return math.inf if row.get("test_loss") is None else float(row["test_loss"])


def _high(row: Row) -> float:
    """The upper end of the interval; infinite where a run failed, so that it lies below nothing."""
    high = row.get("test_loss_high")
    return math.inf if high is None else float(high)


def _note(config: Any, rows: Sequence[Row]) -> str:
    stages = "; ".join(
        f"{stage.depth} blocks: {len(stage.variants)} variants, {stage.steps} steps" for stage in config.stages
    )
    edges = ", ".join(f"{row['variant']} at {row['depth']} ({row['edge']})" for row in rows if row["edge"])
    few = "; too few steps for a verdict" if config.form == "quick" else ""
    return f"{stages}; {config.trials} fresh seeds; rates at the edge of those tried: {edges or 'none'}{few}"
