"""What has no meaning is nan, what has one is a number: every measure, every degenerate input."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from depthscope import measures as m
from samples import seeded

TOKEN_MEASURES = {
    "token_similarity": m.token_similarity,
    "token_diversity": m.token_diversity,
    "cosine_similarity": m.cosine_similarity,
    "frequency_ratio": m.frequency_ratio,
    "direction_similarity": lambda x, mask=None: m.direction_similarity(x, mask).similarity,
    "frobenius_norm": m.frobenius_norm,
    "largest_token_share": m.largest_token_share,
    "effective_rank": m.effective_rank,
    "ordinary_rank": m.ordinary_rank,
    "largest_feature_share": lambda x, mask=None: m.largest_feature(x, mask).share,
    "effective_rank_exact": lambda x, mask=None: m.effective_rank(x, mask, exact=True),
    "stable_rank": m.stable_rank,
    "composite_mean": m.composite_residual,
}
ATTENTION_MEASURES = {
    "delta": m.delta,
    "second_eigenvalue": m.second_eigenvalue,
    "attention_entropy": m.attention_entropy,
}
ONE_TOKEN = dict.fromkeys(TOKEN_MEASURES, 1.0) | {
    "token_diversity": 0.0,
    "cosine_similarity": torch.nan,  # no pair
    "frequency_ratio": 0.0,
    "frobenius_norm": 5.0,
    "largest_feature_share": 0.64,
    "composite_mean": 0.0,
}


def all_nan(x: Tensor) -> bool:
    return bool(x.isnan().all())


@pytest.fixture(params=TOKEN_MEASURES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_one_token(name: str):
    value = TOKEN_MEASURES[name](torch.tensor([[3.0, 4.0]]))
    assert_close(value, torch.tensor(ONE_TOKEN[name], dtype=torch.float64), equal_nan=True)


def test_all_masked_is_nan(name: str):
    x = torch.randn(2, 5, 4, generator=seeded(0))
    assert all_nan(TOKEN_MEASURES[name](x, torch.zeros(2, 5)))


def test_zero_matrix_is_nan_but_has_a_norm(name: str):
    value = TOKEN_MEASURES[name](torch.zeros(3, 5, 4))
    assert (value == 0).all() if name == "frobenius_norm" else all_nan(value)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [0, 3])
def test_non_finite_entries_give_nan_for_their_sequence_alone(name: str, bad: float, where: int):
    x = torch.randn(2, 5, 4, generator=seeded(0))
    clean = TOKEN_MEASURES[name](x)
    x[1, where, 2] = bad
    value = TOKEN_MEASURES[name](x)
    assert value[0] == clean[0]
    assert value[1].isnan()


@pytest.mark.parametrize("left", [True, False], ids=["left-padded", "right-padded"])
def test_masked_equals_cropped_whatever_the_padding_holds(name: str, left: bool):
    x = torch.randn(2, 6, 4, generator=seeded(0), dtype=torch.float64)
    padding = torch.full((2, 3, 4), torch.nan, dtype=torch.float64)
    padded = torch.cat([padding, x] if left else [x, padding], dim=1)
    mask = torch.cat([torch.zeros(2, 3), torch.ones(2, 6)] if left else [torch.ones(2, 6), torch.zeros(2, 3)], dim=1)
    assert_close(TOKEN_MEASURES[name](padded, mask), TOKEN_MEASURES[name](x), rtol=1e-12, atol=1e-14)


def test_masked_equals_cropped_fails_for_the_mutant_that_ignores_the_mask(name: str):
    x = torch.randn(2, 6, 4, generator=seeded(0))
    value = TOKEN_MEASURES[name](torch.cat([x, torch.ones(2, 3, 4)], dim=1))
    with pytest.raises(AssertionError):
        assert_close(value, TOKEN_MEASURES[name](x), rtol=1e-12, atol=1e-14)


def test_leading_axes_are_batch_axes(name: str):
    x = torch.randn(2, 3, 6, 4, generator=seeded(0))
    whole = TOKEN_MEASURES[name](x)
    assert whole.shape == (2, 3)
    assert whole.dtype == torch.float64
    assert_close(whole[1, 2], TOKEN_MEASURES[name](x[1, 2]), rtol=1e-12, atol=1e-12)


def test_mean_removed_leaves_ratios_to_the_mean_undefined():
    """After de-escalation with τ = 1 the mean is rounding noise: ξ₁, ω, μ₁ are nan, not huge."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = (torch.randn(64, 32, generator=seeded(0), dtype=torch.float64) + 1).to(dtype)
        centred = (x.double() - x.double().mean(dim=0)).to(dtype)
        p = torch.softmax(torch.randn(64, 64, generator=seeded(1)), dim=-1)
        assert m.growth(centred, x).mean.isnan()
        assert m.growth(centred, x).diversity.isfinite()
        assert m.omega(p, centred).isnan()
        assert m.mu(p, centred).mean.isnan()
        assert m.frequency_ratio(centred).isnan()
        assert m.token_similarity(centred) < 1e-4
        assert m.growth(x, centred).mean < 1e-4  # the other way round it is a number


