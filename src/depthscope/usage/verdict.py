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
    rules = (_which_half, _settled, _could_go, _built_upon, _linear, _small, _erases, _sinks, _logits, _alike)
    found = (rule(frame, metadata) for rule in rules)
    return tuple(finding for finding in found if finding is not None)


def counts_of(frame: pd.DataFrame, metadata: Mapping[str, Any]) -> pd.DataFrame:
    """Index `question`, columns blocks, of, rests_on: one number for each thing that was looked at."""
    loss, linear = (metadata.get(name) if _learnt(metadata) else None for name in ("loss", "linear_loss"))
    sizes = frame[[name for name in frame.columns if str(name).endswith("_ratio")]].max(axis=1)
    settled = _settled_at(frame)
    rows: list[tuple[str, Any, int, str]] = [
        ("write", _count(sizes, WRITES), len(frame), f"some branch has at least {WRITES:g} of the trunk's norm"),
        (
            "until the prediction is settled",
            settled if settled is not None else len(frame) if _there(frame, "lens_top1") else None,
            len(frame),
            f"{SETTLED:.0%} of the tokens have the final first choice (logit lens)",
        ),
        (
            "are built upon",
            _count(frame["skip_later"], BUILT_UPON),
            len(frame) - 1,
            f"without one, later blocks add something else by {BUILT_UPON:.0%} or more; the last has none after it",
        ),
    ]
    if loss is not None:
        rows.append(
            ("are missed", _count(frame["skip_loss"], SPARE * loss), len(frame), f"skipped, loss {SPARE:+.0%} or more")
        )
    else:
        why = "there is no loss" if _learnt(metadata) else "the loss of random weights says nothing"
        moved = f"skipped, the output moves by {MOVES:.0%} or more ({why})"
        rows.append(("are missed", _count(frame["skip_output"], MOVES), len(frame), moved))
    if (work := _work(frame, metadata)) is not None and work[1].sum() > 0:
        said = f"the fewest that have {CARRY:.0%} of all that skipping single blocks costs"
        rows.append(("carry most of it", len(_carriers(work[1])), len(frame), said))
    if linear is not None:
        rows.append(
            ("are useful", _count(frame["linear_loss"], USEFUL * linear), len(frame),
             f"replaced by a linear map, loss {USEFUL:+.0%} or more (2603.15389)")
        )  # fmt: skip
    rows.append(
        ("are not linear", _count(frame["linear_error"], LINEAR), len(frame),
         f"a linear map misses {LINEAR:.0%} or more of what the block adds")
    )  # fmt: skip
    known = [row for row in rows if row[1] is not None]
    return pd.DataFrame(known, columns=["question", "blocks", "of", "rests_on"]).set_index("question")


def _count(values: pd.Series, least: float) -> int | None:
    return int((values >= least).sum()) if values.notna().any() else None


def _learnt(metadata: Mapping[str, Any]) -> bool:
    """Whether the loss says something: that of random weights is chance, and so is what a block adds to it."""
    return bool((metadata.get("weights") or {}).get("look") != "initialised")


def _there(frame: pd.DataFrame, name: str) -> bool:
    return name in frame and bool(frame[name].notna().any())


