"""Token matrices for the property tests: from independent to all but equal."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

settings.register_profile("depthscope", max_examples=60, deadline=None, derandomize=True)
settings.load_profile("depthscope")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def token_matrices(draw, min_tokens: int = 2, max_closeness: int = 6) -> Tensor:
    """X = 1vᵀ + 10^(−k)·noise in float64, (n, d), 0 ≤ k ≤ max_closeness."""
    n, d = draw(st.integers(min_tokens, 12)), draw(st.integers(1, 9))
    closeness = draw(st.integers(0, max_closeness))
    generator = seeded(draw(st.integers(0, 2**16)))
    common = torch.randn(1, d, generator=generator, dtype=torch.float64)
    return common + 10.0**-closeness * torch.randn(n, d, generator=generator, dtype=torch.float64)


@st.composite
def attention_and_tokens(draw, min_tokens: int = 2) -> tuple[Tensor, Tensor]:
    """A row-stochastic P (n, n), from nearly uniform to nearly one-hot, and tokens (n, d)."""
    x = draw(token_matrices(min_tokens=min_tokens, max_closeness=3))
    generator = seeded(draw(st.integers(0, 2**16)))
    sharpness = draw(st.sampled_from([0.01, 1.0, 5.0]))
    scores = torch.randn(len(x), len(x), generator=generator, dtype=torch.float64)
    return torch.softmax(sharpness * scores, dim=-1), x