def test_equal_tokens_leave_ratios_to_the_diversity_undefined():
    equal, other = torch.ones(5, 3), torch.randn(5, 3, generator=seeded(0))
    assert m.growth(equal, other).diversity.isnan()
    assert m.growth(other, equal).diversity == 0
    assert m.escalation_rate(other, equal).isnan()
    assert m.escalation_rate(equal, other) == 0
    assert m.mu(torch.full((5, 5), 0.2), equal).diversity.isnan()


def test_zero_tokens_have_no_direction():
    x = torch.tensor([[1.0, 0.0], [0.0, 0.0], [2.0, 0.0]])
    assert m.cosine_similarity(x) == 1
    assert m.direction_similarity(x).similarity == 1
    assert not m.direction_similarity(x).outliers.any()
    assert m.cosine_similarity(x[:2]).isnan()


@pytest.mark.parametrize("measure", ATTENTION_MEASURES.values(), ids=ATTENTION_MEASURES)
def test_attention_measures(measure):
    p = torch.softmax(torch.randn(2, 5, 5, generator=seeded(0)), dim=-1)
    assert all_nan(measure(p, torch.zeros(2, 5)))
    clean = measure(p)
    p[1, 2, 3] = torch.nan
    assert measure(p)[0] == clean[0]
    assert measure(p)[1].isnan()


def test_attention_of_one_token():
    p = torch.ones(1, 1)
    assert m.delta(p) == 0
    assert m.second_eigenvalue(p).isnan()
    assert m.attention_entropy(p) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: m.token_similarity(torch.ones(3)), r"expected tokens \(…, n, d\)"),
        (lambda: m.token_similarity(torch.ones(0, 3)), "at least one token"),
        (lambda: m.token_similarity(torch.ones(2, 5, 3), torch.ones(2, 4)), "expected a mask of shape"),
        (lambda: m.growth(torch.ones(5, 3), torch.ones(4, 3)), "5 and 4 tokens"),
        (lambda: m.delta(torch.ones(5, 4)), r"expected attention matrices \(…, n, n\)"),
        (lambda: m.omega(torch.ones(5, 5), torch.ones(4, 3)), "over the tokens"),
        (lambda: m.energy_split(torch.ones(5, 3)), "several sequences"),
    ],
)
def test_bad_shapes_say_what_was_expected_and_what_came(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("tokens", [torch.ones(3, 2, dtype=torch.int64), [[1.0]]])
def test_only_floating_point_tensors(tokens):
    with pytest.raises(TypeError, match="expected a floating-point tensor"):
        m.token_similarity(tokens)


def test_an_empty_batch_gives_no_numbers(name: str):
    assert TOKEN_MEASURES[name](torch.zeros(0, 4, 3)).shape == (0,)


def test_large_finite_float32_entries_have_a_similarity():
    x = torch.randn(128, 4, generator=seeded(0))
    assert_close(m.token_similarity(x * 3e36), m.token_similarity(x), rtol=1e-5, atol=0)


def test_a_mask_is_not_stretched_over_the_tokens():
    with pytest.raises(ValueError, match="expected a mask"):
        m.token_similarity(torch.ones(2, 5, 3), torch.ones(2, 1))
