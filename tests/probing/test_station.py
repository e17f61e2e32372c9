"""What a station keeps of its tokens, finished: held against 80-bit arithmetic on everything that tokens can be."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import depthscope
import long_double as naive
from depthscope.measures import Scratch
from depthscope.probing.finish import FIELDS, TOGETHER, Looks, numbers_of
from depthscope.probing.station import Look, look
from samples import seeded

pytestmark = pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="long double is no wider than double here")
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


def looked_at(x: Tensor, real: Tensor | None = None, before: Look | None = None, *, wide: bool = False) -> Look:
    return look(x, real, Scratch(), keep="unit", before=before, wide=wide)


def fields_of(x: Tensor, real: Tensor | None = None, *, wide: bool | None = None) -> Tensor:
    """(fields, batch), as a probe has them: of a more careful look where the first asks for it, or of a wide one."""
    out = numbers_of([looked_at(x, real, wide=bool(wide))])[:, 0]
    if wide is None and out[FIELDS.index("unexpected")].any():
        out = numbers_of([look(x, real, Scratch(), outliers=True)])[:, 0]
    if wide is None and out[FIELDS.index("doubt")].any():
        out = numbers_of([looked_at(x, real, wide=True)])[:, 0]
    return out


def split_of(rows: np.ndarray) -> tuple[float, np.longdouble, np.longdouble]:
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
            count, mean, rest = split_of(part)
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


@pytest.mark.parametrize("wide", [None, True])
@pytest.mark.parametrize("name", CASES)
def test_what_is_kept_says_what_long_double_says(wide: bool | None, name: str):
    x, real = CASES[name]
    out = fields_of(x, real, wide=wide)
    check(out, x, real, 2.0**-50 if wide or x.dtype == torch.float64 else torch.finfo(torch.float32).eps)
    assert out[FIELDS.index("turn")].isnan().all()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("closeness", [1.0, 1e-3, 1e-6, 0.0])
def test_the_angle_to_the_tokens_before(wide: bool, closeness: float):
    x = tokens()
    y = (x + closeness * torch.randn(x.shape, generator=seeded(9))).requires_grad_()
    if wide:
        x[0, 1] = 0.0
    out = numbers_of([looked_at(y, None, looked_at(x, HOLES, wide=wide), wide=wide)])[:, 0]
    eps = 2.0**-50 if wide else torch.finfo(torch.float32).eps
    for sample in range(3):
        both = HOLES[sample].numpy()
        a, b = (z[sample].detach().double().numpy().astype(np.longdouble)[both] for z in (x, y))
        expected = naive.angles(a, b).mean()
        found = out[FIELDS.index("turn"), sample].item()
        assert abs(found - expected) <= 8 * eps + (1e-5 if eps > 1e-9 else 1e-12) * expected


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("real", [None, torch.tensor([[False, True], [True, True]])])
def test_equal_tokens_differ_by_exactly_nothing(wide: bool, real: Tensor | None):
    """Whatever their number and width, which decide how sums are vectorised."""
    generator = seeded(1)
    for n, d in ((2, 1), (3, 8), (5, 16), (17, 33), (4, 64)):
        x = (torch.randn(2, 1, d, generator=generator) * 7.7).expand(-1, n, -1).contiguous()
        mask = None if real is None else real.repeat_interleave(n - 1, dim=1)[:, :n]
        before = looked_at(x, mask, wide=wide)
        out = dict(zip(FIELDS, numbers_of([looked_at(x.clone(), mask, before, wide=wide)])[:, 0], strict=True))
        zeros = ["turn", "norms.deviation_norm", "directions.deviation_norm", "ordinary.deviation_norm"]
        assert [out[name].tolist() for name in zeros] == [[0.0, 0.0]] * 4


def test_a_form_that_subtracts_squares_would_be_found():
    x = tokens(closeness=1e-6)
    out = fields_of(x, wide=True)
    check(out, x, None, 2.0**-50)
    y = x.double()
    out[2] = (y.square().sum(dim=(1, 2)) - 6 * y.mean(dim=1).square().sum(dim=-1)).clamp(min=0).sqrt()
    with pytest.raises(AssertionError):
        check(out, x, None, 2.0**-50)


def test_what_float32_cannot_hold_is_in_doubt():
    def is_doubtful(x: Tensor, real: Tensor | None = None) -> bool:
        return bool(numbers_of([looked_at(x, real)])[FIELDS.index("doubt")].any())

    assert not is_doubtful(tokens(), HOLES)
    assert not is_doubtful(tokens(closeness=0.0))
    assert not is_doubtful(tokens()[:, :1])
    assert all(map(is_doubtful, (tokens(1e-36), tokens(1e30), changed((1, 2), 0.0), filled(torch.nan))))
    assert is_doubtful(tokens() - tokens().mean(dim=1, keepdim=True))


def test_many_looks_are_finished_some_at_a_time():
    every = [torch.randn(2, 5, 4, generator=seeded(i)) for i in range(2 * TOGETHER + 3)]
    looks = Looks(looked_at(every[0]))
    assert [looks.add(looked_at(x)) for x in every] == list(range(len(every)))
    torch.testing.assert_close(looks.numbers(), numbers_of([looked_at(x) for x in every]), equal_nan=True)


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


@pytest.mark.parametrize(("compares", "most"), [(False, 11), (True, 13)])
def test_a_look_takes_a_dozen_operations_of_the_size_of_the_tokens(compares: bool, most: int):
    x, scratch = torch.randn(3, 60, 50, generator=seeded(0)), Scratch()
    before = look(x, None, scratch, keep="a")
    look(x, None, scratch, keep="b")
    with torch.no_grad(), Large(x.numel()) as large:
        look(x, None, scratch, keep="b", before=before if compares else None)
    assert large.count <= most


# --- in a profile --------------------------------------------------------------------------------------


def test_a_pass_in_doubt_is_repeated_and_nothing_is_reported_twice():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16, bias=False)) for _ in range(3)))
    for layer in model:
        nn.init.eye_(layer[0].weight)
    x, ticks = torch.randn(2, 9, 16, generator=seeded(1)), []
    usual = depthscope.probe(model, x, measures=["light", "effective_rank"])
    small = depthscope.probe(model, 1e-30 * x, measures=["light", "effective_rank"], progress=lambda: ticks.append(1))
    assert (usual.metadata["arithmetic"], small.metadata["arithmetic"]) == (["float32"], ["float64"])
    assert len(ticks) == 3
    assert small.metadata["samples"] == 2
    free = ~usual.frame["measure"].isin(["frobenius_norm"])
    columns = ["block", "station", "head", "measure", "sample"]
    assert usual.frame[columns].equals(small.frame[columns])
    np.testing.assert_allclose(usual.frame["value"][free], small.frame["value"][free], rtol=1e-5, atol=1e-7)