def _work(frame: pd.DataFrame, metadata: Mapping[str, Any]) -> tuple[str, np.ndarray] | None:
    """What skipping costs: of the loss where there is one and the model was trained for it, else of the output; what it
    gains counts as nothing."""
    for name in ("skip_loss", "skip_output") if _learnt(metadata) else ("skip_output",):
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
    lower, upper = blocks_of(range(1, half + 1)), blocks_of(range(half + odd + 1, len(work) + 1))
    middle = f", {work[half] / work.sum():.0%} in the middle one, block {half + 1}" if odd else ""
    both = first + second
    if both < HALF:
        which = f"The middle of the model (block {half + 1}) does most of the work"
    elif first >= LEANS * both:
        which = f"The first half of the model ({lower}) does most of the work"
    elif second >= LEANS * both:
        which = f"The second half of the model ({upper}) does most of the work"
    else:
        which = "Both halves of the model do work"
    inner = ""
    if len(work) > 3 and (rest := work[1:-1].sum()) > 0:
        numbers["first_half_without_ends"] = float(work[1:half].sum() / rest)
        inner = f" (without the first and the last block: {numbers['first_half_without_ends']:.0%})"
    sentence = (
        f"{which}: of all that skipping single blocks costs, {first:.0%} is in {lower}{inner}, {second:.0%} in "
        f"{upper}{middle}. {CARRY:.0%} of it is in {len(carriers)} of {len(work)} blocks "
        f"({ranges(carriers)}); block {most + 1} costs most ({_cost(frame, name, metadata, most)})."
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
    enough = (frame["lens_top1"] >= SETTLED).to_numpy()
    settled = len(enough)
    while settled > 0 and enough[settled - 1]:
        settled -= 1
    return settled + 1 if settled < len(enough) else None


def _settled(frame: pd.DataFrame, _metadata: Mapping[str, Any]) -> Finding | None:
    at, depth = _settled_at(frame), len(frame)
    if at is None or depth == 1:  # a single block is both the first and the last
        return None
    top1, kl, top5 = (float(frame[name].iloc[at - 1]) for name in ("lens_top1", "lens_kl", "lens_top5"))
    near = next((b for b in range(1, depth + 1) if (frame["lens_kl"].iloc[b - 1 :] <= NEAR).all()), depth)
    middle = float(frame["lens_top1"].iloc[depth // 2 - 1])
    numbers = {"block": float(at), "top1": top1, "kl": kl, "top5": top5, "near": float(near), "middle": middle}
    if at == depth:
        numbers["before"] = float(frame["lens_top1"].iloc[-2])
        said = (
            f"The prediction is not settled before the last block; one block earlier {numbers['before']:.0%} of the "
            f"tokens have the final first choice, halfway {middle:.0%}."
        )
        return Finding("settled", said, numbers)
    after = f"The blocks after it change how sure the model is; the KL is below {NEAR:g} from block {near} on."
    if near <= at:
        after = f"The blocks after it hardly change how sure the model is: the KL is below {NEAR:g} from there on."
    return Finding(
        "settled",
        f"The prediction is settled from block {at} of {depth} on: {top1:.0%} of the tokens have their final first "
        f"choice there (logit lens; KL {kl:.2f} nats, {top5:.0%} of the five likeliest), halfway {middle:.0%}. {after}",
        numbers,
    )


def _could_go(frame: pd.DataFrame, metadata: Mapping[str, Any]) -> Finding | None:
    found = _work(frame, metadata)
    if found is None:
        return None
    name, _ = found
    loss = metadata.get("loss")
    limit, bound = MOVES, f"the output moves by less than {MOVES:.0%}"
    if name == "skip_loss" and loss:
        limit, bound = SPARE * loss, f"the loss ({loss:.3f}) rises by less than {SPARE:.0%}"
    costs = frame[name]
    spare = [int(block) for block, cost in zip(frame["block"], costs, strict=True) if cost < limit]
    least = int(costs.argmin())
    numbers = {"blocks": float(len(spare)), "of": float(len(frame)), "least_block": least + 1.0}
    numbers |= {"least": float(costs.iloc[least]), "limit": limit}
    cheapest = f"cheapest is block {least + 1} ({_cost(frame, name, metadata, least)})"
    if not spare:
        return Finding("could go", f"No block could go so that {bound}; {cheapest}.", numbers)
    together = " This is of one block at a time: skip_loss(run=2) measures two in a row." if len(spare) > 1 else ""
    each = ", each by itself" if len(spare) > 1 else ", by itself"
    sentence = f"{blocks_of(spare).capitalize()} could go{each}: {bound}; {cheapest}.{together}"
    return Finding("could go", sentence, numbers)


def _built_upon(frame: pd.DataFrame, _metadata: Mapping[str, Any]) -> Finding | None:
    if not _there(frame, "skip_later"):
        return None
    effects = frame["skip_later"].iloc[:-1]
    alone = [int(b) for b, e in zip(frame["block"], effects, strict=False) if e < BUILT_UPON]
    numbers = {"median": float(effects.median()), "alone": float(len(alone)), "of": float(len(effects))}
    some = f"; on {blocks_of(alone)} they hardly depend (below {BUILT_UPON:g})" if alone else ""
    return Finding(
        "built upon",
        f"Without one block, the later ones change what they add by {effects.median():.0%} (median over blocks){some}.",
        numbers,
    )


def _linear(frame: pd.DataFrame, metadata: Mapping[str, Any]) -> Finding | None:
    if not _there(frame, "linear_error"):
        return None
    errors, loss = frame["linear_error"], metadata.get("linear_loss") if _learnt(metadata) else None
    numbers = {"median_error": float(errors.median())}
    said = f"A linear map, fitted on one half of the text, misses {errors.median():.0%} of what a block adds (median)"
    if loss is not None and _there(frame, "linear_loss"):
        cheap = [int(b) for b, c in zip(frame["block"], frame["linear_loss"], strict=True) if c < SPARE * loss]
        useful = int((frame["linear_loss"] >= USEFUL * loss).sum())
        numbers |= {"linear_blocks": float(len(cheap)), "useful": float(useful), "of": float(len(frame))}
        named = f" ({ranges(cheap)})" if cheap else ""
        said += (
            f"; in its place it costs less than {SPARE:.0%} of the loss for {len(cheap)} of {len(frame)} blocks"
            f"{named}, and {USEFUL:.0%} or more for {useful}"
        )
    return Finding("linear", said + ".", numbers)


def _small(frame: pd.DataFrame, _metadata: Mapping[str, Any]) -> Finding | None:
    columns = [name for name in frame if str(name).endswith("_ratio") and frame[name].notna().any()]
    if not columns:
        return None
    sizes = frame[columns].max(axis=1)
    small = [int(b) for b, s in zip(frame["block"], sizes, strict=True) if s < WRITES]
    numbers = {"small": float(len(small)), "of": float(len(frame)), "median": float(sizes.median())}
    if not small:
        return None
    return Finding(
        "small branches",
        f"{blocks_of(small).capitalize()} add{'s' if len(small) == 1 else ''} little: no branch has {WRITES:g} of the "
        f"trunk's norm there (median over tokens).",
        numbers,
    )


def _erases(frame: pd.DataFrame, _metadata: Mapping[str, Any]) -> Finding | None:
    parts: list[str] = []
    numbers: dict[str, float] = {}
    for branch, word in (("attention", "attention"), ("ffn", "the FFN")):
        name = f"{branch}_cosine"
        if not _there(frame, name):
            continue
        against = [int(b) for b, c in zip(frame["block"], frame[name], strict=True) if c < -HALF]
        if against:
            least = int(frame[name].argmin())
            numbers |= {f"{branch}_blocks": float(len(against)), f"{branch}_least": float(frame[name].iloc[least])}
            parts.append(
                f"{word} in {blocks_of(against)} (cosine down to {frame[name].iloc[least]:.2f} in block {least + 1})"
            )
    if not parts:
        return None
    return Finding("erases", f"What is on the trunk is taken back rather than added to by {', and by '.join(parts)}.",
                   numbers)  # fmt: skip


def _sinks(frame: pd.DataFrame, metadata: Mapping[str, Any]) -> Finding | None:
    if not _there(frame, "sink_rate") or not frame["sink_rate"].max() > 0 or metadata.get("shortest", SHORT) < SHORT:
        return None
    rates = frame["sink_rate"]
    most = [int(b) for b, rate in zip(frame["block"], rates, strict=True) if rate > MOST]
    top = int(rates.argmax())
    numbers = {"blocks": float(len(most)), "largest": float(rates.max()), "block": float(top + 1),
               "mean": float(rates.mean())}  # fmt: skip
    where = f"in {blocks_of(most)} more than half of the heads do" if most else "in no block half of the heads do"
    return Finding(
        "sinks",
        f"{rates.mean():.0%} of all heads give over 0.3 of their attention to the first token; {where}, at most "
        f"{rates.max():.0%} (block {top + 1}). To that extent a head adds the same to every token.",
        numbers,
    )


def _logits(frame: pd.DataFrame, _metadata: Mapping[str, Any]) -> Finding | None:
    if not _there(frame, "largest_logit") or not frame["largest_logit"].max() >= LARGE_LOGIT:
        return None
    top = int(frame["largest_logit"].argmax())
    largest = float(frame["largest_logit"].iloc[top])
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
    numbers = {"shared": shared, "sequence": own, "token": token}
    split = f"{shared:.0%} is one direction of all sequences, {own:.0%} the sequence's own, {token:.0%} the token's own"
    if shared + own < HALF:
        said = f"Tokens are not alike in the end: of their energy (unit length, without outliers) {split}."
    elif own < MINE:
        said = (
            f"Tokens are alike in the end by a direction that all sequences share{_no_loss(metadata, token)}: of "
            f"their energy (unit length, without outliers) {split}."
        )
    elif own >= token:
        said = (
            f"Tokens of a sequence have become alike, and sequences differ: a loss of context. Of their energy (unit "
            f"length, without outliers) {split}."
        )
    else:
        said = (
            f"Tokens are alike in the end, in part by a direction that all sequences share and in part by what is "
            f"common to a sequence: of their energy (unit length, without outliers) {split}."
        )
    return Finding("alike", said, numbers)


def _no_loss(metadata: Mapping[str, Any], token: float) -> str:
    """Training can make a direction that costs nothing; of random weights the same is a collapse, as is a direction
    beside which nothing is left."""
    look = (metadata.get("weights") or {}).get("look", "unknown")
    if look == "initialised" or token <= LEFT:
        return ""
    return ", which is no loss of context" if look == "trained" else ", which in trained weights is no loss of context"
