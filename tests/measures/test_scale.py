"""The size of the tokens does not matter: 2^k·X has the measures of X, up to the ends of the number formats."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import long_double as naive
from depthscope import measures as m
from depthscope.measures import MEASURES, PARTS, HeadInput, Scratch, Summary, TokenMatrix
from samples import seeded

FREE = {torch.float32: 100, torch.float64: 900}  # 2^±k
# float32 tokens of an ordinary size are centred in float32, extreme ones in float64.
ROUNDING = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.float64: {"rtol": 1e-12, "atol": 1e-13}}
# These are taken of the rescaled tokens, which are the same numbers whatever k is.
BIT_FOR_BIT = {"effective_rank", "stable_rank",
               "composite_residual", "omega", "mu_mean", "mu_diversity"}  # fmt: skip
wide_double = pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="long double is no wider than double here")


def whole_catalogue(x: Tensor, y: Tensor, p: Tensor) -> dict[str, Tensor]:
    """Every measure: of the tokens x (batch, n, d), of the step from x to y, of attention p (batch, n, n) to x."""
    tokens, after = TokenMatrix(x), TokenMatrix(y)
    summary = Summary({name: part(tokens, tokens) for name, part in PARTS.items()})
    of_head = {"matrix": p, "tokens": tokens, "values": x, "sinks": tokens.outliers, "real": None, "scores": p.log()}
    head = HeadInput({name: lambda part=part: part for name, part in of_head.items()})
    u, v = tokens.directions, after.directions
    given_to: dict[str, Callable[[m.Measure], tuple]] = {
        "station": lambda measure: (summary.only(measure.needs),),
        "tokens": lambda _: (tokens,),
        "batch": lambda _: (tokens,),
        "step": lambda _: (tokens.norms, after.norms),
        "branch": lambda _: (tokens.norms, after.norms),
        "block": lambda _: (u.values, v.values, u.real & v.real, Scratch()),
        "attention": lambda measure: (head.only(measure.needs),),
    }
    return {name: measure.compute(*given_to[measure.of](measure)) for name, measure in MEASURES.items()}


@st.composite
def steps(draw, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of three sequences with a sink, what a block makes of them, and attention."""
    n, d, generator = draw(st.integers(3, 9)), draw(st.integers(1, 9)), seeded(draw(st.integers(0, 2**16)))
    x, y = torch.randn(2, 3, n, d, generator=generator, dtype=torch.float64)
    x = x[:, :1] + 10.0 ** -draw(st.integers(0, 3)) * x
    x[:, 1] *= 50
    p = torch.softmax(torch.randn(3, n, n, generator=generator, dtype=torch.float64), dim=-1)
    return x.to(dtype), (x + y).to(dtype), p.to(dtype)


