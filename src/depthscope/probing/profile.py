"""What a probe returns: tidy rows, metadata, and ways to look at them."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from depthscope.drawing import PALETTE, Curve, ReferenceBand, draw_by_block
from depthscope.measures import MEASURES
from depthscope.naming import unknown_name, visible
from depthscope.probing.readings import Reading, Sink
from depthscope.probing.saved import COLUMNS, SINK_COLUMNS, read_saved, write_saved

HEADLINE = ("token_similarity", "cosine_similarity", "direction_similarity", "effective_rank")
_PRINTED = (
    *("token_similarity", "token_diversity", "cosine_similarity", "direction_similarity", "effective_rank"),
    *("largest_token_share", "frobenius_norm", "escalation_rate"),
    *("output_gradient", "queries_keys_gradient", "values_output_gradient"),
)


@dataclass(frozen=True)
class Reference:
    """What is normal for models of a kind: the range of each measure at blocks 0, 1, …, at their outputs."""

    label: str
    low: Mapping[str, Sequence[float]]
    high: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Profile:
    """`frame` has one row per number: block (0 is what enters block 1), station, head (-1: none), measure,
    sample (-1: the whole batch), value. `metadata` says what was measured and what was not seen. `sinks` has
    one row per block and outlier token: its position among the real tokens, and its text where that is known."""

    frame: pd.DataFrame
    metadata: dict[str, Any] = field(default_factory=dict)
    sinks: pd.DataFrame = field(default_factory=lambda: sinks_of([]))

    @classmethod
    def of_readings(cls, readings: list[Reading], metadata: dict[str, Any], sinks: list[Sink]) -> Profile:
        """What a probe has measured. The two tables are made when they are first read: on a small model, to make them
        takes longer than to measure a block."""
        profile = cls.__new__(cls)
        later = {"frame": partial(frame_of, readings), "sinks": partial(sinks_of, sinks)}
        profile.__dict__.update(metadata=metadata, _later=later)
        return profile

    def __getattr__(self, name: str) -> Any:
        """Only for what is not there: a table that nobody has read yet."""
        later = self.__dict__.get("_later", {})
        make = later.get(name)
        if make is not None:
            self.__dict__.setdefault(name, make())
            left = {other: make for other, make in later.items() if other not in self.__dict__}
            self.__dict__["_later"] = left  # a dictionary of its own: a copy shares the one before
        if name not in self.__dict__:  # another thread may have made it meanwhile
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.__dict__[name]

    def __str__(self) -> str:
        """The headline, the key measures at the first, middle and last block, and how many notes there are; at most 80
        letters wide. Of attention, if nothing was measured at the outputs."""
        known = self.metadata
        facts = [
            f"{self.depth} blocks" + (f" of width {known['width']}" if known.get("width") else ""),
            "" if known.get("placement") in (None, "streams") else f"{known['placement']}-norm",
            f"{known['streams']['number']} streams" if known.get("streams") else "",
            "causal" if known.get("causal") else "",
            f"{known['samples']} x {known['tokens']} tokens" if known.get("samples") else "",
            f"{known['dtype']} on {known.get('device')}" if known.get("dtype") else "",
            f"without {' and '.join(known['without'])}" if known.get("without") else "",
        ]
        lines = [textwrap.fill(f"{known.get('model') or 'model'}: {', '.join(filter(None, facts))}", 80)]
        station = "output" if self.names() else "attention"
        there, blocks = self.names(station), sorted({0, self.depth // 2, self.depth})
        if names := [name for name in _PRINTED if name in there] or there[: len(_PRINTED)]:
            lines.append(f"{'measure':<32}" + "".join(f"{f'block {block}':>12}" for block in blocks))
        for name in names:
            curve = self.curve(name, station)
            lines.append(f"{name:<32}" + "".join(f"{_number(name, curve[block]):>12}" for block in blocks))
        if notes := known.get("notes"):
            lines.append(f'{len(notes)} note{"s" if len(notes) > 1 else ""}: profile.metadata["notes"]')
        return visible("\n".join(lines))

    def __repr__(self) -> str:
        measures = self.frame["measure"].nunique()
        model = visible(str(self.metadata.get("model") or "a model"))
        return f"<Profile of {model}: {self.depth} blocks, {measures} measures>"

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return int(self.metadata.get("blocks", self.frame["block"].max()))

    def names(self, station: str = "output") -> list[str]:
        """The measures taken at a station, in the order of the catalogue."""
        taken = dict.fromkeys(self.frame.loc[self.frame["station"] == station, "measure"])
        known = list(MEASURES)
        return [name for name in known if name in taken] + [name for name in taken if name not in known]

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """The parts of the model (encoder, decoder, vision, text, …), each with its first and its last block.

        A model that is one trunk has one part without a name.
        """
        counts: dict[str, int] = self.metadata.get("parts") or {"": self.depth}
        ends = np.cumsum(list(counts.values())).tolist()
        return {name: (end - counts[name] + 1, end) for name, end in zip(counts, ends, strict=True)}

    def curve(self, measure: str, station: str = "output", part: str | None = None) -> list[float]:
        """A measure over blocks 0..L, mean over samples and heads; nan where it has no value.

        With `part`, what enters it and then its blocks.
        """
        if part is not None and part not in self.parts:
            raise unknown_name("part", part, self.parts)
        rows = self.frame[(self.frame["measure"] == measure) & (self.frame["station"] == station)]
        if rows.empty:
            raise ValueError(
                f"no {measure!r} at station {station!r}; there: {', '.join(self.names(station)) or 'nothing'}"
            )
        whole: list[float] = rows.groupby("block")["value"].mean().reindex(range(self.depth + 1)).tolist()
        if part is None:
            return whole
        first, last = self.parts[part]
        entrance = whole[0]
        if first > 1:  # block 0 is what enters the first part; of the others it stands at their first block's input
            there = station == "output" and measure in self.names("input")
            entrance = self.curve(measure, "input")[first] if there else math.nan
        return [entrance, *whole[first : last + 1]]

    def summary(self, station: str = "output") -> pd.DataFrame:
        """Blocks × measures at a station, mean over samples; block 0 is what enters.

        Of a model of several parts, (part, block) × measures, and block 0 is what enters the part.
        """
        names = self.names(station)
        tables = {
            part: pd.DataFrame(
                {name: self.curve(name, station, part) for name in names},
                index=pd.Index([0, *range(first, last + 1)], name="block"),
            ).rename_axis(columns="measure")
            for part, (first, last) in self.parts.items()
        }
        return pd.concat(tables, names=["part"]) if len(tables) > 1 else next(iter(tables.values()))

    def sink_tokens(self) -> pd.DataFrame:
        """One row per outlier token: the block where it appears, its last block, and its largest norm."""
        by_token = self.sinks.groupby(["sample", "token"])
        peak = self.sinks.loc[by_token["norm_ratio"].idxmax()] if len(self.sinks) else self.sinks
        return pd.DataFrame(
            {
                "sample": peak["sample"],
                "token": peak["token"],
                "text": peak["text"],
                "first_block": by_token["block"].min().to_numpy(),
                "last_block": by_token["block"].max().to_numpy(),
                "peak_block": peak["block"],
                "peak_norm_ratio": peak["norm_ratio"],
            }
        ).reset_index(drop=True)

    def against(self, other: Profile, station: str = "output") -> pd.DataFrame:
        """This profile beside another: block, measure, this, other, difference; blocks both have."""
        tables = [profile.summary(station).stack(future_stack=True) for profile in (self, other)]
        joined = pd.concat(tables, axis=1, keys=["this", "other"], join="inner")
        joined["difference"] = joined["this"] - joined["other"]
        return joined.reset_index()

    def plot(
        self, measures: list[str] | None = None, station: str = "output", reference: Reference | None = None
    ) -> Any:
        """A matplotlib figure: one panel per measure, the mean over samples with their range.

        `reference` (see `depthscope.diagnosis.reference_for`) is drawn behind it as a grey band.
        """
        chosen = measures or [name for name in HEADLINE if name in self.names(station)] or self.names(station)[:4]
        if not chosen and station != "attention":
            return self.plot(station="attention")  # only attention was measured
        if not chosen:
            raise ValueError("there is nothing to draw: no measure was taken at the blocks' outputs or attention")
        curves, references = {}, {}
        for measure in chosen:
            curves[measure] = self._curves_to_draw(measure, station)
            if reference is not None and station == "output" and measure in reference.low:
                normal = reference.low[measure], reference.high[measure]
                references[measure] = ReferenceBand(range(len(normal[0])), *normal, name=reference.label)
        left_out = ", ".join(self.metadata.get("without", ()))
        title = f"{self.metadata.get('model', '')}, {self.depth} blocks" + (f", without {left_out}" if left_out else "")
        return draw_by_block(curves, references=references, title=title)

    def _curves_to_draw(self, measure: str, station: str) -> list[Curve]:
        """The mean over samples with their range: one curve per part."""
        frame = self.frame[self.frame["measure"] == measure]
        here = frame[frame["station"] == station]
        drawn = []
        for (part, (first, last)), colour in zip(self.parts.items(), cycle(PALETTE)):
            rows = here[here["block"].between(first if first > 1 else 0, last)]
            if first > 1 and station == "output":
                entered = frame[(frame["station"] == "input") & (frame["block"] == first)]
                rows = pd.concat([entered.assign(block=first - 1), rows])
            by_block = rows.groupby("block")["value"].agg(["mean", "min", "max"])
            mean, low, high = (by_block[name].tolist() for name in ("mean", "min", "max"))
            drawn.append(Curve(by_block.index.tolist(), mean, colour, part or None, low=low, high=high))
        return drawn

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes profile.parquet, sinks.parquet and profile.json, all or none of them.

        What was made of a profile that is replaced (`profile.png`, `skip_loss.csv`, its verdict and its page) goes
        with it.
        """
        return write_saved(Path(folder), self.frame, self.sinks, self.metadata)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Profile:
        """Reads what `save` wrote; refuses what is damaged."""
        return cls(*read_saved(folder))


