"""How much of its depth a model uses, in words: which half does the work, where the prediction is settled, which blocks
could go, whether tokens that are alike have lost their context. Every sentence has its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from depthscope.naming import blocks_of, ranges

WRITES = 0.1  # of the trunk's norm: a branch that is smaller turns no token by more than 6°, arcsin 0.1
SETTLED = 0.9  # of the tokens have the model's own first choice: nine of ten predictions are made
NEAR = 0.1  # nats between the lens and the final distribution: their likelihoods differ by a tenth on average
SPARE = 0.01  # of the loss: the same measure as that of the verdict of `probe`
USEFUL = 0.1  # of the loss: where arXiv 2603.15389 calls a block useful
MOVES = 0.1  # of the output's norm, where there is no loss: 6°, as for WRITES
BUILT_UPON = 0.1  # of what the later blocks add: without the block they do something else in the first digit
LINEAR = 0.1  # of what a block adds is missed by its linear map: it is linear to one digit
MOST = 0.5  # of the heads: attention of this block is mainly a sink
LARGE_LOGIT = 100.0  # where Kimi K2 (2025) clips: beyond it a softmax in half precision is one-hot, and training breaks
LEANS = 2 / 3  # of the work in one half of the blocks: twice as much as in the other
CARRY = 0.75  # of all that skipping single blocks costs: what is left is a third of it
HALF = 0.5  # of the energy: as in the verdict of `probe`
MINE = 0.1  # of the energy, likewise: a sequence's own part that is more than the noise of a mean of some ten tokens
LEFT = 0.001  # of the energy, likewise: with less than this of their own even tokens of a trained model have collapsed
SHORT = 20  # tokens: in shorter sequences even uniform causal attention gives the first token half of what makes a sink


@dataclass(frozen=True)
class Finding:
    """One sentence, the rule that said it, and the numbers it rests on."""

    rule: str
    sentence: str
    numbers: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def findings_of(frame: pd.DataFrame, metadata: Mapping[str, Any]) -> tuple[Finding, ...]:
    """What can be said of the numbers that are there, in the order in which people ask."""
    rules = (_which_half, _could_go, _settled, _alike, _built_upon, _linear, _small, _erases, _sinks, _logits)
    found = (rule(frame, metadata) for rule in rules)
    return tuple(finding for finding in found if finding is not None)


def counts_of(frame: pd.DataFrame, metadata: Mapping[str, Any]) -> pd.DataFrame:
    """Index `question`, columns blocks, of, rests_on: one number for each thing that was looked at."""
    depth, work, settled = len(frame), _work(frame, metadata), _settled_at(frame)
    loss, linear = (metadata.get(name) if learnt(metadata) else None for name in ("loss", "linear_loss"))
    sizes = frame[[name for name in frame.columns if str(name).endswith("_ratio")]].max(axis=1)
    why = "there is no loss" if learnt(metadata) else "the loss of random weights says nothing"
    missed = (_count(frame["skip_output"], MOVES), f"skipped, the output moves by {MOVES:.0%} or more ({why})")
    if loss is not None:
        missed = (_count(frame["skip_loss"], SPARE * loss), f"skipped, loss {SPARE:+.0%} or more")
    rows: list[tuple[str, int | None, int, str]] = [
        ("write", _count(sizes, WRITES), depth, f"some branch has at least {WRITES:g} of the residual stream's norm"),
        (
            "until the prediction is settled",
            None if not _there(frame, "lens_top1") else settled or depth,
            depth,
            f"{SETTLED:.0%} of the tokens have the final first choice (logit lens)",
        ),
        (
            "are built upon",
            _count(frame["skip_later"], BUILT_UPON),
            depth - 1,
            f"without one, later blocks add something else by {BUILT_UPON:.0%} or more; the last has none after it",
        ),
        ("are missed", missed[0], depth, missed[1]),
        (
            "carry most of it",
            None if work is None or not work[1].sum() > 0 else len(_carriers(work[1])),
            depth,
            f"the fewest that have {CARRY:.0%} of all that skipping single blocks costs",
        ),
        (
            "are useful",
            None if linear is None else _count(frame["linear_loss"], USEFUL * linear),
            depth,
            f"replaced by a matrix, loss {USEFUL:+.0%} or more (2603.15389)",
        ),
        (
            "are not linear",
            _count(frame["linear_error"], LINEAR),
            depth,
            f"a matrix misses {LINEAR:.0%} or more of what the block adds",
        ),
    ]
    known = [row for row in rows if row[1] is not None]
    return pd.DataFrame(known, columns=["question", "blocks", "of", "rests_on"]).set_index("question")


def _count(values: pd.Series, least: float) -> int | None:
    return int((values >= least).sum()) if values.notna().any() else None


def learnt(metadata: Mapping[str, Any]) -> bool:
    """Whether the loss says something: that of random weights is chance, and so is what a block adds to it."""
    return bool((metadata.get("weights") or {}).get("look") != "initialised")


def _there(frame: pd.DataFrame, name: str) -> bool:
    return name in frame and bool(frame[name].notna().any())


def _blocks(frame: pd.DataFrame, chosen: pd.Series) -> list[int]:
    """The numbers of the blocks that were chosen."""
    return [int(block) for block in frame["block"][chosen]]


def _work(frame: pd.DataFrame, metadata: Mapping[str, Any]) -> tuple[str, np.ndarray] | None:
    """What skipping costs: of the loss where there is one and the model was trained for it, else of the output; what it
    gains counts as nothing."""
    for name in ("skip_loss", "skip_output") if learnt(metadata) else ("skip_output",):
        if _there(frame, name) and len(frame) > 1:
            return name, frame[name].fillna(0.0).clip(lower=0).to_numpy(dtype=float)
    return None


def _carriers(work: np.ndarray) -> list[int]:
    """The fewest blocks that have `CARRY` of the work, in the order of the model."""
    order = np.argsort(-work, kind="stable")
    needed = int(np.searchsorted(work[order].cumsum(), CARRY * work.sum() * (1 - 1e-12))) + 1
    return sorted(int(place) + 1 for place in order[:needed])


def _which_half(frame: pd.DataFrame, metadata: Mapping[str, Any]) -> Finding | None:
    found = _work(frame, metadata)
    if found is None or not found[1].sum() > 0:
        return None
    name, work = found
    if work.sum() < (SPARE * abs(metadata.get("loss") or 0.0) if name == "skip_loss" else MOVES):
        return None  # shares of next to nothing are noise
    half, odd = len(work) // 2, len(work) % 2  # of an odd number of blocks the middle one is in neither half
    first, second = (float(part.sum() / work.sum()) for part in (work[:half], work[half + odd :]))
    most, carriers = int(work.argmax()), _carriers(work)
    numbers = {"first_half": first, "second_half": second, "costliest": most + 1.0, "carriers": float(len(carriers))}
    if len(work) > 3 and (rest := work[1:-1].sum()) > 0:
        numbers["first_half_without_ends"] = float(work[1:half].sum() / rest)
    middle = f", {work[half] / work.sum():.0%} in the middle one, block {half + 1}" if odd else ""
    if first + second < HALF:
        which = f"The middle of the model (block {half + 1}) does"
    elif max(first, second) >= LEANS * (first + second):
        side = range(1, half + 1) if first > second else range(half + odd + 1, len(work) + 1)
        which = f"The {'first' if first > second else 'second'} half of the model ({blocks_of(side)}) does"
    else:
        which = "Both halves of the model do"
    sentence = (
        f"{which}{' most of' if which[0] == 'T' else ''} the work: of what skipping single blocks costs, "
        f"{first:.0%} is "
        f"in the first half, {second:.0%} in the second{middle}. {CARRY:.0%} of it is in {len(carriers)} of "
        f"{len(work)} "
        f"blocks ({ranges(carriers)}); block {most + 1} costs most ({_cost(frame, name, metadata, most)})."
    )
    return Finding("half", sentence, numbers)


def _cost(frame: pd.DataFrame, name: str, metadata: Mapping[str, Any], place: int) -> str:
    loss, cost = metadata.get("loss"), float(frame[name].iloc[place])
    if name == "skip_loss" and loss:
        return f"loss {cost:+.3f}, {cost / loss:+.1%}"
    return f"the output moves by {cost:.0%}"


def _settled_at(frame: pd.DataFrame) -> int | None:
    """The first block from which on the lens has the final first choice of enough tokens; None before the last."""
    if not _there(frame, "lens_top1"):
        return None
    unsettled = np.flatnonzero(frame["lens_top1"].to_numpy() < SETTLED)
    settled = int(unsettled[-1]) + 1 if len(unsettled) else 0
    return settled + 1 if settled < len(frame) else None


def _settled(frame: pd.DataFrame, _metadata: Mapping[str, Any]) -> Finding | None:
    at, depth = _settled_at(frame), len(frame)
    if at is None or depth == 1:  # a single block is both the first and the last
        return None
    top1, kl, top5 = (float(frame[name].iloc[at - 1]) for name in ("lens_top1", "lens_kl", "lens_top5"))
    near = next((b for b in range(1, depth + 1) if (frame["lens_kl"].iloc[b - 1 :] <= NEAR).all()), depth)
    middle = float(frame["lens_top1"].iloc[depth // 2 - 1])
    numbers = {"block": float(at), "top1": top1, "kl": kl, "top5": top5, "near": float(near), "middle": middle}
    if at == depth:
        before = numbers["before"] = float(frame["lens_top1"].iloc[-2])
        return Finding(
            "settled",
            f"The prediction is not settled before the last block: {before:.0%} of the tokens have their final first "
            f"choice one block earlier, {middle:.0%} halfway.",
            numbers,
        )
    after = "" if near <= at else f" How sure the model is settles after block {near} (KL below {NEAR:g})."
    return Finding(
        "settled",
        f"The prediction is settled after block {at} of {depth}: {top1:.0%} of the tokens have their final first "
        "choice "
        f"there (logit lens), {middle:.0%} halfway.{after}",
        numbers,
    )


def _could_go(frame: pd.DataFrame, metadata: Mapping[str, Any]) -> Finding | None:
    found = _work(frame, metadata)
    if found is None:
        return None
    name, loss = found[0], metadata.get("loss")
    limit, bound = MOVES, f"the output moves by less than {MOVES:.0%}"
    if name == "skip_loss" and loss:
        limit, bound = SPARE * loss, f"the loss ({loss:.3f}) rises by less than {SPARE:.0%}"
    costs = frame[name]
    spare, least = _blocks(frame, costs < limit), int(costs.argmin())
    numbers = {"blocks": float(len(spare)), "of": float(len(frame)), "least_block": least + 1.0}
    numbers |= {"least": float(costs.iloc[least]), "limit": limit}
    cheapest = f"cheapest is block {least + 1} ({_cost(frame, name, metadata, least)})"
    if not spare:
        return Finding("could go", f"No block could go so that {bound}; {cheapest}.", numbers)
    each = ", one at a time" if len(spare) > 1 else ""
    sentence = f"{blocks_of(spare).capitalize()} could go{each}: {bound}; {cheapest}. Other text may name other blocks."
    return Finding("could go", sentence, numbers)


def _built_upon(frame: pd.DataFrame, _metadata: Mapping[str, Any]) -> Finding | None:
    if not _there(frame, "skip_later"):
        return None
    effects = frame["skip_later"].iloc[:-1]
    alone = _blocks(frame.iloc[:-1], effects < BUILT_UPON)
    numbers = {"median": float(effects.median()), "alone": float(len(alone)), "of": float(len(effects))}
    some = f"; on {blocks_of(alone)} they hardly depend (below {BUILT_UPON:g})" if alone else ""
    said = (
        f"Without one block, the later ones change what they add by {effects.median():.0%} (median over blocks){some}."
    )
    return Finding("built upon", said, numbers)


def _linear(frame: pd.DataFrame, metadata: Mapping[str, Any]) -> Finding | None:
    if not _there(frame, "linear_error"):
        return None
    errors, loss = frame["linear_error"], metadata.get("linear_loss") if learnt(metadata) else None
    numbers = {"median_error": float(errors.median())}
    said = f"A matrix, fitted on one half of the text, misses {errors.median():.0%} of what a block adds (median)"
    if loss is not None and _there(frame, "linear_loss"):
        cheap = _blocks(frame, frame["linear_loss"] < SPARE * loss)
        useful = int((frame["linear_loss"] >= USEFUL * loss).sum())
        numbers |= {"linear_blocks": float(len(cheap)), "useful": float(useful), "of": float(len(frame))}
        named = f" ({ranges(cheap)})" if cheap else ""
        said += (
            f"; in its place it costs less than {SPARE:.0%} of the loss for {len(cheap)} of {len(frame)} "
            f"blocks{named}, "
            f"and {USEFUL:.0%} or more for {useful}"
        )
    return Finding("linear", said + ".", numbers)


def _small(frame: pd.DataFrame, _metadata: Mapping[str, Any]) -> Finding | None:
    columns = [name for name in frame if str(name).endswith("_ratio") and frame[name].notna().any()]
    sizes = frame[columns].max(axis=1)
    small = _blocks(frame, sizes < WRITES) if columns else []
    if not small:
        return None
    numbers = {"small": float(len(small)), "of": float(len(frame)), "median": float(sizes.median())}
    adds = f"{blocks_of(small).capitalize()} add{'s' if len(small) == 1 else ''} little"
    return Finding("small branches", f"{adds}: less than {WRITES:g} of the residual stream's norm.", numbers)


def _erases(frame: pd.DataFrame, _metadata: Mapping[str, Any]) -> Finding | None:
    parts: list[str] = []
    numbers: dict[str, float] = {}
    for branch, word in (("attention", "Attention"), ("ffn", "the FFN")):
        name = f"{branch}_cosine"
        against = _blocks(frame, frame[name] < -HALF) if _there(frame, name) else []
        if against:
            least = int(frame[name].argmin())
            numbers |= {f"{branch}_blocks": float(len(against)), f"{branch}_least": float(frame[name].iloc[least])}
            parts.append(
                f"{word} in {blocks_of(against)} (cosine down to {frame[name].iloc[least]:.2f}, block {least + 1})"
            )
    if not parts:
        return None
    said = " and ".join(parts)
    return Finding("erases", f"{said[0].upper()}{said[1:]} takes back what is on the residual stream.", numbers)


def _sinks(frame: pd.DataFrame, metadata: Mapping[str, Any]) -> Finding | None:
    if not _there(frame, "sink_rate") or not frame["sink_rate"].max() > 0 or metadata.get("shortest", SHORT) < SHORT:
        return None
    rates = frame["sink_rate"]
    most, top, mean = _blocks(frame, rates > MOST), int(rates.argmax()), float(rates.mean())
    numbers = {"blocks": float(len(most)), "largest": float(rates.max()), "block": top + 1.0, "mean": mean}
    where = f", more than half of the heads in {blocks_of(most)}" if most else ""
    said = (
        f"{mean:.0%} of all heads give over 0.3 of their attention to the first token{where}; at most "
        f"{rates.max():.0%} (block {top + 1})."
    )
    return Finding("sinks", said, numbers)


def _logits(frame: pd.DataFrame, _metadata: Mapping[str, Any]) -> Finding | None:
    if not _there(frame, "largest_logit") or not frame["largest_logit"].max() >= LARGE_LOGIT:
        return None
    top, largest = int(frame["largest_logit"].argmax()), float(frame["largest_logit"].max())
    return Finding(
        "logits",
        f"The largest attention logit is {largest:.0f}, in block {top + 1}: beyond {LARGE_LOGIT:g} training tends to "
        "break (a norm of queries and keys, or clipping, holds it).",
        {"largest": largest, "block": float(top + 1)},
    )


def _alike(_frame: pd.DataFrame, metadata: Mapping[str, Any]) -> Finding | None:
    energy = metadata.get("energy")
    if not energy or metadata.get("shortest", 2) < 2:  # a single token is alike to itself whatever the model does
        return None
    shared, own, token = energy["shared"], energy["sequence"], energy["token"] + energy["position"]
    if shared + own < HALF:
        said = "Tokens are not alike in the end"
    elif own < MINE:
        said = f"Tokens are alike in the end by a part that all sequences share{_no_loss(metadata, token)}"
    elif own >= token:
        said = "Tokens of a sequence have become alike, and sequences differ: a loss of context"
    else:
        said = "Tokens are alike in the end, by a part that all sequences share and by one of each sequence"
    split = (
        f"{shared:.0%} of their energy is common to all sequences, {own:.0%} to a sequence, {token:.0%} is a token's "
        "own"
    )
    return Finding("alike", f"{said}: {split}.", {"shared": shared, "sequence": own, "token": token})


def _no_loss(metadata: Mapping[str, Any], token: float) -> str:
    """Training can make a direction that costs nothing; of random weights the same is a collapse, as is a direction
    beside which nothing is left."""
    look = (metadata.get("weights") or {}).get("look", "unknown")
    if look == "initialised" or token <= LEFT:
        return ""
    return ", which is no loss of context" if look == "trained" else ", which in trained weights is no loss of context"
