"""Outlier tokens, read from a profile: one far larger than the rest hides what the others do."""

from __future__ import annotations

from dataclasses import dataclass

from depthscope.probing import Profile


@dataclass(frozen=True)
class Sink:
    """An outlier token that most sequences have, for a quarter of the blocks or more."""

    token: int  # among the real tokens
    texts: tuple[str, ...]  # its texts in these sequences, each once; none if they are not known
    samples: int  # sequences that have it
    blocks: tuple[int, ...]  # after which it is an outlier in more than half of them; 0: it enters as one
    largest: int  # the block after which it is largest
    peak: float  # its norm there, over the median norm


def find_sink(profile: Profile, samples: int, first: int, last: int) -> Sink | None:
    """Of the blocks after `first` up to `last`; None if half of the sequences or more have no such token.

    One that only enters, and that the first norm removes, is no sink.
    """
    own = first + (first > 0)  # before it stands the last block of another part
    rows = profile.sinks[profile.sinks["block"].between(own, last)]
    blocks = rows[rows["block"] > first].groupby(["sample", "token"])["block"].nunique()
    lasting = blocks[blocks >= max(1, (last - first) // 4)].reset_index()
    if 2 * lasting["sample"].nunique() <= samples:
        return None
    counts = lasting.groupby("token")["sample"].nunique().sort_values(ascending=False, kind="stable")
    token, shared_by = int(counts.index[0]), int(counts.iloc[0])
    its = rows.merge(lasting[lasting["token"] == token], on=["sample", "token"], suffixes=("", "_lasting"))
    held = its.groupby("block")["sample"].nunique()
    peaks = its[its["block"].isin(held.index[2 * held > shared_by])].groupby("block")["norm_ratio"].max()
    texts = tuple(text for text in dict.fromkeys(its.sort_values("sample")["text"]) if text)
    return Sink(token, texts, shared_by, tuple(peaks.index), int(str(peaks.idxmax())), float(peaks.max()))
