"""`depthscope paths`, as a user calls it."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from depthscope.attention_paths import PathShares

pytestmark = pytest.mark.usefixtures("short_manual")
SMALL = ("--depth", "3", "--width", "64", "--heads", "4", "--samples", "2", "--tokens", "16")


@pytest.fixture
def run(program):
    """`depthscope paths`."""
    return partial(program, "paths")


def test_a_table_by_length(run, tmp_path: Path):
    printed = run("gpt2", *SMALL, "--full", "--out", str(tmp_path / "kept")).out
    assert "every length" in printed
    words = " ".join(printed.split())
    assert "attention layers make" in words
    shares = PathShares.load(tmp_path / "kept")
    assert shares.depth == 3
    assert (tmp_path / "kept" / "paths.png").read_bytes().startswith(b"\x89PNG")


def test_json_and_nothing_else(run):
    found = json.loads(run("encoder", *SMALL, "--json").out)
    assert found["paths"] == {"0": 1, "1": 12, "2": 48, "3": 64}
    assert [row["length"] for row in found["lengths"]] == [0, 1, 2, 3, -1]
    assert sum(row["projection_share"] for row in found["lengths"]) == pytest.approx(1)


def not_attention() -> tuple[nn.Module, torch.Tensor]:
    class Mix(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x @ x.mT @ x

    return nn.Sequential(*(Mix() for _ in range(3))), torch.randn(2, 5, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["t5", *SMALL], "this model has several parts (encoder, decoder): say which one, as in --part decoder"),
        (["bert", *SMALL, "--dtype", "bfloat16"], "expected a model in float32 or float64"),
        (["cli.test_paths:not_attention", "--blocks", "[0-9]"], "a product of tokens with tokens is not linear"),
        (["encoder", *SMALL, "--out", "/dev/null/x"], "Not a directory"),
    ],
)
def test_a_users_mistake_ends_in_one_line(run, arguments: list[str], message: str):
    printed = run(*arguments, code=2)
    assert message in printed.err
    assert printed.err.startswith("depthscope: ")
    assert printed.err.count("\n") == 1


def test_one_part(run):
    assert "encoder" in run("t5", *SMALL, "--part", "encoder").out
