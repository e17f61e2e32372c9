"""What is far larger than the rest: outlier tokens by runs of blocks, and features that carry most of the energy.

Both are read from a profile; which of them matter is decided in `rules.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from depthscope.naming import runs_of
from depthscope.probing import Profile


@dataclass(frozen=True)
class Run:
    """Blocks after which a token is an outlier, without a gap."""

    first: int  # 0: it enters as one
    last: int
    peak: float  # its largest norm over the median norm there


@dataclass(frozen=True)
class Sink:
    """The outlier token that most sequences have, if most sequences have one."""

    token: int  # among the real tokens
    texts: tuple[str, ...]  # its texts in these sequences, each once; none if they are not known
    samples: int  # sequences that have it
    runs: tuple[Run, ...]
    others: int  # further outlier positions

    @property
    def largest(self) -> Run:
        """The run with its largest norm."""
        return max(self.runs, key=lambda run: run.peak)

    def is_there(self, block: int) -> bool:
        return any(run.first <= block <= run.last for run in self.runs)


@dataclass(frozen=True)
class Outliers:
    """The outlier tokens of a part that last for a quarter of its blocks."""

    carriers: int  # sequences that have one
    peak: float  # the largest norm over the median norm
    sink: Sink | None  # None if half of the sequences or more have none


def find_outliers(profile: Profile, samples: int, first: int, last: int) -> Outliers | None:
    """Of the blocks after `first` up to `last`; None if there are none.

    One that only enters, and that the first norm removes, is no sink. A run has the blocks at which the token is an
    outlier in more than half of the sequences that have it.
    """
    own = first + (first > 0)  # before it stands the last block of another part
    rows = profile.sinks[profile.sinks["block"].between(own, last)]
    blocks = rows[rows["block"] > first].groupby(["sample", "token"])["block"].nunique()
    lasting = blocks[blocks >= max(1, (last - first) // 4)].reset_index()
    if lasting.empty:
        return None
    rows = rows.merge(lasting[["sample", "token"]], on=["sample", "token"])
    carriers, peak = int(lasting["sample"].nunique()), float(rows["norm_ratio"].max())
    if 2 * carriers <= samples:
        return Outliers(carriers, peak, None)
    counts = lasting.groupby("token")["sample"].nunique().sort_values(ascending=False, kind="stable")
    token, shared_by = int(counts.index[0]), int(counts.iloc[0])
    its = rows[rows["token"] == token]
    texts = tuple(text for text in dict.fromkeys(its.sort_values("sample")["text"]) if text)
    return Outliers(carriers, peak, Sink(token, texts, shared_by, _runs(its, shared_by), len(counts) - 1))


def _runs(rows: pd.DataFrame, samples: int) -> tuple[Run, ...]:
    held = rows.groupby("block")["sample"].nunique()
    usual = rows[rows["block"].isin(held.index[2 * held > samples])]
    peaks = usual.groupby("block")["norm_ratio"].max()
    return tuple(Run(first, last, float(peaks.loc[first:last].max())) for first, last in runs_of(peaks.index.tolist()))


@dataclass(frozen=True)
class RogueFeature:
    """The feature that has the largest share of the energy after a block."""

    block: int
    feature: int
    samples: int  # sequences in which it is this one
    share: float  # mean over the sequences


def find_rogue_feature(profile: Profile, first: int, last: int, least: float) -> RogueFeature | None:
    """At the last block if it carries at least this share there, else where its share is largest.

    None if nowhere, or if it is not the same feature in most sequences.
    """
    if not {"largest_feature", "largest_feature_share"} <= set(profile.names()):
        return None
    first += first > 0  # before it stands the last block of another part
    shares = np.nan_to_num(np.asarray(profile.curve("largest_feature_share"))[first : last + 1])
    block = last if shares[-1] >= least else first + int(shares.argmax())
    if shares[block - first] < least:
        return None
    frame = profile.frame
    there = (frame["station"] == "output") & (frame["block"] == block)
    features = frame[there & (frame["measure"] == "largest_feature")]["value"].value_counts()
    if 2 * features.iloc[0] <= features.sum():
        return None
    return RogueFeature(block, int(features.index[0]), int(features.iloc[0]), float(shares[block - first]))
