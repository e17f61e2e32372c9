"""How much of its depth a model uses, in words: which blocks do the work, which could go, where the prediction is
settled. Every sentence has its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from depthscope.naming import blocks_of, ranges

WRITES = 0.1  # of the trunk's norm: a branch that is smaller turns no token by more than 6°, arcsin 0.1
SETTLED = 0.9  # of the tokens have the model's own first choice: nine of ten predictions are made
CHEAP = 0.01  # of the loss: the same measure as that of the verdict of `probe`
MOVES = 0.1  # of the output's norm, where there is no loss: 6°, as for WRITES
BUILT_UPON = 0.1  # of what the later blocks add: without the block they do something else in the first digit
CARRY = 0.75  # of all that skipping single blocks costs: what is left is a third of it
EVEN = 1.1  # times the least cost: where no block costs more, none stands out, as in copies of one block


@dataclass(frozen=True)
class Finding:
    """One sentence, the rule that said it, and the numbers it rests on."""

    rule: str
    sentence: str
    numbers: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def learnt(metadata: Mapping[str, Any]) -> bool:
    """Whether the loss says something: that of random weights is chance, and so is what a block adds to it."""
    return bool((metadata.get("weights") or {}).get("look") != "initialised")


def findings_of(frame: pd.DataFrame, metadata: Mapping[str, Any]) -> tuple[Finding, ...]:
    """At most three, in the order in which people ask."""
    found = [_which_blocks(frame, metadata), _could_go(frame, metadata), _settled(frame)]
    return tuple(finding for finding in found if finding is not None)


def counts_of(frame: pd.DataFrame, metadata: Mapping[str, Any]) -> pd.DataFrame:
    """Index `question`, columns blocks, of, rests_on: one number for each thing that was looked at."""
    depth, settled, loss = len(frame), _settled_at(frame), metadata.get("loss") if learnt(metadata) else None
    costs = _costs(frame, metadata)
    why = "there is no loss" if learnt(metadata) else "the loss of random weights says nothing"
    missed = frame["skip_output"] >= MOVES, f"skipped, the output moves by {MOVES:.0%} or more ({why})"
    if loss is not None:
        missed = frame["skip_loss"] >= CHEAP * loss, f"skipped, loss {CHEAP:+.0%} or more"
    sizes = frame[[name for name in frame if str(name).endswith("_ratio")]].max(axis=1)
    rows = {
        "write": (
            sizes.notna().any(),
            (sizes >= WRITES).sum(),
            depth,
            f"some branch has at least {WRITES:g} of the residual stream's norm",
        ),
        "until the prediction is settled": (
            settled is not None,
            settled,
            depth,
            f"{SETTLED:.0%} of the tokens have the final first choice (logit lens)",
        ),
        "are built upon": (
            frame["skip_later"].notna().any(),
            (frame["skip_later"] >= BUILT_UPON).sum(),
            depth - 1,
            f"without one, later blocks add something else by {BUILT_UPON:.0%} or more; the last has none after it",
        ),
        "are missed": (frame["skip_output"].notna().any(), missed[0].sum(), depth, missed[1]),
        "carry most of it": (
            costs is not None and costs.clip(lower=0).sum() > 0,
            0 if costs is None else len(_carriers(costs)),
            depth,
            f"the fewest that have {CARRY:.0%} of all that skipping single blocks costs",
        ),
    }
    known = [(question, int(row[1] or 0), *row[2:]) for question, row in rows.items() if row[0]]
    return pd.DataFrame(known, columns=["question", "blocks", "of", "rests_on"]).set_index("question")


def _costs(frame: pd.DataFrame, metadata: Mapping[str, Any]) -> pd.Series | None:
    """What skipping costs: of the loss where there is one and the model was trained for it, else of the output."""
    for name in ("skip_loss", "skip_output") if learnt(metadata) else ("skip_output",):
        if frame[name].notna().any() and len(frame) > 1:
            return frame[name]
    return None


def _in_words(costs: pd.Series, metadata: Mapping[str, Any], place: int) -> str:
    loss, cost = metadata.get("loss"), float(costs.iloc[place])
    if costs.name == "skip_loss" and loss:
        return f"loss {cost:+.3f}, {cost / loss:+.1%}"
    return f"the output moves by {cost:.0%}"


def _carriers(costs: pd.Series) -> list[int]:
    """The fewest blocks that have `CARRY` of the costs, in the order of the model; what a skip gains counts as 0."""
    work = costs.fillna(0.0).clip(lower=0).to_numpy(dtype=float)
    order = np.argsort(-work, kind="stable")
    needed = int(np.searchsorted(work[order].cumsum(), CARRY * work.sum() * (1 - 1e-12))) + 1
    return sorted(int(place) + 1 for place in order[:needed])


def _which_blocks(frame: pd.DataFrame, metadata: Mapping[str, Any]) -> Finding | None:
    costs = _costs(frame, metadata)
    if costs is None:
        return None
    work = costs.fillna(0.0).clip(lower=0).to_numpy(dtype=float)
    least = CHEAP * abs(metadata.get("loss") or 0.0) if costs.name == "skip_loss" else MOVES
    if not work.sum() > 0 or work.sum() < least:
        return None  # shares of next to nothing are noise
    half, odd = divmod(len(work), 2)
    first = float((work[:half].sum() + odd * work[half] / 2) / work.sum())  # the middle one is half in each half
    most, carriers = int(work.argmax()), _carriers(costs)
    share = float(work[np.array(carriers) - 1].sum() / work.sum())
    sentence = (
        f"Most of the work is in {len(carriers)} of {len(work)} blocks ({ranges(carriers)}): of what skipping single "
        f"blocks costs, they have {share:.0%}, and the first half of the model {first:.0%}; block {most + 1} costs "
        f"most ({_in_words(costs, metadata, most)})."
    )
    if work.max() <= EVEN * work.min():
        cost = _in_words(costs, metadata, most)
        sentence = f"The work is spread evenly over the {len(work)} blocks: skipping any costs about the same ({cost})."
    numbers = {"first_half": first, "costliest": most + 1.0, "carriers": float(len(carriers)), "share": share}
    return Finding("half", sentence, numbers)


def _could_go(frame: pd.DataFrame, metadata: Mapping[str, Any]) -> Finding | None:
    costs, loss = _costs(frame, metadata), metadata.get("loss")
    if costs is None:
        return None
    limit, bound = MOVES, f"the output moves by less than {MOVES:.0%}"
    if costs.name == "skip_loss" and loss:
        limit, bound = CHEAP * loss, f"the loss ({loss:.3f}) rises by less than {CHEAP:.0%}"
    cheap, least = [int(block) for block in frame["block"][costs < limit]], int(costs.argmin())
    numbers = {"blocks": float(len(cheap)), "of": float(len(frame)), "least_block": least + 1.0}
    numbers |= {"least": float(costs.iloc[least]), "limit": limit}
    cheapest = f"cheapest is block {least + 1} ({_in_words(costs, metadata, least)})"
    if not cheap:
        return Finding("could go", f"No block could go so that {bound}; {cheapest}.", numbers)
    each = ", one at a time" if len(cheap) > 1 else ""
    sentence = f"{blocks_of(cheap).capitalize()} could go{each}: {bound}; {cheapest}. Other text may name other blocks."
    return Finding("could go", sentence, numbers)


def _settled_at(frame: pd.DataFrame) -> int | None:
    """The first block from which on the lens has the final first choice of enough tokens; None without a lens."""
    if not frame["lens_top1"].notna().any():
        return None
    unsettled = np.flatnonzero(frame["lens_top1"].to_numpy() < SETTLED)
    return min(int(unsettled[-1]) + 2, len(frame)) if len(unsettled) else 1


def _settled(frame: pd.DataFrame) -> Finding | None:
    at, depth = _settled_at(frame), len(frame)
    if at is None or depth == 1:  # a single block is both the first and the last
        return None
    top1 = [float(share) for share in frame["lens_top1"]]
    numbers = {"block": float(at), "top1": top1[at - 1], "middle": top1[depth // 2 - 1]}
    sentence = (
        f"The prediction is settled after block {at} of {depth}: {top1[at - 1]:.0%} of the tokens have their final "
        f"first choice there (logit lens), {numbers['middle']:.0%} halfway."
    )
    if at == depth:
        sentence = (
            f"The prediction is not settled before the last block: {top1[-2]:.0%} of the tokens have their final first "
            f"choice one block earlier, {numbers['middle']:.0%} halfway."
        )
    return Finding("settled", sentence, numbers)
