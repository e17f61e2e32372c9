"""`capture`: the tokens themselves, at stations of blocks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from depthscope import stations as at
from depthscope.discovery import Hints
from depthscope.hooks import Listen, Machine, Visit
from depthscope.inputs import Tokenizer, call
from depthscope.scope import Scope, scope_of

LARGE = 2**30  # bytes from which on a warning says what is kept


class Captured(Mapping[tuple[str, int], Tensor]):
    """Tokens (batch, n, d) by station and number of the block: `captured["output", 3]`. On the model's device."""

    def __init__(self, tokens: Mapping[tuple[str, int], Tensor], mask: Tensor | None):
        self._tokens = dict(tokens)
        self.mask = mask  # (batch, n), true for real tokens; None: all are

    def __getitem__(self, key: tuple[str, int]) -> Tensor:
        if key not in self._tokens:
            stations = ", ".join(dict.fromkeys(repr(station) for station, _ in self._tokens))
            blocks = sorted({block for _, block in self._tokens})
            raise KeyError(f"expected a captured station ({stations}) and block ({blocks}), got {key!r}")
        return self._tokens[key]

    def __iter__(self) -> Any:
        return iter(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of all tokens."""
        return sum(tokens.nbytes for tokens in self._tokens.values())

    def __repr__(self) -> str:
        shapes = sorted({tuple(tokens.shape) for tokens in self._tokens.values()})
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
        Captured tokens; more than 1 GiB is warned of before it is taken.

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
    found: dict[tuple[str, int], Tensor] = {}
    masks: list[Tensor | None] = []

    def keep(visit: Visit, station: str, tokens: Tensor, source: Tensor) -> None:
        masks[:] = [visit.real]
        if visit.streams > 1:  # as they are passed: (batch, n, streams, d), or (batch, n, d) where a branch reads them
            tokens, masks[:] = source, [visit.real_of_sequences]
        if station == "input" and visit.number == 1 and "output" in wanted and 0 in chosen:
            size = len(wanted) * len(chosen) * tokens.nbytes
            if size > LARGE:
                warnings.warn(f"about {size / 2**30:.1f} GiB of tokens are kept: name fewer blocks", stacklevel=2)
            found["output", 0] = tokens.clone()
        if station in wanted and visit.number in chosen:
            found[station, visit.number] = tokens.clone()

    batch = scope.one_to_a_row(scope.first_batch)
    with scope.undisturbed(), Machine(scope.model, scope.anatomy, Listen({*wanted, "input"}, keep)), torch.no_grad():
        call(scope.model, batch)
    return Captured(found, masks[0] if masks else None)
