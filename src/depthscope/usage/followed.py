"""The tokens that are followed through the whole model, some of each sequence, so that memory stays small."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from depthscope.hooks import Listen, Visit, full_precision
from depthscope.transfers import fetched


class Followed:
    """Places (k) in the flattened tokens (batch·n): of each sequence at most `most` real tokens, evenly spaced, the
    first and the last among them; None: all real tokens.

    They are found once for all stations that have the same tokens.
    """

    def __init__(self, most: int | None):
        self.most = most
        self._known: tuple[tuple[int, int], Tensor | None, Tensor] | None = None  # shape, mask, places
        self._there: dict[torch.device, Tensor] = {}  # the same places on each device

    def __call__(self, tokens: Tensor, real: Tensor | None) -> Tensor:
        shape = (tokens.shape[0], tokens.shape[1])
        if self._known is None or self._known[0] != shape or self._known[1] is not real:
            rows = torch.ones(shape, dtype=torch.bool) if real is None else (real != 0).cpu()
            found = []
            for row in range(shape[0]):
                places = rows[row].nonzero().flatten() + row * shape[1]
                if self.most is not None and len(places) > self.most:
                    places = places[torch.linspace(0, len(places) - 1, self.most).round().long()]
                found.append(places)
            self._known = shape, real, torch.cat(found)
            self._there = {}
        if tokens.device not in self._there:
            self._there[tokens.device] = self._known[2].to(tokens.device)
        return self._there[tokens.device]


def listen_to_blocks(most: int | None, see: Callable[[Visit, Tensor, Tensor], None]) -> Listen:
    """`see(visit, entered, left)` is told the followed tokens that enter each block and that leave it, (k, d) each, in
    float32 or wider."""
    places, entered = Followed(most), list[Tensor]()

    def hear(visit: Visit, station: str, tokens: Tensor, _source: Tensor) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad(), full_precision(tokens):
            here = taken(tokens, places(tokens, visit.real))  # a copy: a block may write into what it was given
            here = here.to(torch.promote_types(here.dtype, torch.float32))
            if station == "input":
                entered[:] = [here]
            elif entered:
                see(visit, entered[0], here)

    return Listen({"input", "output"}, hear)


def taken(tokens: Tensor, places: Tensor) -> Tensor:
    """The tokens (batch, n, d) at these places, as a copy (k, d)."""
    return tokens.reshape(-1, tokens.shape[-1]).index_select(0, places)


class Means:
    """Means by name over batches, each batch with the weight of its tokens; nan is left out."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, str], tuple[float, float]] = {}
        self._waiting: list[tuple[int, str, Tensor, float]] = []  # what was added and is still where it was computed

    def add(self, block: int, name: str, value: Tensor | float, weight: float) -> None:
        self._waiting.append((block, name, torch.as_tensor(value), weight))

    def get(self, block: int, name: str) -> float:
        """nan if nothing was added."""
        total, count = self._known().get((block, name), (0.0, 0.0))
        return total / count if count else float("nan")

    @property
    def names(self) -> set[str]:
        return {name for _, name in self._known()}

    def _known(self) -> dict[tuple[int, str], tuple[float, float]]:
        """The sums, with all that was added since they were asked for: one transfer."""
        waiting, self._waiting = self._waiting, []
        numbers = fetched([value for *_, value, _ in waiting])
        for (block, name, _, weight), found in zip(waiting, numbers, strict=True):
            if not found.isnan():
                total, count = self._sums.get((block, name), (0.0, 0.0))
                self._sums[block, name] = total + weight * found.item(), count + weight
        return self._sums
