"""The claims of `depth-language`.

Their criteria were written before the first result of the study was known; that on letter frequencies after a pilot of
60 steps with one seed (t_sim behind the last block .08 and .96).
"""

from __future__ import annotations

from collections.abc import Sequence
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
from depthscope_lab.papers.study import Claim, judge
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
    judged = frame[frame["held_out"] == "test"]
    there = [name for name in VARIANTS if name in set(judged["variant"])]
    learnt = _floor(frame) - min(_mean(judged, name) for name in there) > LEARNT
    alpha, tau = prescribed(config.training)
    found = [_floor_claim(frame, judged, there, learnt)]
    for other, why in ((POST, "the classic model"), (ALPHA, "α alone"), (TAU, "τ alone")):
        if other in there:
            found.append(_less(judged, other, f"the prescription (α = {alpha:g}, τ = {tau:g}) beats {why}", learnt))
    if PRE in there:
        gap = _mean(judged, PRESCRIBED) - _mean(judged, PRE)
        found.append(
            judge(
                "the prescription reaches pre-norm",
                paper="Yu & Zhang 2024, Fig. 7: de-escalated and pre-norm are similar; its mean sees the future",
                ours=_losses(judged, (PRESCRIBED, PRE)),
                tolerance=f"the mean at most {REACHES} nats above",
                holds=gap <= REACHES if learnt else None,
            )
        )
    found += [_best(judged, there, learnt), _similarity(judged, there), _attention(judged, there)]
    if UNTOLD in there:
        found.append(_frequencies(judged))
    if PRE in there:
        found.append(_depth_use(judged))
    greatest = judged.loc[judged["quantity"] == "hidden", "value"].max()
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


def _floor(frame: pd.DataFrame) -> float:
    return float(frame.loc[frame["quantity"] == "floor", "value"].iloc[0])


def _of(judged: pd.DataFrame, variant: str, quantity: str) -> pd.DataFrame:
    return judged[(judged["variant"] == variant) & (judged["quantity"] == quantity)]


def _mean(judged: pd.DataFrame, variant: str) -> float:
    """The test loss; infinite where a run failed."""
    values = _of(judged, variant, "held_out")["value"]
    return INFINITE if values.isna().any() else float(values.mean())


def _interval(judged: pd.DataFrame, variant: str) -> tuple[float, float]:
    """That of the test loss; infinite where a run failed, everything if there is one seed only."""
    if _mean(judged, variant) == INFINITE:
        return INFINITE, INFINITE
    low, high = (float(_of(judged, variant, quantity)["value"].iloc[0]) for quantity in ("low", "high"))
    return (low, high) if low == low else (-INFINITE, INFINITE)


def _losses(judged: pd.DataFrame, variants: Sequence[str]) -> str:
    """Each with its interval."""
    said = []
    for name in variants:
        low, high = _interval(judged, name)
        said.append(f"{name} {_mean(judged, name):.3f}" + (f" ({low:.3f} to {high:.3f})" if low > -INFINITE else ""))
    return "; ".join(said)


def _floor_claim(frame: pd.DataFrame, judged: pd.DataFrame, there: Sequence[str], learnt: bool) -> Claim:
    return judge(
        "the best variant has learnt more than how frequent letters are",
        paper="a control: else nothing is compared",
        ours=f"letter frequencies {_floor(frame):.3f}; {_losses(judged, there)}",
        tolerance=f"at least {LEARNT} nats below",
        holds=learnt,
        note=_edges(frame, there),
    )


def _edges(frame: pd.DataFrame, there: Sequence[str]) -> str:
    """Which variants have their best rate at an edge of those tried: a better one may lie beyond."""
    said = []
    for name in there:
        ends = frame[(frame["variant"] == name) & (frame["quantity"] == "held_out")]
        tried = ends.loc[ends["held_out"] == "validation", "rate"]
        rate = float(ends.loc[ends["held_out"] == "test", "rate"].iloc[0])
        if edge_of(dict.fromkeys(tried, 0.0), rate):
            said.append(f"{name} {rate:g}")
    return f"at an edge of the rates tried: {', '.join(said)}" if said else ""


def _less(judged: pd.DataFrame, other: str, claim: str, learnt: bool) -> Claim:
    return judge(
        claim,
        paper=OURS,
        ours=_losses(judged, (PRESCRIBED, other)),
        tolerance="intervals of the test loss that have no point in common",
        holds=_interval(judged, PRESCRIBED)[1] < _interval(judged, other)[0] if learnt and _seeds(judged) > 1 else None,
    )


