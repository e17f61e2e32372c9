"""Caches of keys and values (Hugging Face's `generate`), and what a remedy keeps in them from call to call.

Such a cache is a list of layers, and beam search reorders every one of them. The first also carries statistics (a
named tuple of tensors whose first axis is the batch, as of a causal mean), and reorders them with its keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

NAMES = ("past_key_values", "past_key_value", "layer_past", "cache_params")


Statistics = tuple[Tensor, ...]  # a named tuple
ByStation = dict[tuple[str, str], tuple[int, Statistics]]  # (block, station) → tokens seen, statistics per sequence


@cache
def _carrying(kind: Any) -> Any:
    """A kind of layer that also carries statistics: whatever is done to its keys and values is done to them."""

    class Carrying(kind):  # type: ignore[misc]
        is_croppable = False
        depthscope_statistics: ByStation

        def _each(self, change: Callable[[Tensor], Tensor]) -> None:
            self.depthscope_statistics = {
                place: (seen, _changed(parts, change)) for place, (seen, parts) in self.depthscope_statistics.items()
            }

        def reorder_cache(self, beam_idx: Tensor) -> None:
            super().reorder_cache(beam_idx)
            self._each(lambda part: part.index_select(0, beam_idx.to(part.device)))

        def batch_select_indices(self, indices: Tensor) -> None:
            super().batch_select_indices(indices)
            self._each(lambda part: part[indices])

        def batch_repeat_interleave(self, repeats: int) -> None:
            super().batch_repeat_interleave(repeats)
            self._each(lambda part: part.repeat_interleave(repeats, dim=0))

        def reset(self) -> None:
            super().reset()
            self.depthscope_statistics.clear()

        def crop(self, tokens_to_remove: int) -> None:
            if tokens_to_remove:
                raise ValueError(
                    "a running mean cannot forget tokens again: a remedy with a causal mean does not "
                    "go with decoding that crops its cache (assisted or speculative decoding)"
                )

    Carrying.__name__ = Carrying.__qualname__ = kind.__name__
    return Carrying


def _changed(statistics: Statistics, change: Callable[[Tensor], Tensor]) -> Statistics:
    kind: Any = type(statistics)
    return kind(*(change(part) for part in statistics))


def cache_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cache that a block is given; None if there is none. Of an encoder-decoder, that of its self-attention."""
    found = next((kwargs[name] for name in NAMES if kwargs.get(name) is not None), None)
    if found is None:
        found = next((value for value in args if hasattr(value, "get_seq_length")), None)
    return getattr(found, "self_attention_cache", found)


def past_length(cache: Any, index: int, before: int | None) -> int:
    """How many tokens of the block are in the cache; `before`: in that of the block before, None at the first one.

    The states of a recurrent block do not tell. In a hybrid model they hold as many as the blocks with attention.
    """
    if cache is None:
        return 0
    layers = getattr(cache, "layers", ())
    if index >= len(layers) or hasattr(layers[index], "get_seq_length"):
        return int(cache.get_seq_length(index))
    if before is not None:
        return before
    if any(hasattr(layer, "get_seq_length") for layer in layers):
        return int(cache.get_seq_length())
    if cache.has_previous_state():
        raise ValueError(
            "the inputs bring the states of a recurrent model, which do not say how many tokens they have seen: "
            "call the model, or generate, with use_cache=False"
        )
    return 0


def recall(cache: Any, place: tuple[str, str], past: int, streams: int = 1) -> Any:
    """The statistics of the tokens in the cache; None if it is empty. A cache may say 0 and hold states (MiniMax)."""
    seen, statistics = _statistics(cache).get(place, (0, None))
    if seen != past:
        raise ValueError(
            f"the cache holds {past} tokens, of which the remedy saw {seen}: it was filled before the remedy was "
            "put in, by a compiled pass, or cropped, or it does not count them; start again, with use_cache=False"
        )
    return statistics if statistics is None or streams == 1 else _changed(statistics, lambda part: part.flatten(0, 1))


def remember(cache: Any, place: tuple[str, str], seen: int, statistics: Statistics, streams: int = 1) -> None:
    """Keeps the statistics with the cache: those of the streams of one sequence stay together."""

    _statistics(cache)[place] = (
        seen,
        _changed(statistics, lambda p: p.detach() if streams == 1 else p.detach().unflatten(0, (-1, streams))),
    )


def _statistics(cache: Any) -> ByStation:
    """In the first layer of the cache or, until it has one, beside it."""
    if cache.layers and hasattr(cache.layers[0], "depthscope_statistics"):
        return cache.layers[0].depthscope_statistics
    if not hasattr(cache, "_depthscope"):
        cache._depthscope = {}
    return cache._depthscope


def settle(cache: Any) -> None:
    """The layers of the cache are there now: the first carries what waited beside it."""
    if (waiting := cache.__dict__.pop("_depthscope", None)) is not None:
        if not cache.layers:  # states alone, beside it
            cache._depthscope = waiting
            return
        first = cache.layers[0]
        kind: Any = type(first)
        first.__class__ = _carrying(kind)
        first.depthscope_statistics = waiting
