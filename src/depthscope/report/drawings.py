"""What a chart is: a function from the material of a page to a `Drawing`, or to None where there is nothing to draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import pandas as pd

from depthscope.report.subjects import Subject
from depthscope.report.tables import NUMBER_COLUMNS, Where, numbers_of

Section = Literal["What happens", "Why", "Tokens and weights", "Training"]
SECTIONS: tuple[Section, ...] = ("What happens", "Why", "Tokens and weights", "Training")


@dataclass(frozen=True)
class Material:
    """The subjects of a page, and the table of all their numbers."""

    subjects: Sequence[Subject]

    @cached_property
    def numbers(self) -> pd.DataFrame:
        """run, block, station, head (−1: none), measure, value: means over samples of all profiles."""
        found = self.table(lambda item: None if item.profile is None else numbers_of(item.profile))
        return pd.DataFrame(columns=NUMBER_COLUMNS) if found is None else found[NUMBER_COLUMNS]

    def table(self, of: Callable[[Subject], pd.DataFrame | None]) -> pd.DataFrame | None:
        """What `of` gives of each subject, in one table with its label in the column `run`; None if that is nothing."""
        found = [(item.label, of(item)) for item in self.subjects]
        rows = [frame.assign(run=label) for label, frame in found if frame is not None and len(frame)]
        return pd.concat(rows, ignore_index=True) if rows else None

    @property
    def measured(self) -> list[Subject]:
        """Those that have a profile."""
        return [subject for subject in self.subjects if subject.profile is not None]

    @property
    def labels(self) -> list[str]:
        """The labels of all that have something by block."""
        return list(self.depths)

    @cached_property
    def depths(self) -> dict[str, int]:
        """Blocks by label, of all that have something by block."""
        return {item.label: item.depth for item in self.subjects if any(part is not None for part in item.of_model)}

    @staticmethod
    def first(table: pd.DataFrame) -> str:
        """The run that a heat map shows to begin with."""
        return str(table["run"].iloc[0])

    @property
    def depth(self) -> int:
        """Blocks of the deepest."""
        return max((subject.depth for subject in self.subjects), default=0)

    def has(self, measure: str, station: str = "output") -> bool:
        """Whether some profile has this measure at this station."""
        return (station, measure) in self._there

    @cached_property
    def _there(self) -> set[tuple[str, str]]:
        pairs = self.numbers[["station", "measure"]].drop_duplicates()
        return set(zip(pairs["station"], pairs["measure"], strict=True))


@dataclass(frozen=True)
class Drawing:
    """A chart with its words.

    `spec` is a chart of Altair whose data are named tables (`alt.NamedData("numbers")`). `uses` says which rows of
    which table it shows; `tables` are those that it brings besides the page's own. `rules` are the findings, verdicts
    and kinds of summaries whose sentences lead here. `block` is the scale that has blocks on it, so that the pointer
    finds one.
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
