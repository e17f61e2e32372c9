"""What is not finite (NaN or infinity): sequences, from where on, and weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from depthscope import stations as at
from depthscope import walking
from depthscope.anatomy import Anatomy
from depthscope.anatomy.projections import has_own_operations
from depthscope.anatomy.trained import NormSizes, TrainingState
from depthscope.naming import counted, sequences_of
from depthscope.transfers import fetched

_WIDE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # what most weights are stored in
Place = tuple[int, str]  # block, station; (0, "output") is what enters block 1


def as_records(since: Mapping[int, Place]) -> list[dict[str, Any]]:
    """For a profile's metadata."""
    return [{"sample": sample, "block": block, "station": name} for sample, (block, name) in sorted(since.items())]


def in_words(since: Mapping[int, Place]) -> str:
    """Sequence 0 from what enters block 1 on, sequences 2–3 from the output of block 4 on."""

    def named(block: int, station: str) -> str:
        if block == 0 or station == "input":
            return f"what enters block {max(block, 1)}"
        return f"the norm after block {block}" if station == at.FINAL else f"the {station} of block {block}"

    places: dict[Place, list[int]] = {}
    for sample, place in sorted(since.items()):
        places.setdefault(place, []).append(sample)
    return ", ".join(f"{sequences_of(places[place])} from {named(*place)} on" for place in sorted(places))


def note(since: Mapping[int, Place], samples: int) -> list[str]:
    """Nothing where all are finite."""
    if not since:
        return []
    who = f"{len(since)} of {counted(samples, 'sequence')} {'has' if len(since) == 1 else 'have'}"
    return [
        f"{who} numbers that are not finite (NaN or infinity), and no part in any mean from there on: {in_words(since)}"
    ]


def weights_not_finite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the weights with NaN or infinity in them; of split ones, in the part that this process holds.

    The norms of all of them are asked for first: one answer, and finite only if all of them are. A norm may overflow
    where no weight is infinite, and so may a sum, which is many times faster than asking each number.
    """
    numbers = [(name, here) for name, weights in named if (here := _that_can_be_asked(weights)) is not None]
    if all(answer.isfinite() for answer in fetched(norms_of_weights(weights for _, weights in numbers))):
        return []
    with torch.no_grad():
        sums = fetched([w.sum(dtype=torch.promote_types(w.dtype, torch.float32)) for _, w in numbers])
        doubtful = [item for item, total in zip(numbers, sums, strict=True) if not total.isfinite()]
        finite = fetched([weights.isfinite().all() for _, weights in doubtful])
    return [name for (name, _), answer in zip(doubtful, finite, strict=True) if not answer]


def modules_of_attention(_model: nn.Module, anatomy: Anatomy) -> list[nn.Module]:
    """Those of every block's attention; of a block that does not show it, all."""
    return [module for block in anatomy.blocks for module in walking.modules(block.attention or block.module)]


def norms_of_weights(given: Iterable[Tensor]) -> list[Tensor]:
    """A few numbers, where the weights are, which are all finite only if all weights are."""
    alike: dict[Any, list[Tensor]] = {}
    for weights in given:
        plain = type(weights) in (Tensor, nn.Parameter) and weights.dtype in _WIDE and not weights.is_meta
        if (here := weights if plain else _that_can_be_asked(weights)) is not None:
            alike.setdefault((here.device, here.dtype) if plain else id(here), []).append(here)
    with torch.no_grad():
        return [
            torch.linalg.vector_norm(some[0]) if len(some) == 1 else torch.stack(torch._foreach_norm(some)).sum()
            for some in alike.values()
        ]


def _that_can_be_asked(weights: Tensor) -> Tensor | None:
    """The numbers that this process holds; None where they are elsewhere, or no numbers that can be added."""
    if type(weights) not in (Tensor, nn.Parameter) and hasattr(weights, "to_local"):
        weights = weights.to_local()
    if weights.is_meta or not weights.is_floating_point() or weights.dtype.itemsize == 1:
        return None
    return None if has_own_operations(weights) else weights


class AskedOfWeights:
    """What is asked of a model's weights with the numbers of its first pass, so that it takes no transfer of its own:
    what the norms of the blocks look like, and whether the weights of attention are finite. Some kernels turn its NaN
    into zeros, and no output shows it; other weights are asked where an output is not finite.
    """

    def __init__(self, model: nn.Module, norms: list[nn.Module], attention: list[nn.Module]):
        self._model, self._norms, self._attention = model, norms, attention
        self.state: TrainingState | None = None
        self._attention_is_finite = True

    def asked(self) -> list[Tensor]:
        """Numbers where the weights are."""
        self._sizes = NormSizes(self._norms)
        return [*self._sizes.asked, *norms_of_weights(walking.weights_in(self._attention))]

    def read(self, answers: list[Tensor]) -> None:
        """The same, on the host."""
        known = len(self._sizes.asked)
        self.state = self._sizes.look(answers[:known])
        self._attention_is_finite = all(bool(answer.isfinite()) for answer in answers[known:])

    def not_finite(self, *, outputs: bool) -> list[str]:
        """Names of weights; `outputs` says that some are not finite."""
        if self._attention_is_finite and not outputs:
            return []
        asked = None if outputs else set(map(id, walking.weights_in(self._attention)))
        named = walking.named_parameters(self._model)
        return weights_not_finite((name, weights) for name, weights in named if asked is None or id(weights) in asked)
