"""The random numbers of many trials: streams of one seed, numbers drawn in place, and tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def generators(seed: int | tuple[int, ...], count: int) -> list[np.random.Generator]:
    """Independent streams of one seed, by NumPy's SFC64 (half the time of torch's serial generator here)."""
    return [np.random.Generator(np.random.SFC64(stream)) for stream in np.random.SeedSequence(seed).spawn(count)]


def fill_gaussian(values: Tensor, deviation: float, stream: np.random.Generator) -> None:
    """values ~ N(0, deviation²), in place."""
    flat = values.numpy()
    stream.standard_normal(out=flat, dtype=flat.dtype)
    values.mul_(deviation)


def fill_uniform(values: Tensor, bound: float, stream: np.random.Generator) -> None:
    """values ~ U(−bound, bound), in place."""
    flat = values.numpy()
    stream.random(out=flat, dtype=flat.dtype)
    torch.add(torch.tensor(-bound, dtype=values.dtype), values, alpha=2 * bound, out=values)  # one pass over memory


def levels(values: Tensor, stream: np.random.Generator) -> Tensor:
    """Fills with whole numbers k from −32768 to 32767, all equally likely, four of each random word.

    (k + ½)/32768 is uniform in (−1, 1) on 65 536 levels, symmetric about 0: its variance is that of the uniform law to
    3e-10, its fourth moment to 1e-9, and it takes a third of the time.
    """
    words = stream.bit_generator.random_raw(-(-values.numel() // 4))
    return values.copy_(torch.from_numpy(words.view(np.int16)[: values.numel()]).view(values.shape))


def standard_normal_tokens(
    trials: int, streams: int, n: int, d: int, seed: int | tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Tensor:
    """X ~ N(0, 1), one per trial, the same for all streams of a trial; (trials, streams, n, d)."""
    (stream,) = generators(seed, 1)
    x = torch.from_numpy(stream.standard_normal((trials, 1, n, d))).to(dtype)
    return x.expand(-1, streams, -1, -1).contiguous()


def chunks(trials: int, most: int) -> list[int]:
    """Trials in parts of at most `most`, so that the weights of one part fit into memory."""
    return [min(most, trials - start) for start in range(0, trials, most)]
