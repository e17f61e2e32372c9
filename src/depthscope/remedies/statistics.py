"""What a causal mean has seen, kept in the cache of keys and values of Hugging Face's `generate`.

Such a cache is a list of layers; ours stands behind them, so that beam search, which reorders every layer,
reorders it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from depthscope.remedies.mixing import Running

_NAMES = ("past_key_values", "past_key_value", "layer_past")


class Statistics:
    """One more layer of a cache: the running means of every station, per sequence."""

    is_compileable = False
    is_croppable = False
    is_initialized = True
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        self.running: dict[tuple[str, str], tuple[int, Running]] = {}  # (block, station) → tokens seen, statistics

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        self.running = {
            site: (seen, Running(*(change(part) for part in parts))) for site, (seen, parts) in self.running.items()
        }

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._each(lambda part: part.index_select(0, beam_idx.to(part.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each(lambda part: part[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda part: part.repeat_interleave(repeats, dim=0))

    def reset(self) -> None:
        self.running.clear()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                "a running mean cannot forget tokens again: de-escalation with mixing='prefix' or 'ema' does not go "
                "with decoding that crops its cache (assisted or speculative decoding)"
            )

    def offload(self) -> None: ...

    def prefetch(self) -> None: ...

    def get_max_length(self) -> int:
        return -1

    def get_seq_length(self) -> int:
        return max((seen for seen, _ in self.running.values()), default=0)


def cache_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cache that a block is given; None if there is none. Of an encoder-decoder, that of its self-attention."""
    found = next((kwargs[name] for name in _NAMES if kwargs.get(name) is not None), None)
    if found is None:
        found = next((value for value in args if hasattr(value, "get_seq_length")), None)
    return getattr(found, "self_attention_cache", found)


def past_length(cache: Any, index: int) -> int:
    """How many tokens of the block are in the cache."""
    return 0 if cache is None else int(cache.get_seq_length(index))


def recall(cache: Any, site: tuple[str, str], past: int) -> Running | None:
    """The statistics of the tokens in the cache; None if it is empty."""
    if past == 0:
        return None
    seen, running = _statistics(cache).running.get(site, (0, None))
    if seen != past:
        raise ValueError(
            f"the cache holds {past} tokens, of which de-escalation saw {seen}: it was filled before the remedy was "
            "put in, by a compiled pass, or cropped; start again without a cache"
        )
    return running


def remember(cache: Any, site: tuple[str, str], seen: int, running: Running) -> None:
    """Keeps the statistics with the cache."""
    _statistics(cache).running[site] = (seen, Running(*(part.detach() for part in running)))


def _statistics(cache: Any) -> Statistics:
    """Ours, among the layers of a cache or, until these are complete, waiting beside them."""
    for layer in reversed(cache.layers):
        if isinstance(layer, Statistics):
            return layer
    if not hasattr(cache, "_depthscope"):
        cache._depthscope = Statistics()
    return cache._depthscope


def settle(cache: Any) -> None:
    """All layers of the cache are there now: ours takes its place behind them."""
    if (waiting := cache.__dict__.pop("_depthscope", None)) is not None:
        cache.layers.append(waiting)
