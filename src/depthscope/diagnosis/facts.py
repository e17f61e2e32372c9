"""What the rules ask about: numbers read from a profile, each when it is first wanted.

A model of several parts has several trunks; `Facts` is about that whose tokens end up most alike, and `span` names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd

from depthscope.diagnosis.outliers import Outliers, RogueFeature, Sink, find_outliers, find_rogue_feature
from depthscope.diagnosis.references import reference_for
from depthscope.diagnosis.steps import Attention, attention_step, log_odds, step_growth
from depthscope.diagnosis.trend import Trend, fit_trend
from depthscope.hooks.ablation import in_words
from depthscope.measures import EQUAL
from depthscope.probing import Profile, Reference
from depthscope.probing.profile import most_alike
from depthscope.probing.roles import MEASURES, learning_ratios
from depthscope.stations import trunk_is_a_sum
from depthscope.usage import DepthUse
from depthscope.value_spectra import Spectra

NAN = math.nan
_NAMES = {
    "token_similarity": "token similarity",
    "direction_similarity": "similarity of directions without outliers",
    "cosine_similarity": "mean cosine",
}


@dataclass(frozen=True)
class Facts:
    """A profile, with names for what is asked about it."""

    profile: Profile
    skip_loss: pd.DataFrame | None = None
    spectra: Spectra | None = None
    use: DepthUse | None = None

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
        """Whether the trunk is a plain sum of what the branches add, as in pre-norm."""
        return trunk_is_a_sum(self.about.get("placement"))

    @property
    def may_leak(self) -> bool:
        """Causal, or not known not to be."""
        return self.about.get("causal") is not False

    @property
    def look(self) -> str:
        return str(self.about.get("weights", {}).get("look", "unknown"))

    def has(self, measure: str) -> bool:
        return measure in self.profile.names()

    def curve(self, measure: str) -> np.ndarray:
        """Blocks 0..L at `output`, with what enters the part that is judged in the place before its first block.

        All nan if it was not measured.
        """
        if not self.has(measure):
            return np.full(self.profile.depth + 1, NAN)
        found = np.asarray(self.profile.curve(measure))
        if self.first > 0:
            found[self.first] = self._entering(found, self.profile.curve, measure)
        return found

    def _entering(self, outputs: np.ndarray, of_station: Callable[..., Any], measure: str) -> float:
        """What enters the part that is judged; in a profile of earlier days its first block's output stands for it."""
        known = measure in self.profile.names("input")
        return float(of_station(measure, "input")[self.first + 1] if known else outputs[self.first + 1])

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

    def at(self, measure: str, block: int) -> float:
        return float(self.curve(measure)[block])

    def start(self, measure: str) -> float:
        return self.at(measure, self.first)

    def end(self, measure: str) -> float:
        return self.at(measure, self.last)

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
    def outliers(self) -> Outliers | None:
        """Tokens that are outliers for a quarter of the blocks that are judged; None if there are none."""
        return find_outliers(self.profile, self.samples, self.first, self.last)

    @property
    def sink(self) -> Sink | None:
        """The outlier token to name; None if most sequences have none."""
        return None if self.outliers is None else self.outliers.sink

    @property
    def judged(self) -> str:
        """The measure that is judged: raw similarity, or, beside an outlier token, that of directions without it."""
        names: Sequence[str] = ("token_similarity", "direction_similarity", "cosine_similarity")
        if self.sink is not None:
            names = ("direction_similarity", "cosine_similarity", "token_similarity")
        return next((name for name in names if self.has(name)), names[0])

    @property
    def what(self) -> str:
        """The judged similarity in words, and the part, if there are several."""
        name = self.span[0]
        where = name if " " in name else f"the {name}" if name in ("encoder", "decoder") else f"the {name} tower"
        return _NAMES[self.judged] + (f" in {where}" if name else "")

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
        found = log_odds(self.profile, self.judged).copy()
        if self.first > 0:
            found[self.first] = self._entering(found, partial(log_odds, self.profile), self.judged)
        inside = np.arange(len(found))
        return np.where((inside >= self.first) & (inside <= self.last), found, NAN)

    @cached_property
    def rise(self) -> tuple[int, int, float]:
        """The shortest way over which similarity gains half of its rise or more, as the blocks it leads from and to,
        and the share of the rise; of several as short, the steepest."""
        curve = np.nan_to_num(self.similarity[self.first : self.last + 1])
        gains = (curve[None, :] - curve[:, None]) / (curve[-1] - curve[0])  # (from, to)
        for length in range(1, len(curve)):
            gained = np.diagonal(gains, length)
            if gained.max() >= 0.5:
                break
        start = int(gained.argmax())
        return self.first + start, self.first + start + length, float(gained[start])

    @cached_property
    def trend(self) -> Trend | None:
        """The law of post-norm or of pre-norm, fitted; None where neither holds, or with too few blocks."""
        if not self.law_known:
            return None
        return fit_trend(self.log_odds[self.first : self.last + 1], pre_norm=self.pre_norm)

    @property
    def law_known(self) -> bool:
        """Whether the odds follow a law that is known: it depends on where the norms stand."""
        return self.about.get("placement") in ("post", "pre")

    @property
    def horizon(self) -> int:
        """The last block of which a trend of these blocks says anything."""
        return self.first + 10 * (self.last - self.first)

    @cached_property
    def reach(self) -> tuple[int | None, int | None, int | None]:
        """The block at which the trend passes 0.99: best, earliest, latest; counted in the part."""
        odds = self.log_odds[self.last]
        if self.trend is None or not np.isfinite(odds):
            return None, None, None
        found = self.trend.block_of(EQUAL, math.exp(odds), self.last - self.first)
        best, low, high = (None if block is None else block + self.first for block in found)
        return best, low, high

    @cached_property
    def step_growth(self) -> dict[str, float]:
        """Growth of the log-odds by kind of step, up to where similarity passes 0.99; empty if not measured."""
        end = self.passes(EQUAL)
        until = self.last if end is None else max(end, self.first + 1)
        return step_growth(self.profile, self.judged, (self.span[0], self.first, until)) or {}

    @cached_property
    def attention(self) -> Attention | None:
        return attention_step(self.profile, self.about.get("placement"), self.curve("token_similarity"), self.span[1:])

    def read(self, station: str) -> np.ndarray:
        """t_sim of what is read at a station of each block, blocks 0..L; all nan if it was not measured."""
        measured = "token_similarity" in self.profile.names(station)
        return np.asarray(self.profile.curve("token_similarity", station) if measured else [NAN] * len(self.similarity))

    def energy(self, part: str) -> float:
        """The share of the unit tokens' energy at the end: by the profile, else by the use of depth; nan without."""
        found = self.end(f"energy_{part}")
        of_use = self.use.metadata if self.use is not None else {}
        other = len(self.profile.parts) > 1 and of_use.get("part") != self.span[0]
        if not math.isnan(found) or other or not of_use.get("energy"):
            return found
        return float(of_use["energy"][part])

    # --- the rest ---------------------------------------------------------------------------------------

    def rogue_feature(self, least: float) -> RogueFeature | None:
        """The feature that carries at least this share of the energy, outlier tokens left out."""
        return find_rogue_feature(self.profile, self.first, self.last, least)

    @property
    def rank(self) -> str:
        """The measure of the directions left: without outliers where that was measured."""
        return "ordinary_rank" if self.has("ordinary_rank") else "effective_rank"

    @property
    def rank_is_spoilt(self) -> bool:
        """Whether an outlier token makes the rank at one of the ends: it was not measured without."""
        ends = (self.first, self.last)
        return self.rank == "effective_rank" and self.sink is not None and any(map(self.sink.is_there, ends))

    @cached_property
    def sink_attention(self) -> float:
        """The share of attention that outlier tokens draw, mean over the blocks that read one; nan if not measured."""
        if self.sink is None or "sink_attention" not in self.profile.names("attention"):
            return NAN
        drawn = np.asarray(self.profile.curve("sink_attention", "attention"))
        reading = [drawn[block] for block in range(1, len(drawn)) if self.sink.is_there(block - 1)]
        return float(np.nanmean(reading)) if np.isfinite(reading).any() else NAN

    @cached_property
    def mean_gap(self) -> float:
        """1 − |λ₂| of attention, mean over heads, samples and blocks; nan if not measured."""
        if "second_eigenvalue" not in self.profile.names("attention"):
            return NAN
        own = self.profile.curve("second_eigenvalue", "attention")[self.first + 1 : self.last + 1]
        return float(1 - np.nanmean(own)) if np.isfinite(own).any() else NAN

    @cached_property
    def learning(self) -> dict[int, float]:
        """By block, the gradient of queries and keys over that of values and output; empty if not taken."""
        ratios = learning_ratios(*(self.curve(MEASURES[role]).tolist() for role in ("queries_keys", "values_output")))
        own = range(self.first + 1, self.last + 1)
        return {block: float(ratios[block]) for block in own if not math.isnan(ratios[block])}

    def quiet_blocks(self, angle: float) -> list[int]:
        """Blocks that turn their tokens by less than this share of a half turn."""
        turns = self.curve("angular_distance")
        return [block for block in range(self.first + 1, self.last + 1) if turns[block] < angle]

    def spare_blocks(self, share: float) -> list[tuple[int, float]]:
        """Single blocks whose skipping changes the loss by less than this share of it, with the change."""
        if self.skip_loss is None:
            return []
        table = self.skip_loss
        single = table[(table["first_block"] == table["last_block"]) & (table["first_block"] > 0)]
        least = share * abs(float(table.iloc[0]["loss"]))
        return [
            (int(row["first_block"]), float(row["change"])) for _, row in single.iterrows() if row["change"] < least
        ]

    @cached_property
    def reference(self) -> Reference | None:
        return reference_for(self.profile)

    @cached_property
    def reference_point(self) -> tuple[int, float, float]:
        """The last block that has a band, and the band of the raw similarity there."""
        assert self.reference is not None
        low, high = (getattr(self.reference, side)["token_similarity"] for side in ("low", "high"))
        block = min(self.last, len(low) - 1)
        return block, low[block], high[block]
