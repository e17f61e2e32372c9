"""The forms of a sweep give the same numbers, held against 80-bit arithmetic on everything that tokens can be."""

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import depthscope
import long_double as naive
from depthscope import compiling
from depthscope.compiling import Compiled
from depthscope.measures import Scratch
from depthscope.models import BlockConfig, Encoder
from depthscope.probing.sweep import FIELDS, Kept, Sweeper, device, eager, kernel, loops
from samples import seeded

pytestmark = pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="long double is no wider than double here")
needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="the extra `fast` is not installed")

ALL = [True] * 6


def tokens(scale: float = 1.0, closeness: float | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Three sequences of six tokens of width 5, as they come or all but equal."""
    x = torch.randn(3, 6, 5, generator=seeded(0), dtype=torch.float64)
    if closeness is not None:
        x = x[:, :1] + closeness * x
    return (scale * x).to(dtype)


def changed(index: tuple[int, ...], factor: float) -> Tensor:
    x = tokens()
    x[index] *= factor
    return x


def filled(value: float, place: int = 2) -> Tensor:
    x = tokens()
    x[1, place] = value
    return x


HOLES = torch.tensor([[False, True, True, False, True, True], ALL, [True, False, True, True, True, False]])
CASES: dict[str, tuple[Tensor, Tensor | None]] = {
    "as they come": (tokens(), None),
    **{f"alike to 1e-{k}": (tokens(closeness=10.0**-k), None) for k in (1, 3, 5, 6, 7)},
    "equal": (tokens(closeness=0.0), None),
    "equal directions": (tokens(closeness=0.0) * torch.tensor([1.0, 2.0, 4.0, 0.5, 8.0, 1.0])[:, None], None),
    "one zero": (changed((1, 2), 0.0), None),
    "the first zero": (changed((1, 0), 0.0), None),
    "all zero": (changed((1,), 0.0), None),
    "one huge": (changed((1, 3), 1e6), None),
    "the first huge": (changed((1, 0), 1e4), None),
    "two huge": (changed((1, slice(0, 2)), 500.0), None),
    "one tiny": (changed((2, 1), 1e-20), None),
    **{f"of size {scale:.0e}": (tokens(scale), None) for scale in (1e-42, 1e-36, 1e-20, 1e15, 1e30, 1e37)},
    "nearly equal, of size 1e-36": (tokens(1e-36, 1e-2), None),
    "bfloat16": (tokens(dtype=torch.bfloat16), None),
    "float16": (tokens(dtype=torch.float16), None),
    "float64": (tokens(dtype=torch.float64), None),
    "a nan": (filled(torch.nan), None),
    "an infinity": (filled(torch.inf), None),
    "padded": (tokens(), HOLES),
    "padded, alike": (tokens(closeness=1e-6), HOLES),
    "padded with nan": (filled(torch.nan, 3), HOLES & torch.tensor([*ALL[:3], False, *ALL[:2]])),
    "padded, one huge": (changed((0, 1), 1e3), HOLES),
    "one sequence without a token": (tokens(), torch.tensor([ALL, [False] * 6, ALL])),
    "one token each": (tokens(), torch.tensor([[i == s + 1 for i in range(6)] for s in range(3)])),
    "a mask of numbers that hides nothing": (tokens(), torch.ones(3, 6, dtype=torch.long)),
    "a single token": (tokens()[:, :1], None),
    "a single token that is not real": (tokens()[:1, :1], torch.zeros(1, 1, dtype=torch.bool)),
    "a single number": (tokens()[:1, :1, :1], None),
    "a single feature": (tokens()[..., :1], None),
    "turned": (tokens().transpose(0, 1).contiguous().transpose(0, 1), None),
    "every second feature": (torch.randn(3, 6, 10, generator=seeded(4))[..., ::2], None),
    "with a gradient": (tokens().requires_grad_(), None),
    "many": (torch.randn(2, 300, 7, generator=seeded(3)) + 5, None),
}  # fmt: skip
FINE = {"kernel", "loops", "device"}  # sums in float64


def by_kernel(x: Tensor, real: Tensor | None, out: Tensor, before: Kept | None) -> Kept | None:
    return Sweeper().sweep(x, real, out, keep="here", before=before).kept


def by_eager(x: Tensor, real: Tensor | None, out: Tensor, before: Kept | None) -> Kept | None:
    sweeper = Sweeper()
    sweeper._compiled = None
    return sweeper.sweep(x, real, out, keep="here", before=before).kept


def by_loops(x: Tensor, real: Tensor | None, out: Tensor, before: Kept | None) -> Kept | None:
    if not kernel.can_sweep(x):
        return by_eager(x, real, out, before)
    kept, known = torch.empty(x.shape), None
    if before is not None:
        assert before.norms is not None
        known = before.tokens, before.norms
    with np.errstate(all="ignore"):
        norms = kernel.sweep(loops.sweep_rows, x, None if real is None else real != 0, out, kept, known)
    return Kept(kept, norms)


def on_device(x: Tensor, real: Tensor | None, out: Tensor, before: Kept | None) -> Kept | None:
    if x.dtype == torch.float64:
        return by_eager(x, real, out, before)
    units = None if before is None else (before.unit, before.has_direction)
    _, unit, directed = device.sweep(x, None if real is None else real != 0, out, units)
    return Kept(unit, directed=directed)


FORMS: dict[str, Callable[[Tensor, Tensor | None, Tensor, Kept | None], Kept | None]] = {
    "eager": by_eager,
    "loops": by_loops,
    "device": on_device,
}
ALL_FORMS = [*FORMS, pytest.param("kernel", marks=needs_numba)]


def numbers_of(rows: np.ndarray) -> tuple[float, np.longdouble, np.longdouble]:
    """Their number, ‖Π₁X‖ and ‖Π⊥X‖."""
    if not len(rows):
        return 0.0, naive.NAN, naive.NAN
    mean, rest = naive.split(rows)
    return float(len(rows)), np.sqrt(naive.energy(mean)), np.sqrt(naive.energy(rest))


def check(out: Tensor, x: Tensor, real: Tensor | None, eps: float) -> None:
    """The fields of every sequence. Differences keep five digits in float32, twelve in float64; means and unit tokens
    are rounded, to some ε of the whole."""
    digits = 1e-5 if eps > 1e-9 else 1e-12
    for sample in range(len(x)):
        rows = x[sample].detach().double().numpy().astype(np.longdouble)
        rows = rows if real is None else rows[(real[sample] != 0).numpy()]
        found = dict(zip(FIELDS, out[:, sample].tolist(), strict=True))
        with np.errstate(invalid="ignore"):
            if not np.isfinite(rows).all():
                assert np.isnan(found["norms.deviation_norm"])
                assert np.isnan(found["directions.deviation_norm"])
                np.testing.assert_equal(found["largest_norm"], float(naive.lengths(rows).max()))
                continue
            units = naive.directions(rows), naive.directions(rows[~naive.outliers(rows)])
        for name, part, absolute in (("norms", rows, 0.0), ("directions", units[0], 1.0), ("ordinary", units[1], 1.0)):
            count, mean, rest = numbers_of(part)
            assert found[f"{name}.count"] == count
            noise = 4 * eps * np.sqrt(max(count, 1.0))
            size = np.sqrt(naive.energy(part)) if count else np.longdouble(1)
            for field, expected, error in (
                ("mean_norm", mean, digits * mean + noise * size),
                ("deviation_norm", rest, digits * rest + absolute * noise * size),
            ):
                value = found[f"{name}.{field}"]
                assert np.isnan(value) if np.isnan(expected) else abs(value - expected) <= error, (sample, name, field)
        largest = naive.lengths(rows).max() if len(rows) else 0.0
        assert abs(found["largest_norm"] - largest) <= digits * largest
        assert found["outliers"] == naive.outliers(rows).sum()


@pytest.mark.parametrize("form", ALL_FORMS)
@pytest.mark.parametrize("name", CASES)
def test_every_form_says_what_long_double_says(form: str, name: str):
    x, real = CASES[name]
    out = torch.empty(len(FIELDS), len(x), dtype=torch.float64)
    kept = FORMS.get(form, by_kernel)(x, real, out, None)
    is_double = x.dtype == torch.float64
    check(out, x, real, 2.0**-50 if form in FINE or is_double else torch.finfo(torch.float32).eps)
    assert out[FIELDS.index("turn")].isnan().all()
    assert kept is not None


@pytest.mark.parametrize("form", ALL_FORMS)
@pytest.mark.parametrize("closeness", [1.0, 1e-3, 1e-6, 0.0])
def test_the_angle_to_the_tokens_before(form: str, closeness: float):
    x = tokens()
    y = (x + closeness * torch.randn(x.shape, generator=seeded(9))).requires_grad_()
    x[0, 1], sweep = 0.0, FORMS.get(form, by_kernel)
    out = torch.empty(len(FIELDS), 3, dtype=torch.float64)
    before = sweep(x, HOLES, out, None)
    sweep(y, None, out, before)
    eps = 2.0**-50 if form in FINE else torch.finfo(torch.float32).eps
    for sample in range(3):
        both = HOLES[sample].numpy()
        a, b = (z[sample].detach().double().numpy().astype(np.longdouble)[both] for z in (x, y))
        expected = naive.angles(a, b).mean()
        assert abs(out[-1, sample].item() - expected) <= 8 * eps + (1e-5 if eps > 1e-9 else 1e-12) * expected


@pytest.mark.parametrize("form", ALL_FORMS)
def test_equal_tokens_differ_by_exactly_nothing(form: str):
    """Whatever their number and width, which decide how sums are vectorised."""
    generator = seeded(1)
    for n, d in ((2, 1), (3, 8), (5, 16), (17, 33), (4, 64)):
        x = (torch.randn(2, 1, d, generator=generator) * 7.7).expand(-1, n, -1).contiguous()
        out = torch.empty(len(FIELDS), 2, dtype=torch.float64)
        before = FORMS.get(form, by_kernel)(x, None, out, None)
        FORMS.get(form, by_kernel)(x.clone(), None, out, before)
        assert out[FIELDS.index("turn")].tolist() == [0.0, 0.0]
        assert out[FIELDS.index("norms.deviation_norm")].tolist() == [0.0, 0.0]
        assert out[FIELDS.index("directions.deviation_norm")].tolist() == [0.0, 0.0]


def test_a_form_that_subtracts_squares_would_be_found():
    x = tokens(closeness=1e-6)
    out = torch.empty(len(FIELDS), 3, dtype=torch.float64)
    on_device(x, None, out, None)
    check(out, x, None, 2.0**-50)
    y = x.double()
    out[2] = (y.square().sum(dim=(1, 2)) - 6 * y.mean(dim=1).square().sum(dim=-1)).clamp(min=0).sqrt()
    with pytest.raises(AssertionError):
        check(out, x, None, 2.0**-50)


def test_extreme_tokens_are_left_to_the_exact_form():
    ordinary, extreme = Sweeper(), Sweeper()
    ordinary._compiled = extreme._compiled = None
    out = torch.empty(len(FIELDS), 3, dtype=torch.float64)
    ordinary.sweep(tokens(), HOLES, out)
    extreme.sweep(tokens(1e-36), None, out)
    assert (list(ordinary.forms), list(extreme.forms)) == (["eager"], ["exact"])


def test_what_one_form_has_kept_another_can_compare():
    x, y = tokens(), tokens() + 1
    angles = []
    for first in ("loops", "eager", "device"):
        out = torch.empty(len(FIELDS), 3, dtype=torch.float64)
        kept = FORMS[first](x, HOLES, out, None)
        by_eager(y, None, out, kept)
        angles.append(out[-1].clone())
    torch.testing.assert_close(angles[0], angles[1], rtol=1e-6, atol=0)
    torch.testing.assert_close(angles[0], angles[2], rtol=1e-6, atol=0)


class Large(TorchDispatchMode):
    """Counts the operations that read or write something of the size of the tokens."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = [*args, *(kwargs or {}).values(), result]
        works = "detach" not in function.name() and "slice" not in function.name()
        self.count += works and any(isinstance(item, Tensor) and item.numel() >= self.size for item in given)
        return result


@pytest.mark.parametrize(("compares", "most"), [(False, 10), (True, 12)])
def test_the_eager_form_takes_a_dozen_operations_of_the_size_of_the_tokens(compares: bool, most: int):
    x, out, scratch = tokens(), torch.empty(len(FIELDS), 3, dtype=torch.float64), Scratch()
    for buffer in ("b", "a"):
        _, unit, _ = eager.sweep(x, None, out, scratch, buffer, None)
    with torch.no_grad(), Large(x.numel()) as large:
        eager.sweep(x, None, out, scratch, "b", (unit, None) if compares else None)
    assert large.count == most


# --- in a profile --------------------------------------------------------------------------------------


class Questions(TorchDispatchMode):
    """Counts what one waits for a GPU for: a number or a row of them, wanted on the host, or a choice by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), options: Any = None) -> Any:
        self.asked += function.name().split(".")[0] in {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"}
        return function(*args, **(options or {}))


@pytest.mark.parametrize("depth", [2, 5])
def test_a_gpu_is_asked_once_in_a_pass_and_once_for_the_weights(depth: int, monkeypatch: pytest.MonkeyPatch):
    """As docs/benchmarks.md says. The form for a GPU stands here in the place of the CPU's."""
    for form, there in ((kernel, False), (eager, False), (device, True)):
        monkeypatch.setattr(form, "can_sweep", lambda _tokens, there=there: there)
    fetched, fetch = [], Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda rows: (fetched.append(rows), fetch(rows))[1])
    model = Encoder(depth, BlockConfig(16, 2), generator=seeded(0)).eval()
    with Questions() as default:
        found = depthscope.probe(model, torch.randn(2, 5, 16, generator=seeded(1)), causal=False)
    assert found.metadata["arithmetic"] == ["device"]
    assert (len(fetched), default.asked) == (1, 1)
    with Questions() as every:
        depthscope.probe(model, torch.randn(2, 5, 16, generator=seeded(1)), causal=False, measures="verdict")
    assert every.asked > 5 * depth


