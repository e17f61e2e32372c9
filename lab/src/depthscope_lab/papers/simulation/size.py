"""How large a simulation is: what the configurations of these studies share, with its weights and its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from depthscope_lab.papers.simulation.randomness import chunks, standard_normal_tokens
from depthscope_lab.papers.simulation.weights import Sampler


@dataclass(frozen=True)
class Size:
    tokens: int = 64
    width: int = 512
    heads: int = 8
    trials: int = 10
    seed: int = 0

    def parts(self, most: int) -> list[tuple[int, int]]:
        """Trials in parts of at most so many, for the memory: the number of each part, and how many trials it has."""
        return list(enumerate(chunks(self.trials, most)))

    def sampler(self, setting: str, trials: int, *seed: int, **more: Any) -> Sampler:
        """Of so many blocks at once; the seed follows the configuration's."""
        return Sampler(setting, trials=trials, width=self.width, heads=self.heads, seed=(self.seed, *seed), **more)

    def start(self, trials: int, *seed: int, streams: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal tokens (trials, streams, n, d), the same for all streams."""
        return standard_normal_tokens(trials, streams, self.tokens, self.width, (self.seed, *seed), dtype)
