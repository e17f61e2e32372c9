"""What `depth_use` returns: a row per block, the matrix of skipped blocks, and ways to look at them."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from depthscope.drawing import draw_depth_use
from depthscope.naming import visible
from depthscope.sealed import read_tables, write_tables
from depthscope.usage.verdict import Finding, counts_of, findings_of, learnt

_TABLE, _MATRIX, _ABOUT = "depth.parquet", "depth_skips.parquet", "depth.json"
_FORMAT = 1
# Heading and digits of a column where people read.
SHOWN: Mapping[str, tuple[str, str]] = {
    "attention_ratio": ("attention\nsize", ".2f"),
    "attention_cosine": ("attention\ncosine", "+.2f"),
    "cross_attention_ratio": ("cross\nsize", ".2f"),
    "cross_attention_cosine": ("cross\ncosine", "+.2f"),
    "ffn_ratio": ("FFN\nsize", ".2f"),
    "ffn_cosine": ("FFN\ncosine", "+.2f"),
    "sink_rate": ("sink\nrate", ".2f"),
    "largest_logit": ("largest\nlogit", ".1f"),
    "lens_kl": ("lens\nKL", ".2f"),
    "lens_top1": ("lens\ntop 1", ".2f"),
    "lens_top5": ("lens\ntop 5", ".2f"),
    "skip_later": ("skip:\nlater", ".2f"),
    "skip_output": ("skip:\noutput", ".2f"),
    "skip_loss": ("skip:\nloss", "+.3f"),
}


@dataclass(frozen=True)
class DepthUse:
    """How much of its depth a model uses.

    `frame` has one row per block. What was not measured, or does not apply, is nan, and `metadata["notes"]` says why.

    | columns                                | what they are                                                         |
    | -------------------------------------- | --------------------------------------------------------------------- |
    | attention_ratio, ffn_ratio             | median over tokens of ‖branch‖ / ‖trunk‖; cross_attention_ratio in     |
    |                                        | decoders that read an encoder                                         |
    | attention_cosine, ffn_cosine           | median of cos(branch, trunk): below 0 it erases, above it strengthens |
    | sink_rate                              | share of heads that give over .3 of their attention to the first token|
    | largest_logit                          | the largest number that a softmax of attention reads                  |
    | lens_kl, lens_top1, lens_top5          | what would be predicted after this block against what is predicted:   |
    |                                        | KL in nats, same first choice, share of the five likeliest            |
    | skip_later, skip_output, skip_loss     | without the block: how far what later blocks add changes (mean over   |
    |                                        | them), how far the output moves, by how much the loss rises           |

    `matrix` has the effect of skipping a block (rows) on what each later block adds (columns); empty if not asked for.
    """

    frame: pd.DataFrame
    matrix: pd.DataFrame = field(default_factory=pd.DataFrame)
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.frame)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The verdict: sentences, each with the numbers it rests on."""
        return findings_of(self.frame, self.metadata)

    @property
    def learnt(self) -> bool:
        """Whether the loss says something: that of random weights is chance."""
        return learnt(self.metadata)

    @property
    def headline(self) -> str:
        """The most important of the sentences."""
        found = self.findings
        if found:
            return found[0].sentence
        if self.depth == 1:
            return "1 block is no depth: there is no other to compare it with."
        asked = self.metadata.get("asked") or {}
        if asked.get("skips") is False and asked.get("lens") is False:
            return "One pass alone was asked for: it measures how much each block writes, not which blocks matter."
        return "Nothing could be measured that says how depth is used."

    def summary(self) -> pd.DataFrame:
        """Blocks that matter, by what was looked at: one number each (`blocks`, `of`), and what it rests on."""
        return counts_of(self.frame, self.metadata)

    def __repr__(self) -> str:
        return visible(f"<DepthUse of {self.metadata.get('model') or 'a model'}: {self.depth} blocks>")

    def __str__(self) -> str:
        """The table by block, then the verdict."""
        columns = [name for name in SHOWN if name in self.frame and self.frame[name].notna().any()]
        table = pd.DataFrame({"block": self.frame["block"]})
        for name in columns:
            table[SHOWN[name][0].replace("\n", " ")] = [format_number(name, value) for value in self.frame[name]]
        head = f"{self.metadata.get('model') or 'model'}: {self.depth} blocks"
        lines = [head, table.to_string(index=False, line_width=110)]
        for sentence in [finding.sentence for finding in self.findings] or [self.headline]:
            lines += textwrap.wrap(sentence, 88, initial_indent="- ", subsequent_indent="  ")
        return visible("\n".join(lines))

    def plot(self) -> Any:
        """A matplotlib figure: blocks × quantities as colour with the numbers, and the matrix of skipped blocks."""
        names = {name: heading.replace("\n", " ") for name, (heading, _) in SHOWN.items()}
        title = f"{self.metadata.get('model', '')}, {self.depth} blocks"
        return draw_depth_use(self.frame, self.matrix, names, title=title)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; what is not defined is nan there, which a writer turns into null."""
        found = {
            "model": self.metadata.get("model", ""),
            "blocks": self.depth,
            "table": self.frame.to_dict("records"),
            "summary": self.summary().reset_index().to_dict("records"),
            "findings": [finding.to_dict() for finding in self.findings],
            "metadata": self.metadata,
        }
        return found if self.matrix.empty else found | {"skips": self.matrix.to_numpy().tolist()}

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes depth.parquet, depth_skips.parquet and depth.json, all or none of them."""
        tables = {_TABLE: self.frame.rename(columns=str), _MATRIX: self.matrix.rename(columns=str)}
        obsolete = ("depth.png", "depth.csv")
        return write_tables(Path(folder), _ABOUT, "use of depth", _FORMAT, _plain(self.metadata), tables, obsolete)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> DepthUse:
        """Reads what `save` wrote; refuses what is damaged."""
        names = {_TABLE: _TABLE, _MATRIX: _MATRIX}
        (frame, matrix), metadata = read_tables(Path(folder), _ABOUT, "use of depth", _FORMAT, names, "use of depth")
        try:
            blocks = pd.Index([int(name) for name in matrix.columns])
            matrix = matrix.set_axis(blocks.rename("skipped"), axis=0).set_axis(blocks.rename("block"), axis=1)
            found = cls(frame, pd.DataFrame() if matrix.empty else matrix, metadata)
            found.to_dict()  # earlier versions gave the record no sum: what cannot be judged is damaged
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder} holds no use of depth: {' '.join(str(error).split())[:200]}") from None
        return found


def format_number(name: str, value: float) -> str:
    """A number of a column, as people read it; · for what is not there."""
    if math.isnan(value):
        return "·"
    digits = SHOWN[name][1]
    return f"{value:.1e}" if abs(value) >= 1e4 else f"{value:{digits}}"


def _plain(value: Any) -> Any:
    """JSON knows neither nan nor infinity."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
