"""What `paths` returns: tidy tables, metadata, and ways to look at them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from depthscope.drawing import draw_path_shares
from depthscope.measures import TokenMatrix, composite_residual
from depthscope.naming import visible
from depthscope.sealed import read_tables, write_tables
from depthscope.theory import path_counts

CONSTANT = -1  # in the place of a length: what does not depend on the tokens that entered
_TABLES = ("paths.parquet", "blocks.parquet")
_ABOUT = "paths.json"
_FORMAT = 1


@dataclass(frozen=True)
class PathShares:
    """What attention paths of each length are of a model's output.

    `length` is the number of heads on a path; −1 is the constant part, which comes from biases and not from the tokens.
    Every table has one row per sample and length:

    | table    | columns beside sample and length                                                                  |
    | -------- | ------------------------------------------------------------------------------------------------- |
    | `frame`  | of the last block's output: norm_share, projection_share (these add up to 1), cosine,              |
    |          | composite_residual                                                                                |
    | `blocks` | block: the same of every block's output, without the residual                                     |

    `terms`, if kept: (L + 2, batch, n, d), lengths 0 to L and then the constant part; they add up to the output.
    """

    frame: pd.DataFrame
    blocks: pd.DataFrame
    metadata: dict[str, Any] = field(default_factory=dict)
    terms: Tensor | None = None

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return int(self.metadata["blocks"])

    @property
    def counts(self) -> dict[int, int]:
        """How many paths have each length, exactly."""
        return dict(enumerate(path_counts(len(self.metadata["heads"]), self.metadata["heads"])))

    def summary(self) -> pd.DataFrame:
        """Lengths × measures, mean over samples; the constant part last."""
        table = self.frame.drop(columns="sample").groupby("length").mean()
        return table.reindex([*sorted(set(table.index) - {CONSTANT}), CONSTANT])

    def __repr__(self) -> str:
        return visible(f"<PathShares of {self.metadata.get('model') or 'a model'}: {self.depth} blocks>")

    def __str__(self) -> str:
        """The shares of each length."""
        known, total = self.metadata, sum(self.counts.values())
        number = f"{total:.1e}" if total >= 10**6 else str(total)
        head = f"{known.get('model') or 'model'}: {self.depth} blocks, {number} paths, {known['samples']} samples"
        table = self.summary().rename({CONSTANT: "constant"}).rename_axis(None)
        end = f"the terms add up to the output within {known['largest_error']:.0e} of it"
        return visible("\n".join([head, table.to_string(float_format="{:.3g}".format, na_rep="-"), end]))

    def plot(self) -> Any:
        """A matplotlib figure: share by length, of the output and of every block's."""
        title = f"{self.metadata.get('model', '')}, {self.depth} blocks"
        return draw_path_shares(self.frame, self.blocks, title=title)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes a parquet file for each table and paths.json, all or none of them. Terms are not written."""
        tables = dict(zip(_TABLES, (self.frame, self.blocks), strict=True))
        obsolete = ("paths.png", "paths.csv", "heads.parquet", "losses.parquet")
        return write_tables(Path(folder), _ABOUT, "path shares", _FORMAT, self.metadata, tables, obsolete)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> PathShares:
        """Reads what `save` wrote; refuses what is damaged."""
        names = dict(zip(_TABLES, ("frame", "blocks"), strict=True))  # as earlier versions called them in the record
        (frame, blocks), metadata = read_tables(Path(folder), _ABOUT, "path shares", _FORMAT, names, "path shares")
        return cls(frame, blocks, metadata)


def measured(terms: Tensor, whole: Tensor, real: Tensor | None) -> dict[str, Tensor]:
    """Of terms (k, batch, n, d) in a whole Y (batch, n, d), over real tokens: (k, batch) float64 each.

    | measure            | of a term A                                                                     |
    | ------------------ | ------------------------------------------------------------------------------- |
    | `norm_share`       | ‖A‖_F/‖Y‖_F; terms may cancel, so that these add up to 1 or more                 |
    | `projection_share` | ⟨A, Y⟩/‖Y‖_F²; these add up to exactly 1                                         |
    | `cosine`           | ⟨A, Y⟩/(‖A‖_F‖Y‖_F); nan where A = 0                                             |
    """
    if real is not None:
        terms, whole = terms * real.unsqueeze(-1), whole * real.unsqueeze(-1)
    norms, norm = (torch.linalg.vector_norm(x, dim=(-2, -1), dtype=torch.float64) for x in (terms, whole))
    dots = torch.einsum("kbnd,bnd->kb", terms, whole).double()
    return {
        "norm_share": norms / norm,
        "projection_share": dots / norm.square(),
        "cosine": (dots / (norms * norm)).clamp(-1, 1),
    }


def residuals(terms: Tensor, real: Tensor | None) -> dict[str, Tensor]:
    """`composite_residual`, ‖A − 1aᵀ‖_{1,∞}/‖A‖_{1,∞} of each term by itself: 0 for equal tokens, nan where A = 0."""
    found = [composite_residual(TokenMatrix.of(term, real)) for term in terms]
    return {"composite_residual": torch.stack(found)}


def rows_of(measures: Mapping[str, Tensor], first_sample: int, **where: int) -> pd.DataFrame:
    """A row per length and sample of what was measured, (1 + lengths, batch), the constant part first."""
    lengths, batch = next(iter(measures.values())).shape
    columns: dict[str, Any] = {key: np.full(lengths * batch, number, dtype=np.int32) for key, number in where.items()}
    columns["sample"] = np.tile(np.arange(first_sample, first_sample + batch, dtype=np.int32), lengths)
    columns["length"] = np.repeat(np.arange(CONSTANT, lengths - 1, dtype=np.int32), batch)
    return pd.DataFrame(columns | {name: values.flatten().cpu().numpy() for name, values in measures.items()})
