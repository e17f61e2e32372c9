"""The means: against their matrices, with padding, in pieces, in half precision, and their gradients."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from depthscope.models.token_means import decayed_sums
from depthscope.remedies import Ema, Full, Prefix, deescalate
from samples import seeded

FORMS = [Full(), Prefix(), Prefix(shrink=0.7), Ema(0.8), Ema(0.5, shrink=2.0)]
CAUSAL = FORMS[1:]
MASKS = {"all": [1] * 9, "right": [1] * 6 + [0] * 3, "left": [0] * 4 + [1] * 5, "hole": [1, 1, 0, 1, 1, 0, 0, 1, 1]}


def matrix(form: Any, real: list[int]) -> Tensor:
    """C of one sequence, entry by entry from the definition; zero rows for padding."""
    n = len(real)
    c = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        if not real[i]:
            continue
        if isinstance(form, Full):
            weights = {j: 1.0 for j in range(n) if real[j]}
        else:
            decay = form.decay if isinstance(form, Ema) else 1.0
            weights = {j: decay ** (i - j) for j in range(i + 1) if real[j]}
            if form.shrink is None and len(weights) == 1:
                continue  # the first token is left alone
        total = sum(weights.values()) + (getattr(form, "shrink", None) or 0.0)
        for j, weight in weights.items():
            c[i, j] = weight / total
    return c


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_equals_its_matrix(form: Any, mask: str):
    x = torch.randn(3, 9, 4, generator=seeded(0), dtype=torch.float64)
    expected = x - 0.6 * matrix(form, MASKS[mask]) @ x
    assert_close(deescalate(x, 0.6, torch.tensor(MASKS[mask]).expand(3, 9), mixing=form), expected, rtol=0, atol=1e-13)
    if mask == "all":
        assert_close(deescalate(x, 0.6, mixing=form), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("form", CAUSAL, ids=str)
def test_causal_matrices_are_lower_triangular_and_stochastic_unless_shrunk(form: Any):
    c = matrix(form, [1] * 9)
    assert torch.equal(c, c.tril())
    if form.shrink is None:  # then (I − τC)1 = (1 − τ)1 behind the first token: similarity is treated as in the paper
        equal = torch.ones(1, 9, 2, dtype=torch.float64)
        assert_close(deescalate(equal, 0.3, mixing=form)[:, 1:], 0.7 * equal[:, 1:])
        assert torch.equal(deescalate(equal, 0.3, mixing=form)[:, 0], equal[:, 0])
    else:
        assert (c.sum(dim=-1) < 1).all()


def test_tokens_can_be_left_out_of_the_mean_and_left_alone():
    x = torch.randn(2, 6, 3, generator=seeded(0), dtype=torch.float64)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])  # the second sequence starts at position 2
    y = deescalate(x, 1.0, mask, skip_in_mean=(0,), leave_alone=(1,))
    for row, start in ((0, 0), (1, 2)):
        mean = x[row, start + 1 :].mean(dim=0)
        assert torch.equal(y[row, start + 1], x[row, start + 1])
        assert torch.equal(y[row, :start], x[row, :start])
        assert_close(y[row, start], x[row, start] - mean)
        assert_close(y[row, start + 2 :], x[row, start + 2 :] - mean)
    prefix = deescalate(x, 1.0, mixing="prefix", skip_in_mean=(0,))
    assert torch.equal(prefix[:, :2], x[:, :2])  # nothing before the first, and the second is the first that counts
    assert_close(prefix[:, 2], x[:, 2] - x[:, 1:3].mean(dim=1))


@given(st.integers(1, 300), st.sampled_from([1.0, 0.99, 0.5]), st.sampled_from([2, 7, 64]))
def test_chunked_sums_equal_the_loop(n: int, decay: float, chunk: int):
    x = torch.randn(n, 2, generator=seeded(n), dtype=torch.float64)
    rows, total = [], torch.zeros(2, dtype=torch.float64)
    for row in x:
        total = decay * total + row
        rows.append(total)
    assert_close(decayed_sums(x, decay, chunk), torch.stack(rows), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", CAUSAL, ids=str)
def test_pieces_with_what_went_before_equal_the_whole(form: Any):
    x = torch.randn(2, 600, 3, generator=seeded(0), dtype=torch.float64)
    real = torch.rand(2, 600, generator=seeded(1)) > 0.2
    whole = form.mean(x, real)
    pieces, before = [], None
    for start, end in ((0, 1), (1, 90), (90, 91), (91, 600)):
        mean, before = form.running_mean(x[:, start:end], real[:, start:end], before)
        pieces.append(mean)
    assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradients(form: Any, mask: str):
    x = torch.randn(2, 9, 3, generator=seeded(0), dtype=torch.float64, requires_grad=True)
    tau = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64, requires_grad=True)
    real = torch.tensor(MASKS[mask]).expand(2, 9)
    assert torch.autograd.gradcheck(lambda x, tau: deescalate(x, tau, real, mixing=form), (x, tau))
    assert torch.autograd.gradgradcheck(lambda x: deescalate(x, 0.4, real, mixing=form), (x,))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_degenerate_sequences(form: Any):
    one = torch.randn(2, 1, 3, generator=seeded(0))
    none = one[:, :0]
    assert deescalate(none, mixing=form).shape == none.shape
    assert torch.equal(deescalate(one, mask=torch.zeros(2, 1), mixing=form), one)
    kept = {None: 1.0}.get(getattr(form, "shrink", 0.0), 1 - 0.5 / (1 + (getattr(form, "shrink", 0.0) or 0.0)))
    assert_close(deescalate(one, 0.5, mixing=form), kept * one)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_padding_may_hold_nan_and_sequences_do_not_mix(form: Any):
    x = torch.randn(2, 9, 4, generator=seeded(0))
    mask = torch.tensor([MASKS["right"], MASKS["left"]])
    dirty = torch.where(mask.bool().unsqueeze(-1), x, torch.nan)
    y = deescalate(dirty, 0.9, mask, mixing=form)
    assert torch.equal(y.isnan().any(dim=-1), mask == 0)
    alone = deescalate(x[:1, :6], 0.9, mixing=form)
    assert_close(y[:1, :6], alone)


@pytest.mark.parametrize("form", CAUSAL, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_in_float32_also_under_autocast(form: Any, dtype: torch.dtype):
    x = (1 + torch.randn(1, 500, 4, generator=seeded(0)) / 16).to(dtype)
    exact = form.mean(x.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        means = [form.mean(x), form.mean(x[:, :100]), form.mean(x, torch.ones(1, 500, dtype=torch.bool))]
    for mean in means:
        assert mean.dtype == torch.float32
        assert_close(mean.double(), exact[:, : mean.shape[1]], rtol=1e-5, atol=0)  # bfloat16 keeps 4e-3
    assert deescalate(x, mixing=form).dtype == dtype


def test_bad_values_are_refused():
    with pytest.raises(ValueError, match="decay between 0 and 1"):
        Ema(decay=1.0)
    with pytest.raises(ValueError, match="shrink above 0"):
        Prefix(shrink=0.0)
    with pytest.raises(ValueError, match="got 'suffix'"):
        deescalate(torch.zeros(1, 2, 3), mixing="suffix")
