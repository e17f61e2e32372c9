"""`depthscope depth`, as a user calls it."""

import json
from functools import partial
from pathlib import Path

import pytest
import transformers as hf

from depthscope import DepthUse

pytestmark = pytest.mark.usefixtures("short_manual")
SMALL = ("--depth", "3", "--width", "32", "--heads", "4", "--samples", "4", "--tokens", "24")


@pytest.fixture
def run(program):
    """`depthscope depth`."""
    return partial(program, "depth")


def test_table_verdict_and_files(run, tmp_path: Path):
    printed = run("gpt2", *SMALL, "--full", "--out", str(tmp_path / "kept"))
    words = " ".join(printed.out.split())
    assert "3 blocks of width 32 · pre-norm · causal · random weights · 4 × 24 tokens" in words
    assert "blocks that matter, by what was looked at" in words
    assert "The work is spread evenly over the 3 blocks" in words
    assert "The prediction is" in words
    found = DepthUse.load(tmp_path / "kept")
    assert found.depth == 3
    assert found.metadata["model"] == "gpt2"
    assert (tmp_path / "kept" / "depth.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "kept" / "report.html").read_text(encoding="utf-8")
    assert "Blocks that matter" in page
    assert "depthscope.depth_use(model, inputs)" in page


def test_quick_is_one_pass(run):
    printed = run("bert", *SMALL, "--quick", "--json")
    assert printed.err == ""
    found = json.loads(printed.out)
    assert "skips" not in found
    assert [row["skip_output"] for row in found["table"]] == [None] * 3
    assert all(row["attention_ratio"] > 0 for row in found["table"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["t5", *SMALL], "this model has several parts (encoder, decoder): say which one, as in part='decoder'"),
    ],
)
def test_mistakes_end_in_one_line(run, arguments: list[str], message: str):
    printed = run(*arguments, code=2)
    assert message in printed.err
    assert len(printed.err.strip().splitlines()[-1].split("\n")) == 1


def test_an_encoder_from_a_folder_keeps_the_head_that_its_configuration_names(run, tmp_path: Path):
    shape = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 24}
    hf.BertForMaskedLM(hf.BertConfig(**shape, vocab_size=300)).save_pretrained(tmp_path / "bert")
    found = json.loads(run("hf:" + str(tmp_path / "bert"), "--tokens", "16", "--json").out)
    assert found["table"][-1]["lens_top1"] == 1.0
    assert not any("no logit lens" in note for note in found["metadata"]["notes"])
