"""The claims of `depth-language`.

Their criteria were written before the first result of the study was known; that on letter frequencies after a pilot of
60 steps with one seed (t_sim behind the last block .08 and .96).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from depthscope.probing.roles import CAN_LEARN
from depthscope_lab.papers.deep.language_runs import (
    ALPHA,
    POST,
    PRE,
    PRESCRIBED,
    TAU,
    UNTOLD,
    VARIANTS,
    carriers,
    prescribed,
)
from depthscope_lab.papers.study import Claim, judge, rows
from depthscope_lab.training.protocol import edge_of

REACHES = 0.1  # nats per letter within which a loss counts as reached, as in yu2024-fig7
LEARNT = 0.1  # nats below the loss of letter frequencies: less has learnt nothing but these
COLLAPSED, HELD = 0.95, 0.5  # t_sim behind the last block
CARRY = 0.75  # of all that leaving single blocks out costs, as in `depthscope depth`
SAME = 1e-3  # nats: rounding of float32 in other sums
INFINITE = float("inf")
OURS = "ours; not in the paper"


def claims(frame: pd.DataFrame, config: Any) -> list[Claim]:
    """Those whose variants were trained."""
    judged = rows(frame, held_out="test")
    there = [name for name in VARIANTS if name in set(judged["variant"])]
    mean = {name: _mean(judged, name) for name in there}
    interval = {name: _interval(judged, name) for name in there}
    floor = float(rows(frame, quantity="floor")["value"].iloc[0])
    learnt = floor - min(mean.values()) > LEARNT
    compared = learnt and rows(judged, quantity="held_out")["seed"].nunique() > 1  # intervals need two seeds

    def losses(names: Iterable[str]) -> str:
        return "; ".join(
            f"{name} {mean[name]:.3f}"
            + (f" ({interval[name][0]:.3f} to {interval[name][1]:.3f})" if interval[name][0] > -INFINITE else "")
            for name in names
        )

    found = [
        judge(
            "the best variant has learnt more than how frequent letters are",
            paper="a control: else nothing is compared",
            ours=f"letter frequencies {floor:.3f}; {losses(there)}",
            tolerance=f"at least {LEARNT} nats below",
            holds=learnt,
            note=_edges(frame, there),
        )
    ]
    alpha, tau = prescribed(config.training)
    for other, why in ((POST, "the classic model"), (ALPHA, "α alone"), (TAU, "τ alone")):
        if other in there:
            found.append(
                judge(
                    f"the prescription (α = {alpha:g}, τ = {tau:g}) beats {why}",
                    paper=OURS,
                    ours=losses((PRESCRIBED, other)),
                    tolerance="intervals of the test loss that have no point in common",
                    holds=interval[PRESCRIBED][1] < interval[other][0] if compared else None,
                )
            )
    if PRE in there:
        found.append(
            judge(
                "the prescription reaches pre-norm",
                paper="Yu & Zhang 2024, Fig. 7: de-escalated and pre-norm are similar; its mean sees the future",
                ours=losses((PRESCRIBED, PRE)),
                tolerance=f"the mean at most {REACHES} nats above",
                holds=mean[PRESCRIBED] - mean[PRE] <= REACHES if learnt else None,
            )
        )
    least = min(there, key=mean.__getitem__)
    alike = {name: _behind_the_last_block(judged, name) for name in there}
    ends = {name: float(values.mean()) for name, values in alike.items()}
    learning = {name: _learning_blocks(judged, name) for name in there}
    found += [
        judge(
            "no other variant does better than the prescription",
            paper=OURS,
            ours=f"the least loss: {losses(dict.fromkeys((least, PRESCRIBED)))}",
            tolerance="no variant whose interval of the test loss lies wholly below",
            holds=all(high >= interval[PRESCRIBED][0] for _, high in interval.values()) if compared else None,
        ),
        judge(
            "in training the classic model collapses, and the prescription does not",
            paper="Yu & Zhang 2024, §1: similarity escalates; §3: de-escalation stops it",
            ours="t_sim behind the last block at the end: " + "; ".join(f"{name} {ends[name]:.3f}" for name in there),
            tolerance=f"above {COLLAPSED} and below {HELD}",
            holds=ends[POST] > COLLAPSED and ends[PRESCRIBED] < HELD if POST in there else None,
        ),
        judge(
            "attention can learn in more blocks of the prescription than of the classic model",
            paper="ours: the gradient of queries and keys goes like t_div (gradient-roles)",
            ours="blocks, mean over seeds: " + "; ".join(f"{name} {learning[name]:.1f}" for name in there),
            tolerance=f"a block counts if their gradient is at least {CAN_LEARN:g} of that of values and output",
            holds=learning[PRESCRIBED] > learning[POST] if POST in there else None,
        ),
    ]
    if UNTOLD in there:
        told, untold = alike[PRESCRIBED], alike[UNTOLD]
        found.append(
            judge(
                "tokens grow alike behind the last block where the model must learn how frequent letters are, and only "
                "there",
                paper=OURS,
                ours=f"t_sim, all seeds: told {told.min():.3f} to {told.max():.3f}; not told {untold.min():.3f} to "
                f"{untold.max():.3f}",
                tolerance=f"below {HELD} in every seed, and above it in every seed",
                holds=bool(told.max() < HELD < untold.min()),
            )
        )
    if PRE in there:
        ours, theirs = (_carrying_blocks(judged, name) for name in (PRESCRIBED, PRE))
        found.append(
            judge(
                "the prescription uses more of its depth than pre-norm",
                paper=OURS,
                ours=f"blocks that carry {CARRY:.0%} of what leaving single blocks out costs: prescription "
                f"{', '.join(map(str, ours))}; pre-norm {', '.join(map(str, theirs))}",
                tolerance="more in every seed than pre-norm in any",
                holds=min(ours) > max(theirs),
            )
        )
    greatest = rows(judged, quantity="hidden")["value"].max()
    found.append(
        judge(
            "no model sees the future",
            paper="a control",
            ours=f"greatest difference of a log-probability with the future hidden: {greatest:.0e}",
            tolerance=f"{SAME:g} nats: rounding of float32 in other sums",
            holds=bool(greatest < SAME),
        )
    )
    return found


def _mean(judged: pd.DataFrame, variant: str) -> float:
    """The test loss; infinite where a run failed."""
    values = rows(judged, variant=variant, quantity="held_out")["value"]
    return INFINITE if values.isna().any() else float(values.mean())


def _interval(judged: pd.DataFrame, variant: str) -> tuple[float, float]:
    """That of the test loss; infinite where a run failed, everything if there is one seed only."""
    if _mean(judged, variant) == INFINITE:
        return INFINITE, INFINITE
    low, high = (float(rows(judged, variant=variant, quantity=end)["value"].iloc[0]) for end in ("low", "high"))
    return (low, high) if low == low else (-INFINITE, INFINITE)


def _edges(frame: pd.DataFrame, there: Sequence[str]) -> str:
    """Which variants have their best rate at an edge of those tried: a better one may lie beyond."""
    said = []
    for name in there:
        ends = rows(frame, variant=name, quantity="held_out")
        rate = float(rows(ends, held_out="test")["rate"].iloc[0])
        if edge_of(dict.fromkeys(rows(ends, held_out="validation")["rate"], 0.0), rate):
            said.append(f"{name} {rate:g}")
    return f"at an edge of the rates tried: {', '.join(said)}" if said else ""


def _at_the_end(judged: pd.DataFrame, variant: str, quantity: str) -> pd.DataFrame:
    found = rows(judged, variant=variant, quantity=quantity)
    return rows(found, step=found["step"].max())


def _behind_the_last_block(judged: pd.DataFrame, variant: str) -> pd.Series:
    """t_sim there at the last look, of every seed."""
    found = _at_the_end(judged, variant, "token_similarity")
    return rows(found, block=found["block"].max())["value"]


def _learning_blocks(judged: pd.DataFrame, variant: str) -> float:
    """Blocks whose queries and keys have CAN_LEARN of the gradient of values and output, at the last look."""
    found = _at_the_end(judged, variant, "learns")
    return float((found["value"] >= CAN_LEARN).groupby(found["seed"]).sum().mean())


def _carrying_blocks(judged: pd.DataFrame, variant: str) -> list[int]:
    """Per seed, the fewest blocks that carry CARRY of the cost."""
    found = rows(judged, variant=variant, quantity="skip")
    return [carriers(own.loc[own["block"] > 0, "value"].tolist(), CARRY) for _, own in found.groupby("seed")]
