"""`depthscope probe MODEL --without PARTS`."""

import json

import pytest

SMALL = ("--depth", "3", "--width", "64", "--tokens", "16", "--samples", "2")


def test_what_was_left_out_stands_in_the_headline_and_the_verdict(program, short_manual):
    out = program("probe", "bert", *SMALL, "--without", "skips,ffn").out
    words = " ".join(out.split())
    assert "without skips, ffn" in words
    assert "without its skips and FFNs, which is not the model as it is" in words
    assert "depthscope.apply" not in words


def test_json(program, short_manual):
    out = program("probe", "gpt2", *SMALL, "--without", "norms", "--json").out
    found = json.loads(out)
    assert found["metadata"]["without"] == ["norms"]
    assert found["diagnosis"]["headline"].startswith("Without its norms")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("bert", "--without", "skip"), "did you mean 'skips'"),
        (("bert", "--without", ""), "at least one of"),
        (("falcon", *SMALL, "--without", "attention_skip"), "share one skip"),
    ],
)
def test_refused_in_one_line(program, short_manual, options: tuple[str, ...], why: str):
    error = program("probe", *options, code=2).err
    assert why in error
    assert error.strip().count("\n") == 0
