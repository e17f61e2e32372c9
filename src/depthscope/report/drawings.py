"""What a chart is: a function from the material of a page to a `Drawing`, or to None where there is nothing to draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import pandas as pd

from depthscope.report.subjects import Subject
from depthscope.report.tables import NUMBER_COLUMNS, RANGE_COLUMNS, Where, numbers_of, ranges_of

Section = Literal["What happens", "Why", "Tokens and weights", "Training"]
SECTIONS: tuple[Section, ...] = ("What happens", "Why", "Tokens and weights", "Training")


@dataclass(frozen=True)
class Material:
    """The subjects of a page, and the table of all their numbers."""

    subjects: Sequence[Subject]

    @cached_property
    def numbers(self) -> pd.DataFrame:
        """run, block, station, head (−1: none), measure, value: means over samples of all profiles."""
        found = [numbers_of(item.label, item.profile) for item in self.measured if item.profile is not None]
        return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=NUMBER_COLUMNS)

    @cached_property
    def ranges(self) -> pd.DataFrame:
        """run, block, measure, low, high: over the samples, of shares at the blocks' outputs."""
        found = [ranges_of(item.label, item.profile) for item in self.measured if item.profile is not None]
        return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=RANGE_COLUMNS)

    @property
    def measured(self) -> list[Subject]:
        """Those that have a profile."""
        return [subject for subject in self.subjects if subject.profile is not None]

    @property
    def runs(self) -> list[str]:
        """The labels of those that have a profile; the first is the baseline."""
        return [subject.label for subject in self.measured]

    @property
    def labels(self) -> list[str]:
        """The labels of all that have something by block."""
        return [subject.label for subject in self.subjects if any(item is not None for item in subject.of_model)]

    @property
    def depth(self) -> int:
        """Blocks of the deepest."""
        return max((subject.depth for subject in self.subjects), default=0)

    @cached_property
    def _there(self) -> set[tuple[str, str]]:
        pairs = self.numbers[["station", "measure"]].drop_duplicates()
        return set(zip(pairs["station"], pairs["measure"], strict=True))

    def has(self, measure: str, station: str = "output") -> bool:
        """Whether some profile has this measure at this station."""
        return (station, measure) in self._there


@dataclass(frozen=True)
class Drawing:
    """A chart with its words.

    `spec` is a chart of Altair whose data are named tables (`alt.NamedData("numbers")`). `uses` says which rows of
    which table it shows; `tables` are those that it brings besides the page's own. `rules` are the rules of the
    diagnosis whose sentences lead here. `block` is the scale that has blocks on it, so that the pointer finds one.
    """

    title: str
    caption: str
    spec: Any
    uses: Mapping[str, Where]
    section: Section = "What happens"
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    rules: tuple[str, ...] = ()
    block: Literal["x", "y"] | None = "x"


Chart = Callable[[Material], Drawing | None]
