"""`capture`: the tokens themselves, at stations of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from depthscope import stations as at
from depthscope.discovery import Hints
from depthscope.hooks import Listen, Machine, Visit
from depthscope.inputs import Tokenizer, call
from depthscope.scope import Scope, scope_of


class Captured(dict[tuple[str, int], Tensor]):
    """Tokens (batch, n, d) by station and number of the block: `captured["output", 3]`. On the model's device."""

    mask: Tensor | None = None  # (batch, n), true for real tokens; None: all are

    def __missing__(self, key: object) -> Tensor:
        stations = ", ".join(dict.fromkeys(repr(station) for station, _ in self))
        blocks = sorted({block for _, block in self})
        raise KeyError(f"expected a captured station ({stations}) and block ({blocks}), got {key!r}")

    @property
    def nbytes(self) -> int:
        """Bytes of all tokens."""
        return sum(tokens.nbytes for tokens in self.values())

    def __repr__(self) -> str:
        shapes = sorted({tuple(tokens.shape) for tokens in self.values()})
        return f"<{len(self)} token matrices {shapes}, {self.nbytes / 2**20:.1f} MiB>"


def capture(
    model: nn.Module | Scope,
    inputs: Any = None,
    *,
    stations: str | Sequence[str] = "output",
    numbers: int | Iterable[int] | None = None,
    tokenizer: Tokenizer | None = None,
    **hints: Unpack[Hints],
) -> Captured:
    """The tokens of the first batch at stations of blocks, batch first and on their device, from one pass.

    Args:
        model: the model, or a `Scope` of it.
        inputs: as for `probe`; the first batch is run.
        stations: "output", "trunk", "all", or names, as for `probe`.
        numbers: of blocks, from 1; None: all. Block 0 ("output", 0) is what enters block 1, and comes with all.
        tokenizer: makes ids of strings.
        hints: what you may say of the model, as for `probe`.

    Returns:
        Captured tokens: a dictionary by (station, block), with the mask of the real ones.

    Example:
        >>> import torch, depthscope
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
        >>> depthscope.capture(model, torch.randn(2, 5, 16))["output", 3].shape
        torch.Size([2, 5, 16])
    """
    scope = scope_of(model, inputs, tokenizer, **hints)
    wanted = at.choose_stations(stations)
    depth = scope.depth_of_model
    chosen = set(range(depth + 1)) if numbers is None else {numbers} if isinstance(numbers, int) else set(numbers)
    if not chosen <= set(range(depth + 1)):
        raise ValueError(f"expected numbers of blocks from 0 to {depth}, the model's depth, got {sorted(chosen)}")
    found = Captured()

    def keep(visit: Visit, station: str, tokens: Tensor, source: Tensor) -> None:
        found.mask = visit.real_of_sequences
        if visit.streams > 1:  # as they are passed: (batch, n, streams, d), or (batch, n, d) where a branch reads them
            tokens = visit.with_streams(source)
        if station == "input" and visit.number == 1 and "output" in wanted and 0 in chosen:
            found["output", 0] = tokens.clone()
        if station in wanted and visit.number in chosen:
            found[station, visit.number] = tokens.clone()

    batch = scope.one_to_a_row(scope.first_batch)
    with scope.undisturbed(), Machine(scope.model, scope.anatomy, Listen({*wanted, "input"}, keep)), torch.no_grad():
        call(scope.model, batch)
    return found
