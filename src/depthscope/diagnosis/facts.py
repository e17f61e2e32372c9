"""What the rules ask about: numbers read from a profile, each when it is first wanted.

A model of several parts has several residual streams; `Facts` is about that whose tokens end up most alike, and `span`
names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from depthscope.diagnosis.outliers import Sink, find_sink
from depthscope.diagnosis.references import reference_for
from depthscope.diagnosis.steps import log_odds, step_growth
from depthscope.diagnosis.trend import fit_trend
from depthscope.hooks.ablation import in_words
from depthscope.measures import EQUAL
from depthscope.probing import Profile, Reference
from depthscope.probing.profile import most_alike
from depthscope.stations import trunk_is_a_sum

FITS = 0.25  # of the odds: a law that half of the blocks miss by more does not hold
AGREE = 2.0  # forecasts of the fits that the blocks allow: further apart than this factor they forecast nothing
SIMILARITIES = {
    "token_similarity": "token similarity",
    "direction_similarity": "similarity of directions without outliers",
    "cosine_similarity": "mean cosine",
}


@dataclass(frozen=True)
class Facts:
    """A profile, with names for what is asked about it."""

    profile: Profile

    # --- what was measured, of what -----------------------------------------------------------------

    @cached_property
    def about(self) -> dict[str, Any]:
        """What the profile says of the model, and, where that has several parts, of the one that is judged."""
        about = self.profile.metadata
        return about | about.get("towers", {}).get(self.span[0], {})

    @property
    def without(self) -> str:
        """What was left out of the model while it was measured, in words; "" if it was whole."""
        left_out = self.profile.metadata.get("without") or ()
        return in_words(left_out) if left_out else ""

    @property
    def pre_norm(self) -> bool:
        """Whether the residual stream is a plain sum of what the branches add, as in pre-norm."""
        return trunk_is_a_sum(self.about.get("placement"))

    @property
    def may_leak(self) -> bool:
        """Causal, or not known not to be."""
        return self.about.get("causal") is not False

    @property
    def look(self) -> str:
        return str(self.about.get("weights", {}).get("look", "unknown"))

    @cached_property
    def span(self) -> tuple[str, int, int]:
        """Name of the part that is judged, the number before its first block, which stands for what enters, and its
        last block."""
        name = most_alike(self.profile)
        first, last = self.profile.parts[name]
        return name, first - 1, last

    @property
    def first(self) -> int:
        return self.span[1]

    @property
    def last(self) -> int:
        return self.span[2]

    @property
    def blocks(self) -> int:
        """Blocks in the part that is judged."""
        return self.last - self.first

    @property
    def remedied(self) -> tuple[int, ...] | None:
        """The blocks that a remedy is for: those of the part that is judged; None where that is all."""
        return tuple(range(self.first + 1, self.last + 1)) if len(self.profile.parts) > 1 else None

    def has(self, measure: str) -> bool:
        return measure in self.profile.names()

    def curve(self, measure: str) -> np.ndarray:
        """Blocks 0..L at `output`, with what enters the part that is judged in the place before its first block.

        All nan if it was not measured.
        """
        if not self.has(measure):
            return np.full(self.profile.depth + 1, math.nan)
        return self._with_entrance(np.array(self.profile.curve(measure)), self.profile.curve, measure)

    def _with_entrance(self, outputs: np.ndarray, at: Callable[..., Any], measure: str) -> np.ndarray:
        """In a profile of an early version, which has no `input`, the first block's output stands for it."""
        if self.first > 0:
            known = measure in self.profile.names("input")
            outputs[self.first] = at(measure, "input")[self.first + 1] if known else outputs[self.first + 1]
        return outputs

    def start(self, measure: str) -> float:
        return float(self.curve(measure)[self.first])

    def end(self, measure: str) -> float:
        return float(self.curve(measure)[self.last])

    # --- what may make every number meaningless -----------------------------------------------------

    @cached_property
    def entered_broken(self) -> dict[int, tuple[int, str]]:
        """The sequences that were not finite before a block had run, and where: the others can be judged."""
        entrances = {(0, "output"), *((first, "input") for first, _ in self.profile.parts.values())}
        found = self.profile.metadata.get("not_finite", ())
        places = {item["sample"]: (item["block"], item["station"]) for item in found}
        return {sample: place for sample, place in places.items() if place in entrances}

    @property
    def samples(self) -> int:
        """The sequences that can be judged."""
        return int(self.about.get("samples", 1)) - len(self.entered_broken)

    @cached_property
    def entered_zero(self) -> bool:
        """Whether all tokens of all sequences are zero before the first block, so that they have no similarity."""
        name, norm = "token_similarity", "frobenius_norm"
        if not (self.has(name) and self.has(norm)):
            return False
        return bool(np.isnan(self.start(name)) and self.start(norm) == 0)

    @cached_property
    def broken(self) -> tuple[int, float, list[int]] | None:
        """First block with sequences that are not finite, or all zero, their share at the end, and all of them; None if
        there is none.

        A sequence without real tokens is undefined everywhere and does not count, unless all are, and neither does one
        that was not finite when it came.
        """
        frame = self.profile.frame
        name = next((n for n in ("token_similarity", "cosine_similarity", "frobenius_norm") if self.has(n)), None)
        if name is None or self.single_token:
            return None
        rows = frame[(frame["station"] == "output") & (frame["measure"] == name)]
        table = rows.pivot_table(index="block", columns="sample", values="value", dropna=False)
        bad = ~np.isfinite(table.to_numpy(dtype=np.float64))  # (blocks, samples)
        came = ~table.columns.isin(list(self.entered_broken))
        empty = bad.all(axis=0)
        counts = came if empty[came].all() else came & ~empty
        if not bad[:, counts].any():
            return None
        first = bad[:, counts].any(axis=1).argmax()
        hit = table.columns[counts & bad.any(axis=0)].tolist()
        return int(table.index[first]), float(bad[-1, counts].mean()), hit

    @cached_property
    def single_token(self) -> bool:
        """Whether no sequence has two tokens to compare."""
        if self.about.get("tokens") == 1:
            return True
        if not (self.has("cosine_similarity") and self.has("token_similarity")):
            return False
        return bool(np.isnan(self.curve("cosine_similarity")).all() and (self.curve("token_similarity") == 1).all())

    # --- similarity -----------------------------------------------------------------------------------

    @cached_property
    def sink(self) -> Sink | None:
        """The outlier token to name; None if half of the sequences or more have none."""
        return find_sink(self.profile, self.samples, self.first, self.last)

    @property
    def judged(self) -> str:
        """The measure that is judged: raw similarity, or, beside an outlier token, that of directions without it."""
        names = ("token_similarity", "direction_similarity", "cosine_similarity")
        if self.sink is not None:
            names = ("direction_similarity", "cosine_similarity", "token_similarity")
        return next((name for name in names if self.has(name)), names[0])

    @property
    def what(self) -> str:
        """The judged similarity in words, and the part, if there are several."""
        name = self.span[0]
        where = name if " " in name else f"the {name}" if name in ("encoder", "decoder") else f"the {name} tower"
        return SIMILARITIES[self.judged] + (f" in {where}" if name else "")

    @cached_property
    def similarity(self) -> np.ndarray:
        return self.curve(self.judged)

    def passes(self, level: float) -> int | None:
        """The first block of the part from which on the similarity that is judged stays at or above a level."""
        below = [b for b in range(self.first, self.last + 1) if not self.similarity[b] >= level]
        since = below[-1] + 1 if below else self.first
        return since if since <= self.last else None

    @cached_property
    def log_odds(self) -> np.ndarray:
        """Of the similarity that is judged, blocks 0..L; nan outside the part."""
        odds = partial(log_odds, self.profile)
        found = self._with_entrance(odds(self.judged).copy(), odds, self.judged)
        inside = np.arange(len(found))
        return np.where((inside >= self.first) & (inside <= self.last), found, math.nan)

    @cached_property
    def step_growth(self) -> dict[str, float]:
        """Growth of the log-odds by kind of step, up to where similarity passes 0.99; empty if not measured."""
        end = self.passes(EQUAL)
        until = self.last if end is None else max(end, self.first + 1)
        return step_growth(self.profile, self.judged, (self.span[0], self.first, until)) or {}

    @cached_property
    def arrival(self) -> tuple[int, int | None, int | None] | None:
        """The block at which further blocks like these would pass 0.99: best, earliest, latest (None: never).

        None without a forecast: a law is known of new post-norm blocks alone; half of the blocks may miss it, the fits
        that they allow may disagree, or it would be beyond ten times the depth.
        """
        odds = self.log_odds[self.first : self.last + 1]
        known = self.look == "initialised" and self.about.get("placement") == "post" and np.isfinite(odds[-1])
        trend = fit_trend(odds) if known else None
        if trend is None or trend.error > FITS:
            return None
        best, low, high = trend.block_of(EQUAL, math.exp(odds[-1]), self.blocks)
        if best is None or (low is not None and self.first + (high or 10 * self.blocks) > AGREE * (self.first + low)):
            return None
        return self.first + best, low and self.first + low, high and self.first + high

    # --- the rest ---------------------------------------------------------------------------------------

    def energy(self, part: str) -> float:
        """The share of the unit tokens' energy at the end; nan if it was not measured."""
        return self.end(f"energy_{part}")

    @property
    def rank(self) -> str:
        """The measure of the directions left: without outliers where that was measured."""
        return "ordinary_rank" if self.has("ordinary_rank") else "effective_rank"

    @property
    def rank_is_spoilt(self) -> bool:
        """Whether an outlier token makes the rank at one of the ends: it was not measured without."""
        ends = (self.first, self.last)
        return self.rank == "effective_rank" and self.sink is not None and any(b in self.sink.blocks for b in ends)

    @cached_property
    def reference(self) -> Reference | None:
        return reference_for(self.profile)