def profile(**options: object) -> depthscope.Profile:
    model = Encoder(3, BlockConfig(16, 2), generator=seeded(0))
    x = torch.randn(2, 9, 16, generator=seeded(1))
    x[0, 4] *= 60
    return depthscope.probe(model, x, **options)


@needs_numba
@pytest.mark.parametrize(
    "options", [{}, {"stations": "trunk"}, {"exclude_tokens": "outliers"}, {"exclude_tokens": [0]}]
)
def test_a_profile_is_the_same_with_and_without_numba(options: dict, monkeypatch: pytest.MonkeyPatch):
    fast = profile(**options)
    monkeypatch.setenv("DEPTHSCOPE_KERNEL", "off")
    plain = profile(**options)
    assert fast.metadata["arithmetic"] == ["kernel"]
    assert "kernel" not in plain.metadata["arithmetic"]
    columns = ["block", "station", "head", "measure", "sample"]
    assert fast.frame[columns].equals(plain.frame[columns])
    np.testing.assert_allclose(fast.frame["value"], plain.frame["value"], rtol=2e-5, atol=1e-6)
    assert fast.sinks.drop(columns="norm_ratio").equals(plain.sinks.drop(columns="norm_ratio"))
    np.testing.assert_allclose(fast.sinks["norm_ratio"], plain.sinks["norm_ratio"], rtol=1e-5)


