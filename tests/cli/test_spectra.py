"""`depthscope spectra`: the table, the JSON, what is saved, what is refused."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
import transformers as hf
from typer.testing import CliRunner

import depthscope
from depthscope.cli.app import app
from depthscope.diagnosis.summary import of_spectra
from zoo import GROUPED

LLAMA = ("spectra", "llama", "--depth", "2", "--width", "32", "--heads", "4")


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    if code == 0 and result.exception is not None:
        raise result.exception
    return result.stdout


def test_it_shows_every_block_and_says_what_that_means():
    shown = run(*LLAMA)
    assert "2 blocks" in shown
    assert "of the eigenvalues of W_V W_O are negative" in " ".join(shown.split())
    assert "`depthscope probe` measures what happens" in " ".join(shown.split())


def test_no_block_of_a_deep_model_is_left_out():
    shown = run("spectra", "llama", "--depth", "30", "--width", "16", "--heads", "2", "--full")
    first = [line.split()[0] for line in shown.splitlines() if len(line.split()) == 5]
    assert [name for name in first if name.isdigit()] == [str(block) for block in range(1, 31)]


def test_json_has_every_eigenvalue(tmp_path: Path):
    hf.LlamaModel(hf.LlamaConfig(**GROUPED)).save_pretrained(tmp_path)
    found = json.loads(run("spectra", f"hf:{tmp_path}", "--json"))
    ours = depthscope.spectra(tmp_path)
    assert found["blocks"] == 3
    assert sum(len(record["eigenvalues"]) for record in found["spectra"]) == len(ours.frame)
    assert found["spectra"][0]["eigenvalues"][0] == ours.frame.loc[0, ["real", "imag"]].tolist()


def test_out_keeps_the_rows_and_a_picture(tmp_path: Path):
    run(*LLAMA, "--heads-only", "--out", str(tmp_path / "kept"))
    kept = pd.read_parquet(tmp_path / "kept" / "spectra.parquet")
    assert set(kept["head"]) == {0, 1, 2, 3}
    assert (tmp_path / "kept" / "spectra.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((*LLAMA, "--part", "decoder"), "this model has no parts"),
    ],
)
def test_what_it_cannot_read_is_said(arguments: tuple[str, ...], expected: str):
    with pytest.raises(ValueError, match=expected):
        run(*arguments)


def test_a_block_that_leans_is_named():
    model = hf.BertModel(hf.BertConfig(hidden_size=16, num_attention_heads=4, num_hidden_layers=4, vocab_size=9))
    for layer in list(model.encoder.layer)[1:3]:
        layer.attention.output.dense.weight.data = -layer.attention.self.value.weight.data.T.contiguous()
    said = " ".join(item.sentence for item in of_spectra(depthscope.spectra(model)).findings)
    assert "2 of 4 blocks push tokens apart (3 of 4 eigenvalues negative): 2–3." in said


def test_what_the_theory_says_is_not_the_share_of_negative_eigenvalues():
    """H = −VVᵀ/‖VVᵀ‖ has them all in [−1, 0]; of H = −3I all are negative too, and it smooths."""
    model = hf.BertModel(hf.BertConfig(hidden_size=16, num_attention_heads=4, num_hidden_layers=2, vocab_size=9))

    def said(scale: float) -> str:
        for layer in model.encoder.layer:
            value = layer.attention.self.value.weight.data
            value.copy_(torch.eye(16))
            layer.attention.output.dense.weight.data = scale * value.T.contiguous()
        found = of_spectra(depthscope.spectra(model))
        return " ".join([found.headline, *(item.sentence for item in found.findings)])

    assert "In 0 of 8 heads, attention alone" in said(-1.0)
    assert "In 8 of 8 heads, attention alone, applied again and again, would make tokens alike" in said(-3.0)
    assert "All eigenvalues of W_V W_O are 0 in all 2 blocks." in said(0.0)
