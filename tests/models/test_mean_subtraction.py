"""X − τ·mean as one operation: against the means written out, both ways, and under everything that looks on."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from depthscope.models import mean_subtraction
from depthscope.models.mean_subtraction import without_mean
from depthscope.models.token_means import Ema, Full, Prefix
from samples import seeded

FORMS = [Full(), Prefix(), Prefix(shrink=0.7), Ema(0.9), Ema(0.5, shrink=2.0)]


def written_out(x: Tensor, tau: float, mean: Any) -> Tensor:
    """The definition, in the operations of `token_means.py`, which `test_token_means.py` holds to their matrices."""
    return x - tau * mean.mean(x)


def both_ways(change: Any, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = change(x)
    return y.detach(), torch.autograd.grad(y, x, gradient)[0]


@given(st.integers(1, 150), st.integers(1, 3), st.sampled_from([1, 5, 900]), st.sampled_from(FORMS))
def test_equals_the_definition_and_its_gradient(n: int, batch: int, width: int, mean: Any):
    x, g = torch.randn(2, batch, n, width, generator=seeded(n), dtype=torch.float64)
    found = both_ways(lambda x: without_mean(x, 0.7, mean), x, g)
    expected = both_ways(lambda x: written_out(x, 0.7, mean), x, g)
    assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_plan_without_its_totals_is_found_wrong(monkeypatch: pytest.MonkeyPatch):
    """The mutant of the test above: a stretch that knows nothing of those before it."""
    x = torch.randn(1, 150, 900, generator=seeded(0), dtype=torch.float64)
    made = mean_subtraction._make_plan

    def forgets(*given: Any) -> Any:
        return [stretch._replace(takes=0 * stretch.takes) for stretch in made(*given)]

    monkeypatch.setattr(mean_subtraction, "_make_plan", forgets)
    monkeypatch.setattr(mean_subtraction, "_plans", type(mean_subtraction._plans)())
    with pytest.raises(AssertionError):
        assert_close(without_mean(x, 0.7, Prefix()), written_out(x, 0.7, Prefix()))


@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("mean", FORMS, ids=str)
def test_in_float32_it_is_as_exact_as_the_definition_written_out(mean: Any, spread: float):
    """At every degree of collapse: the largest error is at most twice that of the form written out."""
    x = torch.randn(1, 1, 96, generator=seeded(0)) + spread * torch.randn(4, 300, 96, generator=seeded(1))
    exact = written_out(x.double(), 1.0, mean)
    ours, naive = ((change(x, 1.0, mean).double() - exact).abs().max().item() for change in (without_mean, written_out))
    assert ours <= 2 * naive


@pytest.mark.parametrize(("mean", "expected"), [(Full(), "aten.sub.Tensor"), (Prefix(), "aten.bmm.default")], ids=str)
def test_who_looks_on_at_operations_sees_them(mean: Any, expected: str):
    """A graph made of what is seen must be whole."""
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x = torch.randn(2, 40, 3, generator=seeded(0))
    with Seen():
        found = without_mean(x, 0.6, mean)
    assert expected in seen
    assert_close(found, written_out(x, 0.6, mean))


@pytest.mark.parametrize("mean", FORMS, ids=str)
def test_derivatives_of_every_kind(mean: Any):
    x = torch.randn(2, 40, 3, generator=seeded(0), dtype=torch.float64, requires_grad=True)

    def change(x: Tensor) -> Tensor:
        return without_mean(x, 0.6, mean)

    assert torch.autograd.gradcheck(change, x, check_forward_ad=True, check_batched_grad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(change, x, fast_mode=True)


@pytest.mark.parametrize("mean", FORMS, ids=str)
def test_torch_func_sees_the_same_operation(mean: Any):
    x = torch.randn(3, 2, 30, 4, generator=seeded(0), dtype=torch.float64)

    def change(x: Tensor) -> Tensor:
        return without_mean(x, 0.6, mean)

    expected = written_out(x, 0.6, mean)
    assert_close(torch.func.vmap(change)(x), expected)
    assert_close(torch.func.jvp(change, (x,), (x,))[1], expected)
    small = x[0, 0]
    assert_close(torch.func.jacrev(change)(small), torch.func.jacfwd(lambda x: written_out(x, 0.6, mean))(small))
    assert_close(change(x), expected)  # nothing of a transform has been kept


@pytest.mark.parametrize("mean", FORMS[:2], ids=str)
def test_compiled_it_is_one_graph(mean: Any):
    x, g = torch.randn(2, 2, 40, 3, generator=seeded(0))
    compiled = torch.compile(lambda x: without_mean(x, 0.6, mean), fullgraph=True, backend="aot_eager")
    assert_close(both_ways(compiled, x, g), both_ways(lambda x: written_out(x, 0.6, mean), x, g))


def test_what_was_kept_in_inference_serves_a_pass_with_a_gradient():
    mean, x = Ema(0.123), torch.randn(2, 40, 3, generator=seeded(0))
    with torch.inference_mode():
        first = without_mean(x, 0.6, mean)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):  # neither has a say in the sums
        again, gradient = both_ways(lambda x: without_mean(x, 0.6, mean), x, x)
    assert torch.equal(first, again)
    assert gradient.dtype == torch.float32


@pytest.mark.parametrize("mean", FORMS, ids=str)
def test_no_tensor_is_kept_for_the_backward_pass(mean: Any):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        without_mean(torch.randn(2, 40, 3, requires_grad=True), 0.6, mean)
    assert not kept


@pytest.mark.parametrize("mean", FORMS, ids=str)
def test_layouts_and_empty_batches(mean: Any):
    x = torch.randn(40, 2, 3, generator=seeded(0)).transpose(0, 1)  # tokens first in memory
    assert_close(without_mean(x, 0.6, mean), written_out(x, 0.6, mean))
    for shape in ((0, 5, 3), (2, 0, 3), (2, 5, 0)):
        assert without_mean(torch.zeros(shape), 0.6, mean).shape == shape


@pytest.mark.parametrize("mean", FORMS, ids=str)
def test_a_model_may_add_to_the_result_in_place(mean: Any):
    x = torch.randn(2, 40, 3, generator=seeded(0), dtype=torch.float64)

    def added(x: Tensor) -> Tensor:
        y = without_mean(x, 0.6, mean)
        y += x.sin()
        return y

    found, expected = both_ways(added, x, x), both_ways(lambda x: written_out(x, 0.6, mean) + x.sin(), x, x)
    assert_close(found, expected, rtol=1e-12, atol=1e-12)