def test_a_numba_that_does_not_work_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel, "_compiled", lambda: Compiled(None, "ImportError: needs another NumPy"))
    monkeypatch.setenv("DEPTHSCOPE_KERNEL", "on")
    found = profile()
    assert any("needs another NumPy" in note for note in found.metadata["notes"])
    assert "kernel" not in found.metadata["arithmetic"]


@pytest.mark.parametrize("value", ["off", "OFF", "0", "no", "False "])
def test_the_kernel_can_be_refused(value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEPTHSCOPE_KERNEL", value)
    assert kernel.kernel() == Compiled(None)


def test_the_kernel_is_asked_for_by_tokens_that_it_can_read(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(kernel, "kernel", lambda: asked.append(1) or Compiled(None))
    out, sweeper = torch.empty(len(FIELDS), 3, dtype=torch.float64), Sweeper()
    sweeper.sweep(tokens(dtype=torch.float64), None, out)
    assert not asked
    sweeper.sweep(tokens(), None, out)
    assert asked == [1]


@needs_numba
def test_threads_share_a_large_sweep(monkeypatch: pytest.MonkeyPatch):
    found = []
    for worth in (compiling.WORTH_A_THREAD, 1):
        monkeypatch.setattr(compiling, "WORTH_A_THREAD", worth)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
        found.append(torch.empty(len(FIELDS), 3, dtype=torch.float64))
        by_kernel(tokens(), HOLES, found[-1], None)
    assert torch.equal(found[0].nan_to_num(), found[1].nan_to_num())
