"""`spectra`: the eigenvalues of H = W_V W_O in every block and head, from the weights alone (Dovonon et al. 2025)."""

from __future__ import annotations

import os
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from depthscope.anatomy import BlockAnatomy, Projections
from depthscope.drawing import draw_spectra
from depthscope.interruption import attempt
from depthscope.measures import weights as measures
from depthscope.naming import unknown_name, visible
from depthscope.offloading import device_of
from depthscope.progress import Tick
from depthscope.scope import Scope, scope_of
from depthscope.sealed import read_tables, write_tables
from depthscope.transfers import fetched
from depthscope.value_spectra.from_disk import Checkpoint, empty_model, filled, is_on_disk

Product = Literal["value-output", "query-key"]
_OF_EIGENVALUES = ("negative_share", "positive_trace", "negative_trace", "spectral_radius", "mean_growth")
SUMMARIES = (*_OF_EIGENVALUES, "asymmetry", "mimetic_score")
WHOLE = -1
_TABLE, _ABOUT, _FORMAT = "spectra.parquet", "spectra.json", 1


@dataclass(frozen=True)
class Spectra:
    """`frame` has one row per eigenvalue: part, block (from 1), head (from 0), real, imag, and beside them what is said
    of the whole spectrum of that head, the same in each of its rows.

    What is said of a block is the mean over its heads. Head −1 is the sum of all heads' products, if it was asked for.
    """

    frame: pd.DataFrame
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> pd.DataFrame:
        """One row per block and head, without its eigenvalues."""
        kept = ["part", "block", "head", *SUMMARIES]
        return self.frame[kept].drop_duplicates(["block", "head"]).reset_index(drop=True)

    @property
    def by_block(self) -> pd.DataFrame:
        """One row per block, the mean over its heads: a whole block has one H only if all its heads attend alike."""
        summary = self.summary
        return summary[summary["head"] != WHOLE].groupby("block")[list(SUMMARIES)].mean()

    @property
    def depth(self) -> int:
        """Number of blocks with attention whose weights were read."""
        return int(self.frame["block"].nunique())

    def of(self, block: int, head: int = WHOLE) -> np.ndarray[Any, np.dtype[np.complex128]]:
        """The eigenvalues of one block, or of one head of it."""
        rows = self.frame[(self.frame["block"] == block) & (self.frame["head"] == head)]
        if rows.empty:
            raise ValueError(f"there is no block {block} with head {head}; blocks: {sorted(set(self.frame['block']))}")
        return rows["real"].to_numpy() + 1j * rows["imag"].to_numpy()

    def plot(self) -> Any:
        """A matplotlib figure of the heads: negative share by block, a histogram, and spectra in the complex plane."""
        heads = self.frame[self.frame["head"] != WHOLE]
        by_block = {int(str(n)): (rows["real"] + 1j * rows["imag"]).tolist() for n, rows in heads.groupby("block")}
        means, own = self.by_block["negative_share"], self.summary.query("head != @WHOLE").groupby("block")
        shares = {block: [means[block], *own.get_group(block)["negative_share"]] for block in by_block}
        product = "W_Q W_Kᵀ" if self.metadata.get("product") == "query-key" else "W_V W_O"
        return draw_spectra(by_block, shares, title=f"{self.metadata.get('model', '')}, eigenvalues of {product}")

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes spectra.parquet and spectra.json, both or none. A picture of spectra that are replaced goes."""
        about = (_ABOUT, "spectra", _FORMAT, self.metadata)
        return write_tables(Path(folder), *about, {_TABLE: self.frame}, obsolete=("spectra.png",))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Spectra:
        """Reads what `save` wrote; refuses what is damaged."""
        (frame,), metadata = read_tables(Path(folder), _ABOUT, "spectra", _FORMAT, {_TABLE: _TABLE}, "spectra")
        if list(frame.columns) != ["part", "block", "head", "real", "imag", *SUMMARIES]:
            raise ValueError(f"{folder} holds no spectra of format {_FORMAT}")
        return cls(frame, metadata)

    def __repr__(self) -> str:
        return visible(f"<Spectra of {self.metadata.get('model') or 'a model'}: {self.depth} blocks>")


def spectra(
    model: nn.Module | Scope | str | os.PathLike[str],
    *,
    product: Product = "value-output",
    fold_norm: bool = False,
    whole: bool = True,
    blocks: str | None = None,
    part: str | None = None,
    trust_remote_code: bool = False,
    progress: Tick = lambda: None,
) -> Spectra:
    """The eigenvalues of H = W_V W_O of every block and head, and what they say; no forward pass, no data.

    Args:
        model: a model, a `Scope` of it, or a folder with a config.json and safetensors: from a folder one block's
            attention is in memory at a time.
        product: "query-key" reads W_Q W_Kᵀ instead.
        fold_norm: takes in the norm that stands before attention in a pre-norm block, (I − 11ᵀ/d)diag(γ)H, or diag(γ)H
            for one that does not centre.
        whole: False leaves out the d × d eigenvalues of the sum of all heads: they take most of the time (d³).
        blocks: a glob of module names, as for `Scope`.
        part: of a model with several, as for `Scope`.
        trust_remote_code: lets a folder bring code of its own, which is run.
        progress: is called after each block.

    Returns:
        `Spectra`: a row per eigenvalue, and summaries by block and head.

    Example:
        >>> import torch, depthscope
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
        >>> depthscope.spectra(model).depth
        3
    """
    if product not in ("value-output", "query-key"):
        raise unknown_name("product", product, ("value-output", "query-key"))
    if isinstance(model, nn.Module | Scope):
        scope, checkpoint = scope_of(model, blocks=blocks, part=part), None
        name = type(scope.model).__name__
        device_of(scope.model)  # refuses a model without weights
    else:
        folder = Path(model).expanduser()
        if not is_on_disk(folder):
            raise ValueError(f"expected a folder with config.json and safetensors, got {str(folder)!r}")
        module = empty_model(folder, trust_remote_code=trust_remote_code)
        checkpoint, name = Checkpoint(folder, module), folder.name
        scope = Scope(module, blocks=blocks, part=part)
    anatomy = scope.anatomy
    tables: list[pd.DataFrame] = []
    notes = list(anatomy.notes)
    for number, block in enumerate(anatomy.blocks, start=1):
        if block.projections is None:
            notes.append(f"block {number}: {type(block.module).__name__} shows no projections")
        else:
            compute = partial(_of_block, block, number, product, fold_norm, whole, checkpoint)
            found = attempt(f"the eigenvalues of blocks from {number} on", compute) if tables else compute()
            if found is None:
                break
            tables += found
        progress()
    inside = [module for block in anatomy.blocks if block.attention is not None for module in block.attention.modules()]
    if product == "query-key" and any("norm" in type(module).__name__.lower() for module in inside):  # as in Qwen3
        notes.append("attention norms its queries and keys by head: what it compares is more than W_Q W_Kᵀ")
    if not tables:
        why = notes[-1] if notes else "their weights are not here"
        raise ValueError(f"this model shows no projections of attention in any block: {why}")
    said = {"model": name, "product": product, "fold_norm": fold_norm, "notes": notes, "family": anatomy.family}
    return Spectra(pd.concat(tables, ignore_index=True), said)


def _of_block(
    block: BlockAnatomy, number: int, product: Product, fold_norm: bool, whole: bool, checkpoint: Checkpoint | None
) -> list[pd.DataFrame]:
    assert block.projections is not None
    own = block.attention or block.module
    if any(hasattr(weight, "device_mesh") for weight in own.parameters()):
        raise ValueError(
            f"block {number}: its weights are spread over processes (fully_shard, tensor parallelism): give the whole "
            "model, or the folder that it was saved in"
        )
    if odd := {weight.layout for weight in own.parameters()} - {torch.strided}:
        raise ValueError(f"block {number}: expected dense weights, got {odd.pop()}; make them dense with to_dense()")
    norm = block.norms[:1] if fold_norm else ()
    with nullcontext() if checkpoint is None else filled(block.module, block.name, block.projections, norm, checkpoint):
        left, right = factors(block.projections(), product, where=f"block {number}")
        if fold_norm:
            left = _folded(block, left, number)
        summed = [[each.unsqueeze(0) for each in _whole(left, right)]] if whole else []
        return [
            _table(block.part, number, first, *pair)
            for first, pair in [*((WHOLE, pair) for pair in summed), (0, (left, right))]
        ]


def _whole(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """(d, g·k) and (g·k, d) with the product Σ_h L_h R_h. Neighbouring heads that share L (grouped queries) are one."""
    heads = len(left)
    shares = (left[1:] == left[:-1]).flatten(1).all(dim=1).tolist()  # with the head before
    starts = [0, *(head for head, same in enumerate(shares, start=1) if not same)]
    ends = [*starts[1:], heads]
    summed = torch.stack([right[start:end].double().sum(dim=0) for start, end in zip(starts, ends, strict=True)])
    return left[starts].transpose(0, 1).flatten(1), summed.flatten(0, 1)


def factors(projections: Projections, product: Product, where: str) -> tuple[Tensor, Tensor]:
    """(h, d, k) and (h, k, d) whose products are W_V W_O, or W_Q W_Kᵀ, of every head."""
    if product == "query-key":
        if projections.query is None or projections.key is None:
            raise ValueError(f"{where} has no matrix W_Q W_Kᵀ: something stands between the tokens and its queries")
        return projections.query, projections.key.mT
    if projections.latent is not None:
        raise ValueError(f"{where} has no matrix W_V W_O of tokens: a norm stands between the tokens and its values")
    value = projections.value
    heads, _, width = value.shape  # concatenated without an output: head h fills columns h·width … of the branch
    whole = torch.eye(heads * width, dtype=value.dtype, device=value.device).unflatten(0, (heads, width))
    return value, whole if projections.output is None else projections.output


def _folded(block: BlockAnatomy, left: Tensor, number: int) -> Tensor:
    """The norm before attention, frozen in its scale, multiplied into the left factor."""
    if block.placement not in ("pre", "sandwich", "parallel") or not block.norms:
        placement = f"{block.placement or 'unknown'}-norm"
        raise ValueError(f"block {number} has no norm before its attention ({placement}): leave fold_norm out")
    gain, centres = norm_map(block.norms[0], left.shape[1])
    scaled = gain[:, None] * left.double()
    return scaled - scaled.mean(dim=1, keepdim=True) if centres else scaled


def norm_map(norm: nn.Module, width: int) -> tuple[Tensor, bool]:
    """What a norm multiplies each feature by, and whether it takes out the mean over features first.

    Found by running a float64 copy of it, without its hooks, on two tokens, whatever its class: a norm that centres
    gives the same for x and x + 100. Its bias is what x and −x have in common.
    """
    x = 100.0 + 100.0 * (torch.arange(width) % 2)  # so large that the norm's ε does not matter, and never their mean
    twin = copy(norm)
    own = {name: None if p is None else p.detach().double() for name, p in norm._parameters.items()}
    twin._parameters = own  # type: ignore[assignment]
    like = next((p for p in own.values() if p is not None), x)
    x = x.to(like.device, torch.float64)
    with torch.no_grad():
        odd = (twin.forward(x) - twin.forward(-x)).double() / 2
        moved = (twin.forward(x + 100) - twin.forward(-x - 100)).double() / 2
    if not odd.isfinite().all():
        raise ValueError(f"expected finite weights of {type(norm).__name__}, got nan or inf in them")
    centres = bool(torch.allclose(odd, moved, rtol=1e-2, atol=1e-3 * odd.abs().max().item()))
    base = x - x.mean() if centres else x
    return odd / (base / base.square().mean().sqrt()), centres


def _table(part: str, number: int, first: int, left: Tensor, right: Tensor) -> pd.DataFrame:
    """A row per eigenvalue of each of these products, (h, d, k) and (h, k, d), numbered from `first` on."""
    try:
        values = measures.product_eigenvalues(left, right)  # (h, min(d, k))
    except ValueError as error:
        raise ValueError(f"block {number}: {error}") from None
    heads, count = values.shape
    summaries = [
        (getattr(measures, name)(values) if name in _OF_EIGENVALUES else getattr(measures, name)(left, right)).double()
        for name in SUMMARIES
    ]
    values = values.gather(-1, values.real.argsort(dim=-1)).flatten()
    real, imag, *of_heads = (found.numpy() for found in fetched([values.real, values.imag, *summaries]))
    head = np.arange(first, first + heads, dtype=np.int32).repeat(count)
    return pd.DataFrame(
        {"part": part, "block": np.int32(number), "head": head, "real": real, "imag": imag}
        | {name: found.repeat(count) for name, found in zip(SUMMARIES, of_heads, strict=True)}
    )
