"""The words in which a study is said: a claim, rows and curves of its frame, how much is done, lines and axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import pandas as pd

from depthscope.drawing import band, block_axis, label, line_with_band
from depthscope.progress import Share, Steps
from depthscope.report.formats import Claim as Claim
from depthscope.report.formats import Verdict


def judge(
    claim: str,
    paper: str,
    ours: str,
    tolerance: str,
    holds: Any,
    note: str = "",
    *,
    when: bool = True,
    lacks: str = "",
    kind: Literal["finding", "check"] = "finding",
) -> Claim:
    """A claim with its verdict.

    Args:
        claim: A statement that can be read alone and can fail.
        paper: What the paper says, and where.
        ours: What came out, with its number.
        tolerance: What would still count as the same, and why.
        holds: Whether it does; None: not testable here.
        note: What else a reader should know.
        when: Without this it is not testable here.
        lacks: What is missing to test it, if anything is; stands in place of the note.
        kind: "check" where the statement is true by construction, and what is tested is our code.
    """
    verdict: Verdict = "reproduced" if holds else "not reproduced"
    if holds is None or lacks or not when:
        verdict = "not testable here"
    return Claim(claim, paper, ours, tolerance, verdict, lacks or note, kind)


def rows(frame: pd.DataFrame, **where: Any) -> pd.DataFrame:
    """Those whose columns have these values: `rows(frame, variant="post", seed=0)`."""
    for column, value in where.items():
        frame = frame[frame[column] == value]
    return frame


def curve(frame: pd.DataFrame, value: str = "value", by: str = "block", **where: Any) -> pd.Series:
    """The mean of one column by another, over all else that these rows are of: trials, seeds, samples."""
    return rows(frame, **where).groupby(by)[value].mean()


class Work(Steps):
    """How much of a study is done: pieces of any size, out of a total."""

    def __init__(self, total: float, show: Share):
        super().__init__(lambda done: show(min(1.0, done / total)))
        self.done = 0.0

    def __call__(self, size: float = 1) -> None:
        """Another piece of this size is done."""
        self.part(size)(1.0)

    def inside(self, share: float) -> None:
        self._show(self.done + share)

    def part(self, size: float = 1) -> Share:
        """For the next piece: is called with how much of it is done, at the end with 1.0."""
        start = self.done

        def progress(share: float) -> None:
            self.done = start + size * share
            self._show(self.done)

        return progress


def line(ax: Any, curve: pd.Series, colour: str, name: str | None = None, spread: Any = None, **style: Any) -> None:
    """A curve over its index, and the band of its spread."""
    line_with_band(ax, curve.index, curve, spread, colour=colour, name=name, **style)


def range_line(ax: Any, values: Any, colour: str, name: str | None = None, **style: Any) -> None:
    """The mean of grouped values, and the range from the least to the greatest; nothing without values."""
    mean = values.mean()
    if len(mean):
        line(ax, mean, colour, name, **style)
        band(ax, mean.index, values.min(), values.max(), colour=colour)


def axis(
    ax: Any, title: str, x: str, y: str, *, log: bool = False, first: int = 1, last: int | None = None, **limits: Any
) -> None:
    """Names an axis; `first` and `last` are blocks, `xlim` and `ylim` other limits."""
    if log:
        ax.set_yscale("log")
    ax.set(**limits)
    if last is not None:
        block_axis(ax, last, first)
    label(ax, title, x, y)


def spell(form: str, values: Any, between: str = ", ") -> str:
    """Numbers by name in words: `spell("{} {:.2f}", {"a": 0.5})`; a list of rows has a place for every cell."""
    return between.join(form.format(*pair) for pair in (values.items() if hasattr(values, "items") else values))


def table(found: Mapping[str, Any], **places: Iterable[Any]) -> pd.DataFrame:
    """A column for each tensor, and one for each of their axes: `table({"t_div": x}, trial=range(8), alpha=alphas)`."""
    index = pd.MultiIndex.from_product([*places.values()], names=[*places])
    columns = {name: values.flatten().numpy() for name, values in found.items()}
    return pd.DataFrame(columns, index=index).reset_index()
