"""The losses of a training, smoothed and compared with their own past: does it still learn?"""

from __future__ import annotations

import math
from statistics import median
from typing import Any, NamedTuple

from torch import Tensor

BINS = 64  # means that are kept at most, whatever the length of the training
_FETCHED_AT_ONCE = 256  # losses: a tensor on a GPU is not waited for at every step


class Judgement(NamedTuple):
    """Whether the loss falls, and if it does not, why a gate may speak."""

    falls: bool
    words: str


class Losses:
    """The losses of a training, as at most 64 means of equally many losses each, oldest first.

    The loss *falls* if the median of the newest third of the means is below that of the third before. So the noise of
    single steps counts the less the longer a training is, and a loss that has jumped up is seen after a fifth more
    steps. Medians do not heed a few spikes. On a plateau it is chance which is less: then a gate speaks some looks
    later.
    """

    def __init__(self) -> None:
        self._means: list[float] = []
        self._width = 1  # losses per mean
        self._begun: list[float] = []  # of the next mean
        self._is_finite = True  # the newest
        self._waiting: list[float | Tensor] = []  # on a GPU perhaps, and not fetched yet

    def tell(self, loss: float | Tensor) -> None:
        """The loss of one step more."""
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise ValueError(f"expected loss= to be one number, got a tensor of shape {tuple(loss.shape)}")
            loss = loss.detach().clone()
        elif isinstance(loss, bool) or not hasattr(loss, "__float__") or getattr(loss, "size", 1) != 1:
            raise ValueError(f"expected loss= to be a number or a tensor with one, got {loss!r}")
        self._waiting.append(loss)
        if len(self._waiting) >= _FETCHED_AT_ONCE:
            self._fetch()

    def judge(self) -> Judgement:
        """Too few losses to be compared count as falling, none or one that is not finite as not falling."""
        self._fetch()
        if not self._is_finite:
            return Judgement(False, "the loss is not finite")
        if not self._means and not self._begun:
            how = "call watch.tell(loss=loss) at every step, and the gate waits while it falls"
            return Judgement(False, f"the loss is not known: {how}")
        third = len(self._means) // 3
        if third == 0:
            return Judgement(True, "")
        newest, before = median(self._means[-third:]), median(self._means[-2 * third : -third])
        steps = third * self._width
        unit = "step" if steps == 1 else "steps"
        words = f"the loss has not fallen: {newest:.4g} over {steps} {unit}, {before:.4g} over the {steps} before"
        return Judgement(newest < before, words)

    def _fetch(self) -> None:
        waiting, self._waiting = self._waiting, []
        for loss in map(float, waiting):
            self._is_finite = math.isfinite(loss)
            if not self._is_finite:
                continue
            self._begun.append(loss)
            if len(self._begun) == self._width:
                self._means.append(sum(self._begun) / self._width)
                self._begun = []
            if len(self._means) == BINS:
                pairs = zip(self._means[::2], self._means[1::2], strict=True)
                self._means, self._width = [(a + b) / 2 for a, b in pairs], 2 * self._width

    def state(self) -> dict[str, Any]:
        """As plain values."""
        self._fetch()
        return {"means": [*self._means], "width": self._width, "begun": [*self._begun], "finite": self._is_finite}

    @classmethod
    def of(cls, state: Any) -> Losses:
        """Goes on from `state()`; what is damaged is refused."""
        found = cls()
        if state is None:
            return found
        try:
            means, width, begun, finite = (state[key] for key in ("means", "width", "begun", "finite"))
            numbers = all(type(x) in (int, float) and math.isfinite(x) for x in (*means, *begun))
            if not (numbers and len(means) < BINS and type(width) is int and len(begun) < width):
                raise ValueError
            if not (isinstance(means, list) and isinstance(begun, list) and type(finite) is bool and len(state) == 4):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"the losses of the gate in the checkpoint are damaged: got {state!r}") from None
        found._means, found._begun = [*map(float, means)], [*map(float, begun)]
        found._width, found._is_finite = width, finite
        return found