def most_alike(profile: Profile) -> str:
    """The part whose tokens end up most alike: the one to be judged, and to be helped."""
    measured = profile.names()
    name = next((n for n in ("direction_similarity", "token_similarity") if n in measured), None)
    ends = {part: profile.curve(name, part=part)[-1] if name else math.nan for part in profile.parts}
    return max(ends, key=lambda part: -1.0 if math.isnan(ends[part]) else ends[part])


def _number(measure: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    share = measure in MEASURES and MEASURES[measure].is_share and measure != "token_diversity"
    plain = share or value == 0 or 1e-3 <= abs(value) < 1e3
    return f"{value:.3f}" if plain else f"{value:.2e}"


def frame_of(rows: list[Reading]) -> pd.DataFrame:
    """The readings as one tidy table, sorted as they were seen."""
    lengths = np.array([len(row.values) for row in rows], dtype=np.int64)
    first = np.repeat(np.array([row.first_sample for row in rows], dtype=np.int64), lengths)
    within = np.arange(len(first)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    frame = pd.DataFrame(
        {
            "block": np.repeat(np.array([row.block for row in rows], dtype=np.int32), lengths),
            "station": _repeated_words([row.station for row in rows], lengths),
            "head": np.repeat(np.array([row.head for row in rows], dtype=np.int32), lengths),
            "measure": _repeated_words([row.measure for row in rows], lengths),
            "sample": np.where(first >= 0, first + within, -1).astype(np.int32),
            "value": np.array([value for row in rows for value in row.values], dtype=np.float64),
        },
        copy=False,
    )
    assert list(frame) == COLUMNS
    return frame


def _repeated_words(words: list[str], lengths: np.ndarray) -> Any:
    """Each word as often as its length says: pandas is given every different word once, and where it stands."""
    different = {word: place for place, word in enumerate(dict.fromkeys(words))}
    codes = np.repeat(np.array([different[word] for word in words], dtype=np.int64), lengths)
    return pd.Series(np.array(list(different), dtype=object)).array.take(codes)


def sinks_of(rows: list[Sink]) -> pd.DataFrame:
    """Outlier tokens as a table. Half of a pair of surrogates, which is no text for a table, is spelled."""
    rows = [row._replace(text=row.text.encode("utf-8", "backslashreplace").decode()) for row in rows]
    columns = zip(*rows, strict=True) if rows else ((),) * len(SINK_COLUMNS)
    types = (np.int32, np.int32, np.int32, np.float64, object)
    arrays = [np.array(column, dtype=kind) for column, kind in zip(columns, types, strict=True)]
    return pd.DataFrame(dict(zip(SINK_COLUMNS, arrays, strict=True)))


# pandas sets up its tables of strings, for some 10 ms, when it first makes one: here, not when a profile is first read.
frame_of([Reading(0, "output", -1, HEADLINE[0], 0, [0.0])])
