"""One sweep over the rows, against the matrix: on every kind of attention, in tiles, with padding, under a sink."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from depthscope import measures as m
from depthscope.measures import MEASURES, HeadInput, operators
from depthscope.measures.attention_spectra import SWEEPS
from depthscope.measures.sweeps import largest_logit, row_peaks, survey
from samples import seeded

N = 70


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "TILE", 20 * N)
    monkeypatch.setattr(operators, "STREAMED", 0)


def head(kind: str) -> tuple[m.ScoredAttention, Tensor | None]:
    """Scores and masks of many kinds; what is added to scores may be −inf, or the least number there is."""
    q, k = 2 * torch.randn(2, 2, N, 8, generator=seeded(0))
    real = torch.ones(2, N, dtype=torch.bool)
    if kind == "padded":
        real[0, :25], real[1, 60:] = False, False
        return m.ScoredAttention(q, k, 0.5, real[:, None, :].expand(2, N, N)), real
    if kind == "sink":
        q[..., 0], k[..., 0], k[:, 0, 0] = 1.0, 0.0, 60.0
    added = {
        "added": torch.randn(2, N, N, generator=seeded(1)).masked_fill(
            torch.rand(N, N, generator=seeded(2)) < 0.4, -1e38
        ),
        "far": torch.where(torch.arange(N) == 3, 90.0, 0.0).expand(2, N, N),
    }
    return m.ScoredAttention(q, k, 0.5, added.get(kind), causal=kind in ("causal", "sink")), None


KINDS = ("full", "causal", "padded", "sink", "added", "far")


@pytest.mark.parametrize("kind", KINDS)
def test_a_survey_is_what_the_matrix_says(kind: str):
    operator, real = head(kind)
    found, dense = survey(operator, real), operator.dense().double()
    rows = torch.ones(2, N, dtype=torch.bool) if real is None else real
    for sample in range(2):
        p = dense[sample][rows[sample]][:, rows[sample]]
        centred = p - p.mean(dim=0)
        assert_close(found.mean_row[sample][rows[sample]], p.mean(dim=0), rtol=1e-6, atol=6e-8 * float(p.max()))
        assert_close(found.spread[sample], torch.linalg.matrix_norm(centred), rtol=2e-5, atol=0)
        entropy = torch.special.entr(p).sum(dim=-1).mean()
        assert_close(found.entropy[sample], entropy, rtol=2e-6, atol=1e-9)
        assert_close(found.diagonal[sample][rows[sample]], p.diagonal(), rtol=1e-6, atol=0)
        assert bool(found.triangular[sample]) == (kind in ("causal", "sink"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_logit_is_that_of_the_scores(kind: str, monkeypatch: pytest.MonkeyPatch):
    operator, real = head(kind)
    scores = operator.query.double() @ operator.key.double().mT * operator.scale
    if operator.mask is not None:
        masked = operator.mask.dtype == torch.bool
        scores = scores.masked_fill(~operator.mask, -torch.inf) if masked else scores + operator.mask
    if operator.causal:
        scores = scores.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -torch.inf)
    rows = torch.ones(2, N, dtype=torch.bool) if real is None else real
    expected = torch.stack([scores[sample][rows[sample]].max() for sample in range(2)])
    for limit, given in (
        (0, {"attention": lambda: operator, "scores": lambda: None}),  # streamed
        (2**24, {"attention": lambda: operator, "scores": lambda: None}),
        (2**24, {"matrix": operator.dense, "scores": lambda: scores.float()}),  # of an eager softmax
    ):
        monkeypatch.setattr(operators, "STREAMED", limit)
        value = MEASURES["largest_logit"].compute(HeadInput({**given, "real": lambda: real}))
        assert_close(value, expected, rtol=1e-5, atol=0)
    assert_close(m.first_token(operator, real).largest_logit, expected, rtol=1e-5, atol=0)
    if kind in ("causal", "padded", "added"):  # a mutant that forgets where a query may not look, or padding
        forgetful = (operator.query @ operator.key.mT * operator.scale).amax(dim=(-2, -1)).double()
        with pytest.raises(AssertionError):
            assert_close(forgetful, expected, rtol=1e-5, atol=0)


def test_a_matrix_alone_has_no_logit_and_a_row_without_keys_none_either():
    alone = m.DenseAttention(torch.eye(3)[None])
    assert row_peaks(alone) is None
    given = HeadInput({"attention": lambda: alone, "scores": lambda: None, "real": lambda: None})
    with pytest.raises(ValueError, match="expected the scores"):
        MEASURES["largest_logit"].compute(given)
    nowhere = m.ScoredAttention(*torch.ones(2, 1, 3, 2), 1.0, torch.zeros(1, 3, 3, dtype=torch.bool))
    assert largest_logit(nowhere.peaks()).isnan()


def test_cross_attention_has_an_entropy_and_a_logit():
    q, k = torch.randn(1, N, 4, generator=seeded(3)), torch.randn(1, 9, 4, generator=seeded(4))
    operator = m.ScoredAttention(q, k, 1.0)
    found = survey(operator)
    assert_close(found.entropy, m.attention_entropy(operator.dense()), rtol=1e-6, atol=0)
    assert found.peaks is not None
    assert_close(found.peaks, (q @ k.mT).amax(dim=-1), rtol=1e-6, atol=0)


def test_measures_of_a_head_share_one_survey(monkeypatch: pytest.MonkeyPatch):
    """Entropy, sinks, the logit and a causal |λ₂| together take one sweep, δ no further survey."""
    taken = []
    tiles = m.ScoredAttention.tiles
    monkeypatch.setattr(m.ScoredAttention, "tiles", lambda self: taken.append(1) or tiles(self))
    operator, _ = head("causal")
    sinks = torch.arange(N).expand(2, N) == 0
    given = HeadInput(
        {"attention": lambda: operator, "scores": lambda: None, "sinks": lambda: sinks, "real": lambda: None}
    )
    found = {}
    for name in ("attention_entropy", "sink_attention", "largest_logit", "second_eigenvalue"):
        measure = MEASURES[name]
        found[name] = measure.compute(given.only(measure.needs))
    assert len(taken) == 1
    assert_close(found["sink_attention"], operator.dense()[..., 0].double().mean(dim=-1), rtol=1e-6, atol=0)
    MEASURES["delta"].compute(given.only(MEASURES["delta"].needs))
    assert len(taken) <= 10


@pytest.mark.parametrize("causal", [False, True])
def test_a_long_sequence_of_few_real_tokens_is_measured_by_its_matrix(causal: bool, monkeypatch: pytest.MonkeyPatch):
    """A Krylov space of more dimensions than there are tokens goes on with noise: |λ₂| of 200 was seen."""
    monkeypatch.setattr(operators, "TILE", 2**14)
    n, counts = 300, (1, 2, 3, 12, 17, 33, 100, 176, 300)
    real = torch.arange(n) < torch.tensor(counts)[:, None]
    real[4] = real[4].flip(0)  # padding on the left
    q, k = 2 * torch.randn(2, len(counts), n, 8, generator=seeded(5))
    looks = real[:, None, :].expand(-1, n, n)
    operator = m.ScoredAttention(q, k, 0.5, looks & torch.ones(n, n, dtype=torch.bool).tril() if causal else looks)
    taken: list[int] = []
    tiles = m.ScoredAttention.tiles
    monkeypatch.setattr(m.ScoredAttention, "tiles", lambda self: taken.append(1) or tiles(self))
    for fast, dense in ((m.bounded_delta, m.delta), (m.bounded_second_eigenvalue, m.second_eigenvalue)):
        taken.clear()
        found = fast(operator, real)
        assert len(taken) <= SWEEPS
        # Above 176 tokens a space does it: |λ₂| is then known to its bound, which is some 1e-4.
        assert_close(found.value[:-1], dense(operator.dense(), real)[:-1], rtol=1e-5, atol=1e-9, equal_nan=True)
        assert_close(found.value[-1], dense(operator.dense(), real)[-1], rtol=0, atol=1e-3)
        assert bool((found.error[1:-1] <= 1e-4).all())


@pytest.mark.parametrize("causal", [False, True])
def test_the_entropy_is_of_whole_rows_where_a_model_looks_at_padding(causal: bool):
    """A mask that the user tells, and the model has not heard of."""
    q, k = 2 * torch.randn(2, 2, N, 8, generator=seeded(6))
    real = torch.arange(N) >= torch.tensor([25, 0])[:, None]
    operator = m.ScoredAttention(q, k, 0.5, causal=causal)
    expected = m.attention_entropy(operator.dense(), real)
    for given in (operator, m.DenseAttention(operator.dense())):
        assert_close(survey(given, real).entropy, expected, rtol=2e-6, atol=0)
