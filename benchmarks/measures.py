"""What the measures cost, against the naive way to compute the same number, in one run.

    python benchmarks/measures.py

Prints the median time of ours and the ratio naive ÷ ours (above 1: ours is faster), then how ours
grows with tokens n and width d. One thread setting, alternating rounds, medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from depthscope import measures as m

ROUNDS, CALLS = 9, 5


def in_float64(x: Tensor) -> Tensor:
    """t_div from a float64 copy of the tokens."""
    x = x.double()
    centred = x - x.mean(dim=-2, keepdim=True)
    return centred.square().sum(dim=(-2, -1)) / x.square().sum(dim=(-2, -1))


def all_pairs(x: Tensor) -> Tensor:
    """t_cos from the n × n matrix of cosines."""
    unit = torch.nn.functional.normalize(x, dim=-1)
    cosines = unit @ unit.mT
    n = x.shape[-2]
    return (cosines.sum(dim=(-2, -1)) - cosines.diagonal(dim1=-2, dim2=-1).sum(dim=-1)) / (n * n - n)


def by_svd(x: Tensor) -> Tensor:
    """Effective rank from the singular values."""
    sigma = torch.linalg.svdvals(x.double())
    return torch.special.entr(sigma / sigma.sum(dim=-1, keepdim=True)).sum(dim=-1).exp()


def four_separately(x: Tensor) -> list[Tensor]:
    return [m.token_similarity(x), m.token_diversity(x), m.frequency_ratio(x), m.cosine_similarity(x)]


def four_shared(x: Tensor) -> list[Tensor]:
    shared = m.TokenMatrix(x)
    return [
        m.token_similarity(shared),
        m.token_diversity(shared),
        m.frequency_ratio(shared),
        m.cosine_similarity(shared),
    ]


PAIRS: dict[str, tuple[Callable[[Tensor], object], Callable[[Tensor], object], str]] = {
    "token_diversity": (m.token_diversity, in_float64, "float64 copy"),
    "cosine_similarity": (m.cosine_similarity, all_pairs, "n × n cosines"),
    "effective_rank": (m.effective_rank, by_svd, "SVD"),
    "four measures": (four_shared, four_separately, "without TokenMatrix"),
}


def medians(calls: list[Callable[[], object]]) -> list[float]:
    """Median seconds of each call. Rounds alternate between the calls, so that drift hits all alike."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, spent in zip(calls, times, strict=True):
            call()  # warms the caches that the other call has filled
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            spent.append((time.perf_counter() - start) / CALLS)
    return [statistics.median(spent) for spent in times]


def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32")
    print(f"medians of {ROUNDS} rounds of {CALLS} calls\n")
    print(f"{'batch × n × d':>16}  {'measure':<18} {'ours':>9}  {'naive ÷ ours':>12}  naive way")
    for shape in ((8, 128, 768), (8, 197, 192), (1, 4096, 768)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        for name, (ours, naive, way) in PAIRS.items():
            if name == "effective_rank" and shape[1] > 1000:
                continue  # the SVD alone takes minutes here
            fast, slow = medians([lambda f=ours, x=x: f(x), lambda f=naive, x=x: f(x)])
            print(f"{' × '.join(map(str, shape)):>16}  {name:<18} {1e3 * fast:7.2f}ms  {slow / fast:12.2f}  {way}")
    print("\nGrowth of the four measures: time when the size doubles ÷ time before (2 = linear)")
    for what, sizes in (
        ("tokens n", [(n, 256) for n in (1024, 2048, 4096, 8192)]),
        ("width d", [(1024, d) for d in (256, 512, 1024, 2048)]),
    ):
        inputs = [torch.randn(2, *size, generator=torch.Generator().manual_seed(0)) for size in sizes]
        times = medians([lambda x=x: four_shared(x) for x in inputs])
        print(f"  {what}: " + ", ".join(f"{b / a:.2f}" for a, b in pairwise(times)))


if __name__ == "__main__":
    main()
