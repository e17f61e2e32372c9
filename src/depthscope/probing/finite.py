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

Place = tuple[int, str]  # block, station; (0, "output") is what enters block 1


def as_records(since: Mapping[int, Place]) -> list[dict[str, Any]]:
    """For a profile's metadata."""
    return [{"sample": sample, "block": block, "station": name} for sample, (block, name) in sorted(since.items())]


def in_words(since: Mapping[int, Place]) -> str:
    """Sequence 0 from what enters block 1 on, sequences 2–3 from the output of block 4 on."""
    places: dict[Place, list[int]] = {}
    for sample, place in sorted(since.items()):
        places.setdefault(place, []).append(sample)
    return ", ".join(f"{sequences_of(places[place])} from {_place(*place)} on" for place in sorted(places))


def note(since: Mapping[int, Place], samples: int) -> list[str]:
    """Nothing where all are finite."""
    if not since:
        return []
    who = f"{len(since)} of {counted(samples, 'sequence')} {'has' if len(since) == 1 else 'have'}"
    return [
        f"{who} numbers that are not finite (NaN or infinity), and no part in any mean from there on: {in_words(since)}"
    ]


def _place(block: int, station: str) -> str:
    if block == 0 or station == "input":
        return f"what enters block {max(block, 1)}"
    return f"the norm after block {block}" if station == at.FINAL else f"the {station} of block {block}"


def weights_not_finite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the weights with NaN or infinity in them; of split ones, in the part that this process holds.

    The norms of all of them are asked for first: one answer, and finite only if all of them are.
    """
    numbers = [(name, local) for name, weights in named if _can_be_asked(local := _local(weights))]
    if all_finite(fetched(norms_of_weights(numbers))):
        return []
    # A norm may overflow where no weight is infinite, and so may a sum, which is many times faster than asking each.
    with torch.no_grad():
        sums = fetched([w.sum(dtype=torch.promote_types(w.dtype, torch.float32)) for _, w in numbers])
        doubtful = [item for item, total in zip(numbers, sums, strict=True) if not total.isfinite()]
        finite = fetched([weights.isfinite().all() for _, weights in doubtful])
    return [name for (name, _), answer in zip(doubtful, finite, strict=True) if not answer]


def norms_of_weights(named: Iterable[tuple[str, Tensor]]) -> list[Tensor]:
    """A few numbers, where the weights are, which are all finite only if all weights are."""
    alike: dict[Any, list[Tensor]] = {}
    for _, given in named:
        weights = _local(given)
        if _can_be_asked(weights):
            plain = type(weights) in (Tensor, nn.Parameter)
            alike.setdefault((weights.device, weights.dtype) if plain else id(weights), []).append(weights)
    with torch.no_grad():
        return [
            torch.linalg.vector_norm(some[0]) if len(some) == 1 else torch.stack(torch._foreach_norm(some)).sum()
            for some in alike.values()
        ]


def all_finite(answers: list[Tensor]) -> bool:
    """What the norms say."""
    return all(bool(answer.isfinite()) for answer in answers)


def _local(weights: Tensor) -> Tensor:
    if type(weights) in (Tensor, nn.Parameter):
        return weights
    return weights.to_local() if hasattr(weights, "to_local") else weights


def _can_be_asked(weights: Tensor) -> bool:
    return (
        not (weights.is_meta or has_own_operations(weights))
        and weights.is_floating_point()
        and weights.dtype.itemsize > 1
    )


class AskedOfWeights:
    """What is asked of a model's weights with the numbers of its first pass, so that it takes no transfer of its own:
    what the norms of the blocks look like, and whether the weights of attention are finite. Some kernels turn its NaN
    into zeros, and no output shows it; other weights are asked where an output is not finite.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        self._model, self._anatomy = model, anatomy
        self.state: TrainingState | None = None
        self._attention_is_finite = True

    def asked(self) -> list[Tensor]:
        """Numbers where the weights are."""
        self._sizes = NormSizes(self._anatomy)
        return [*self._sizes.asked, *norms_of_weights(self._of_attention())]

    def read(self, answers: list[Tensor]) -> None:
        """The same, on the host."""
        known = len(self._sizes.asked)
        self.state = self._sizes.look(answers[:known])
        self._attention_is_finite = all_finite(answers[known:])

    def not_finite(self, *, outputs: bool) -> list[str]:
        """Names of weights; `outputs` says that some are not finite."""
        if outputs:
            return weights_not_finite(walking.named_parameters(self._model))
        return [] if self._attention_is_finite else weights_not_finite(self._of_attention())

    def _of_attention(self) -> list[tuple[str, nn.Parameter]]:
        known = [block.attention or block.module for block in self._anatomy.blocks]
        inside = {id(weights) for module in known for weights in walking.parameters(module)}
        return [(name, weights) for name, weights in walking.named_parameters(self._model) if id(weights) in inside]