def _best(judged: pd.DataFrame, there: Sequence[str], learnt: bool) -> Claim:
    best = min(there, key=lambda name: _mean(judged, name))
    return judge(
        "no other variant does better than the prescription",
        paper=OURS,
        ours=f"the least loss: {_losses(judged, list(dict.fromkeys((best, PRESCRIBED))))}",
        tolerance="no variant whose interval of the test loss lies wholly below",
        holds=all(_interval(judged, name)[1] >= _interval(judged, PRESCRIBED)[0] for name in there)
        if learnt and _seeds(judged) > 1
        else None,
    )


def _seeds(judged: pd.DataFrame) -> int:
    """How many were judged: intervals need two."""
    return int(judged.loc[judged["quantity"] == "held_out", "seed"].nunique())


def _last(judged: pd.DataFrame, variant: str, quantity: str) -> pd.DataFrame:
    rows = _of(judged, variant, quantity)
    return rows[rows["step"] == rows["step"].max()]


def _similarity(judged: pd.DataFrame, there: Sequence[str]) -> Claim:
    """t_sim behind the last block at the last look, mean over seeds."""
    ends = {}
    for name in there:
        rows = _last(judged, name, "token_similarity")
        ends[name] = float(rows.loc[rows["block"] == rows["block"].max(), "value"].mean())
    return judge(
        "in training the classic model collapses, and the prescription does not",
        paper="Yu & Zhang 2024, §1: similarity escalates; §3: de-escalation stops it",
        ours="t_sim behind the last block at the end: " + "; ".join(f"{name} {ends[name]:.3f}" for name in there),
        tolerance=f"above {COLLAPSED} and below {HELD}",
        holds=ends[POST] > COLLAPSED and ends[PRESCRIBED] < HELD if POST in ends else None,
    )


def _frequencies(judged: pd.DataFrame) -> Claim:
    """The model that is not told them must make a common part of the tokens to predict them."""
    ends = {}
    for name in (PRESCRIBED, UNTOLD):
        rows = _last(judged, name, "token_similarity")
        ends[name] = rows[rows["block"] == rows["block"].max()]["value"]
    return judge(
        "tokens grow alike behind the last block where the model must learn how frequent letters are, and only there",
        paper=OURS,
        ours=f"t_sim, all seeds: told {_range(ends[PRESCRIBED])}; not told {_range(ends[UNTOLD])}",
        tolerance=f"below {HELD} in every seed, and above it in every seed",
        holds=bool(ends[PRESCRIBED].max() < HELD < ends[UNTOLD].min()),
    )


def _range(values: pd.Series) -> str:
    return f"{values.min():.3f} to {values.max():.3f}"


def _attention(judged: pd.DataFrame, there: Sequence[str]) -> Claim:
    """Blocks whose queries and keys have CAN_LEARN of the gradient of values and output, at the last look."""
    counts = {}
    for name in there:
        rows = _last(judged, name, "learns")
        counts[name] = float((rows["value"] >= CAN_LEARN).groupby(rows["seed"]).sum().mean())
    return judge(
        "attention can learn in more blocks of the prescription than of the classic model",
        paper="ours: the gradient of queries and keys goes like t_div (gradient-roles)",
        ours="blocks, mean over seeds: " + "; ".join(f"{name} {counts[name]:.1f}" for name in there),
        tolerance=f"a block counts if their gradient is at least {CAN_LEARN:g} of that of values and output",
        holds=counts[PRESCRIBED] > counts[POST] if POST in counts else None,
    )


def _depth_use(judged: pd.DataFrame) -> Claim:
    """Per seed, the fewest blocks that carry CARRY of the cost."""
    used = {
        name: [
            carriers(rows.loc[rows["block"] > 0, "value"].tolist(), CARRY)
            for _, rows in _of(judged, name, "skip").groupby("seed")
        ]
        for name in (PRESCRIBED, PRE)
    }
    said = {name: ", ".join(map(str, counts)) for name, counts in used.items()}
    return judge(
        "the prescription uses more of its depth than pre-norm",
        paper=OURS,
        ours=f"blocks that carry {CARRY:.0%} of what leaving single blocks out costs: prescription {said[PRESCRIBED]}; "
        f"pre-norm {said[PRE]}",
        tolerance="more in every seed than pre-norm in any",
        holds=min(used[PRESCRIBED]) > max(used[PRE]),
    )
