"""The one description of what is shown: short, from every kind of result, and never the same thing twice."""

import math

import pandas as pd
import pytest
import torch

import depthscope
from depthscope.cli.display import LINES, show
from depthscope.diagnosis import diagnose, summary
from depthscope.models import BlockConfig, CausalLM, Encoder, xavier
from depthscope.usage import Finding
from profiles_made_up import TRAINED, by_map, made_up
from samples import seeded


@pytest.fixture(scope="module")
def results() -> dict[str, summary.Summary]:
    """A summary of each kind of result, of a model that collapses and of one that does not."""
    model = CausalLM(9, BlockConfig(16, 2, 32), vocabulary=30, context=32, generator=seeded(0))
    ids = torch.randint(0, 30, (4, 32), generator=seeded(1))
    deep = Encoder(30, BlockConfig(16, 2, 32, initialise=xavier), generator=seeded(0))
    x = torch.randn(2, 16, 16, generator=seeded(1))
    profile = depthscope.probe(deep, x, measures="verdict", stations="trunk")
    trained = made_up({"token_similarity": by_map(1.1, 0.02, 0.3, 12)}, weights=TRAINED, notes=["a note " * 30] * 9)
    return {
        "collapsed": summary.of_profile(profile, diagnose(profile)),
        "trained": summary.of_profile(trained, diagnose(trained)),
        "depth": summary.of_use(depthscope.depth_use(model, ids)),
        "paths": summary.of_paths(depthscope.paths(model, ids)),
        "spectra": summary.of_spectra(depthscope.spectra(model)),
        "fix": summary.of_fix(depthscope.fix(deep, x)),
        "nothing to fix": summary.of_fix(depthscope.fix(model, ids)),
    }


KINDS = ("collapsed", "trained", "depth", "paths", "spectra", "fix", "nothing to fix")


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_short_and_says_nothing_twice(kind: str, results: dict[str, summary.Summary]):
    found = results[kind]
    assert found.model
    assert found.headline.endswith(".")
    assert len(found.findings) <= summary.FINDINGS
    assert found.table is None or len(found.table.rows) <= summary.ROWS
    sentences = [found.headline, *(finding.sentence for finding in found.findings)]
    assert len(set(sentences)) == len(sentences)
    for private in ("HFC", "ω", "δ", "μ", "Thm", "t_div", "nan", "behind"):
        assert not any(private in sentence for sentence in sentences), private


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_the_terminal_shows_it_in_twenty_lines(
    kind: str, columns: int, results: dict[str, summary.Summary], monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setenv("COLUMNS", str(columns))
    show(results[kind], tables={"every block": pd.DataFrame()})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= LINES or columns < 80
    assert all(len(line) <= columns or "depthscope.apply" in line for line in lines)
    assert lines[-1].startswith("More: --full (") or columns < 80
    assert results[kind].model.split(" · ")[0] in lines[1]


def test_what_there_is_no_room_for_is_counted(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    long = tuple(Finding(str(n), "a long sentence that fills lines and lines " * 12, {}) for n in range(3))
    made = summary.Summary(
        "verdict", "a model", "A headline.", "no collapse", long, long + long[:1], notes=("one", "one", "two")
    )
    show(made, full=False)
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= LINES
    assert "More: --full (5 findings" in out
    show(made, full=True)
    full = capsys.readouterr().out
    assert full.count("sentence") == 36
    assert full.count("Note: one") == 1


def test_a_curve_has_every_block_and_each_part_its_own():
    towers = {
        "encoder": {"first_block": 1, "last_block": 3, "samples": 2, "tokens": 9, "placement": "pre", "causal": False},
        "decoder": {"first_block": 4, "last_block": 7, "samples": 2, "tokens": 9, "placement": "pre", "causal": True},
    }
    profile = made_up({"token_similarity": [0.1] * 8}, towers=towers, parts={"encoder": 3, "decoder": 4})
    found = summary.of_profile(profile, diagnose(profile))
    assert [curve.label for curve in found.curves] == ["token similarity encoder", "token similarity decoder"]
    assert [len(curve.values) for curve in found.curves] == [4, 5]
    assert "encoder 1–3 · decoder 4–7" in found.model


def test_what_skipping_costs_stands_beside_the_similarity():
    profile = made_up({"token_similarity": [0.1, 0.2, 0.3]}, weights=TRAINED)
    skipped = pd.DataFrame(
        [(0, 0, 2.0, 0.0), (1, 1, 2.5, 0.5), (2, 2, 1.9, -0.1)], columns=["first_block", "last_block", "loss", "change"]
    )
    found = summary.of_profile(profile, diagnose(profile), skipped=skipped)
    assert found.curves[-1].values == (0.5, -0.1)
    assert found.curves[-1].low == -0.1


def test_next_to_nothing_is_no_share():
    """The constant part of a model without biases is rounding, and no row."""
    model = CausalLM(3, BlockConfig(16, 2, 32), vocabulary=30, context=32, generator=seeded(0))
    found = summary.of_paths(depthscope.paths(model, torch.randint(0, 30, (2, 8), generator=seeded(1))))
    assert all("e-" not in cell for row in found.table.rows for cell in row)
    assert math.isclose(sum(float(row[1].rstrip("%")) for row in found.table.rows), 100, abs_tol=0.3)


def test_paths_of_tokens_that_are_zero_have_no_cosine_and_no_attention_layer_is_not_0_of_2():
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    table = summary.of_paths(depthscope.paths(model, torch.zeros(2, 5, 8))).table
    assert table is not None
    assert [row[2] for row in table.rows] == ["·", "·", "·", "+1.00"]
    for layer in model.layers:
        for weight in (layer.self_attn.out_proj.weight, layer.linear1.bias, layer.linear2.bias):
            torch.nn.init.zeros_(weight)
    found = summary.of_paths(depthscope.paths(model, torch.randn(2, 5, 8, generator=seeded(1))))
    assert found.headline.startswith("Paths through no attention layer make ")


def test_negative_biases_do_not_shorten_paths():
    """Lengths 0 to 3 bring 98, 2, 20 and 10 % of the output, biases take 30 % away: the longest ones count."""
    shares = pd.DataFrame(
        {"projection_share": [-0.3, 0.98, 0.02, 0.2, 0.1], "cosine": [0.1] * 5}, index=pd.Index([-1, 0, 1, 2, 3])
    )

    class Made:
        depth, metadata = 3, {"model": "made up", "notes": []}

        def summary(self):
            return shares

    assert (
        "at most 3 of 3 attention layers make 100% of the output, biases left out" in summary.of_paths(Made()).headline
    )
