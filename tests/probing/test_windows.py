"""`probe(window=…)` against sequences that are cut by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import depthscope
from depthscope import measures as m
from depthscope.models import BlockConfig, Encoder
from samples import seeded

WINDOW, BATCH, N, WIDTH = 5, 2, 13, 16


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(2, BlockConfig(WIDTH, 2), generator=seeded(0)).eval()


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randn(BATCH, N, WIDTH, generator=seeded(1))


def outputs(encoder: Encoder, tokens: Tensor, mask: Tensor | None) -> list[Tensor]:
    """What enters and what leaves every block."""
    seen = [tokens]
    hooks = [b.register_forward_hook(lambda _m, _i, out: seen.append(out.detach())) for b in encoder.blocks]
    with torch.no_grad():
        encoder(tokens) if mask is None else encoder(tokens, mask)
    for hook in hooks:
        hook.remove()
    return seen


def by_hand(states: list[Tensor], mask: Tensor | None, measure, window: int = WINDOW) -> list[list[float]]:
    """Block × sequence: the mean of the measure over the slices that have one."""
    found = []
    for state in states:
        found.append([])
        for row in range(BATCH):
            values = []
            for start in range(0, N, window):
                piece = state[row, start : start + window]
                if mask is not None:
                    piece = piece[mask[row, start : start + window]]
                if len(piece):
                    values.append(float(measure(piece)))
            values = [value for value in values if value == value]  # one token has no mean cosine
            found[-1].append(sum(values) / len(values))
    return found


def of_profile(profile: depthscope.Profile, name: str) -> list[list[float]]:
    rows = profile.frame[(profile.frame["measure"] == name) & (profile.frame["station"] == "output")]
    return rows.pivot_table(index="block", columns="sample", values="value").to_numpy().tolist()


@pytest.mark.parametrize("masked", [False, True])
def test_windows_are_slices(encoder: Encoder, tokens: Tensor, masked: bool):
    mask = None
    if masked:
        mask = torch.ones(BATCH, N, dtype=torch.bool)
        mask[1, 6:] = False  # its last window has no real token, the one before only one
    given = tokens if mask is None else {"x": tokens, "mask": mask}
    names = ["token_similarity", "cosine_similarity", "effective_rank", "frobenius_norm"]
    profile = depthscope.probe(encoder, given, measures=names, window=WINDOW)
    states = outputs(encoder, tokens, mask)
    for name in names:
        expected = by_hand(states, mask, getattr(m, name))
        assert_close(torch.tensor(of_profile(profile, name)), torch.tensor(expected), rtol=1e-5, atol=1e-6)
        other = by_hand(states, mask, getattr(m, name), window=N)
        with pytest.raises(AssertionError):  # whole sequences are something else
            assert_close(torch.tensor(of_profile(profile, name)), torch.tensor(other), rtol=1e-5, atol=1e-6)
    assert profile.metadata["window"] == WINDOW
    assert set(profile.frame["sample"]) == {0, 1}


def test_a_window_as_long_as_the_sequence_changes_nothing(encoder: Encoder, tokens: Tensor):
    whole = depthscope.probe(encoder, tokens, stations="trunk")
    windowed = depthscope.probe(encoder, tokens, stations="trunk", window=N)
    assert_close(
        torch.tensor(whole.frame["value"].to_numpy()),
        torch.tensor(windowed.frame["value"].to_numpy()),
        rtol=1e-12,
        atol=0,
        equal_nan=True,
    )
    assert whole.frame.drop(columns="value").equals(windowed.frame.drop(columns="value"))


def test_several_batches_and_excluded_positions(encoder: Encoder, tokens: Tensor):
    profile = depthscope.probe(
        encoder, [tokens, tokens + 1], measures="token_similarity", window=WINDOW, exclude_tokens=[0]
    )
    assert set(profile.frame["sample"]) == {0, 1, 2, 3}
    keep = torch.ones(BATCH, N, dtype=torch.bool)
    keep[:, 0] = False  # of the sequence, not of every window
    expected = by_hand(outputs(encoder, tokens, None), keep, m.token_similarity)
    found = [row[:2] for row in of_profile(profile, "token_similarity")]
    assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_an_outlier_has_its_place_in_the_sequence(encoder: Encoder, tokens: Tensor):
    huge = tokens.clone()
    huge[1, 7] *= 1000
    profile = depthscope.probe(encoder, huge, measures="outliers", window=WINDOW)
    entering = profile.sinks[profile.sinks["block"] == 0]
    assert entering[["sample", "token"]].to_numpy().tolist() == [[1, 7]]


def test_attention_is_not_cut(encoder: Encoder, tokens: Tensor):
    profile = depthscope.probe(encoder, tokens, measures="spectral", window=WINDOW)
    assert "delta" not in set(profile.frame["measure"])
    assert any("which attention crosses" in note and "delta" in note for note in profile.metadata["notes"])
    with pytest.raises(ValueError, match="delta: attention crosses the windows"):
        depthscope.probe(encoder, tokens, measures="delta", window=WINDOW)


@pytest.mark.parametrize("window", [0, -3, 2.5, True])
def test_what_is_no_window_is_refused(window: object, encoder: Encoder, tokens: Tensor):
    with pytest.raises(ValueError, match="expected window= a number of tokens"):
        depthscope.probe(encoder, tokens, window=window)