@pytest.mark.parametrize("dtype", FREE)
@given(data=st.data())
def test_every_measure_is_free_of_scale(dtype: torch.dtype, data: st.DataObject):
    x, y, p = data.draw(steps(dtype))
    k = data.draw(st.integers(-FREE[dtype], FREE[dtype]))
    scale = torch.tensor(2.0, dtype=torch.float64) ** k
    plain, scaled = whole_catalogue(x, y, p), whole_catalogue((scale * x).to(dtype), (scale * y).to(dtype), p)
    assert plain.keys() == MEASURES.keys()
    plain["frobenius_norm"] = plain["frobenius_norm"] * scale  # the only one that has a size
    for name, value in plain.items():
        exact = {"rtol": 0, "atol": 0} if name in BIT_FOR_BIT else ROUNDING[dtype]
        if name == "frobenius_norm":
            exact = exact | {"atol": 0}
        assert_close(scaled[name], value, equal_nan=True, **exact, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", FREE)
@given(data=st.data())
def test_a_step_that_scales_multiplies_the_growth_alone(dtype: torch.dtype, data: st.DataObject):
    x, _, p = data.draw(steps(dtype))
    k = data.draw(st.integers(-FREE[dtype] // 2, FREE[dtype] // 2))  # growth is a square
    scale = torch.tensor(2.0, dtype=torch.float64) ** k
    found = whole_catalogue(x, (scale * x).to(dtype), p)
    ones = torch.ones(3, dtype=torch.float64)
    assert_close(found["growth_diversity"] / scale**2, ones, **ROUNDING[dtype])
    assert_close(found["branch_ratio"] / scale, ones, **ROUNDING[dtype])
    assert_close(found["escalation_rate"], ones, **ROUNDING[dtype])
    assert (found["angular_distance"] < 1e-6).all()


def test_squares_in_the_tokens_own_precision_would_fail():
    """The mutant of t_div without a careful way: its squares are 0 or infinite."""

    def mutant(x: Tensor) -> Tensor:
        return (x - x.mean(dim=0)).square().sum() / x.square().sum()

    x = torch.randn(9, 4, generator=seeded(0))
    for scale in (2.0**-100, 2.0**100):
        assert mutant(x * scale).isnan()
        assert_close(m.token_diversity(x * scale), mutant(x).double(), rtol=1e-5, atol=0)


# What has one of these sizes, over the whole range of its format; subnormal numbers are rounded before they are tokens.
EXTREME = {
    torch.float32: [1e-44, 1e-42, 1e-40, 1e-38, 1e-25, 1.0, 1e25, 3e37, 1e38],
    torch.bfloat16: [1e-39, 1e-38, 1e-25, 1.0, 1e25, 3e37, 1e38],
    torch.float64: [1e-307, 1e-300, 1e-160, 1.0, 1e160, 1e300, 2e306],
}
BEYOND = [1e-321, 1e-318, 1e-312]  # float64 tokens whose norms are subnormal
ACCURACY = {torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float64: 1e-12}


def tokens_of_size(size: float, dtype: torch.dtype, closeness: float = 0.5) -> Tensor:
    """Nine tokens with positive entries of about this size, at most 2.4 times as large."""
    noise = torch.rand(9, 6, generator=seeded(0), dtype=torch.float64)
    return ((1 + closeness * noise) * size).to(dtype)


def relative_error(found: Tensor, expected: np.longdouble) -> float:
    return float(abs(found.item() / expected - 1))


OF_NORMS = {  # made of ‖Π₁X‖ and ‖Π⊥X‖
    "token_similarity": (m.token_similarity, naive.similarity),
    "token_diversity": (m.token_diversity, naive.diversity),
    "largest_token_share": (
        m.largest_token_share,
        lambda x: (naive.lengths(x) ** 2).max() / naive.energy(x),
    ),
    "frobenius_norm": (m.frobenius_norm, lambda x: np.sqrt(naive.energy(x))),
}
RESCALED = {  # right for any finite tokens
    "composite_residual": (m.composite_residual, naive.composite),
    "effective_rank": (partial(m.effective_rank, exact=True), naive.effective_rank),
    "stable_rank": (m.stable_rank, lambda x: naive.singular_values(x)[0] ** -2),
    "cosine_similarity": (m.cosine_similarity, naive.mean_cosine),
    "direction_similarity": (
        lambda x, mask=None: m.direction_similarity(x, mask).similarity,
        lambda x: naive.similarity(naive.directions(x)),
    ),
}


@wide_double
@pytest.mark.parametrize("name", OF_NORMS | RESCALED)
@pytest.mark.parametrize(("dtype", "size"), [(dtype, size) for dtype, sizes in EXTREME.items() for size in sizes])
def test_the_promised_digits_at_any_size(name: str, dtype: torch.dtype, size: float):
    measure, oracle = (OF_NORMS | RESCALED)[name]
    x = tokens_of_size(size, dtype)
    expected = oracle(x.double().numpy().astype(np.longdouble))
    assert relative_error(measure(x), expected) < ACCURACY[dtype]
    padded = torch.cat([torch.full_like(x, torch.nan), x])
    mask = torch.arange(18) >= 9
    assert relative_error(measure(padded, mask), expected) < ACCURACY[dtype]


@wide_double
@pytest.mark.parametrize("size", BEYOND)
def test_float64_below_its_normal_numbers(size: float):
    """A norm is rounded to a multiple of 5e-324, and that is all: two norms make an error of two roundings."""
    x = tokens_of_size(size, torch.float64)
    exact = x.numpy().astype(np.longdouble)
    rounding = float(np.longdouble(5e-324) / np.sqrt(naive.energy(naive.split(exact)[1])))
    for measure, oracle in OF_NORMS.values():
        assert relative_error(measure(x), oracle(exact)) < 4 * rounding + 1e-15
    for measure, oracle in RESCALED.values():
        assert relative_error(measure(x), oracle(exact)) < 1e-12


@wide_double
def test_float64_beyond_the_largest_norm_is_nan_or_right():
    """‖X‖ is more than 1.8e308, which no float64 can hold."""
    x = tokens_of_size(8e307, torch.float64)
    assert x.isfinite().all()
    for name, (measure, _) in OF_NORMS.items():
        assert measure(x).isnan(), name
    for name, (measure, oracle) in RESCALED.items():
        assert relative_error(measure(x), oracle(x.numpy().astype(np.longdouble))) < 1e-12, name
    assert_close(m.growth(x / 2**20, x).diversity.item(), 2.0**40, rtol=1e-12, atol=0)  # ‖Π⊥X‖ can be held
    assert m.growth(x / 2**20, x).mean.isnan()
    assert m.escalation_rate(x / 2**20, x).isnan()


def test_a_rate_between_tokens_of_far_apart_sizes():
    """‖Π⊥X‖/‖Π⊥Y‖ alone would overflow."""
    x, y = tokens_of_size(1e300, torch.float64), tokens_of_size(1e-300, torch.float64, closeness=0.01)
    expected = m.token_diversity(x) / m.token_diversity(y)
    assert_close(m.escalation_rate(x, y), expected, rtol=1e-12, atol=0)
    assert m.growth(y, x).diversity.isnan()  # 1e1200 and more


@pytest.mark.parametrize(("dtype", "k"), [(torch.float32, 126), (torch.float32, -120), (torch.float64, 1022),
                                          (torch.float64, -1000)])  # fmt: skip
def test_composite_residual_at_the_ends_of_the_formats(dtype: torch.dtype, k: int):
    x = torch.randn(50, 7, generator=seeded(0), dtype=torch.float64).clamp(-1.9, 1.9).to(torch.bfloat16).to(dtype)
    scaled = torch.tensor(2.0, dtype=dtype) ** k * x
    assert scaled.isfinite().all()
    assert m.composite_residual(scaled) == m.composite_residual(x)


def test_one_sequence_of_an_extreme_size_leaves_the_others_bit_for_bit():
    x = torch.randn(3, 5, 4, generator=seeded(0))
    alone = m.token_diversity(x)
    x[1] *= 1e-40
    beside = m.token_diversity(x)
    assert beside[0] == alone[0]
    assert beside[2] == alone[2]
    assert beside[1] != alone[1]
    assert_close(beside[1], alone[1], rtol=1e-4, atol=0)  # 1e-40 is rounded to 5e-46, before it is measured
