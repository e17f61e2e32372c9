"""Wrong options of `watch` and of its callbacks: refused when they are given, in one line that repeats them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import depthscope
import zoo
from depthscope.hooks.staying import hooks_in
from depthscope.watching import DepthCallback

WITHOUT_A_MODEL = [
    *({"every": value} for value in (0, -1, True, 1.5, math.nan, math.inf, "5", None, [1])),
    *({"measures": value} for value in ("nope", "", None, 5, ["token_similarity", 3], math.nan, True, [["x"]], b"x")),
    *({"stations": value} for value in ("nope", "", None, 5, ["output", 3], math.nan, True, [["x"]])),
    *({"path": value} for value in (5, True, "", b"x", ["a"], "a\0b")),
    *({"on_record": value} for value in (5, "print", True, [])),
]
OF_A_MODEL = [
    *({"token_axis": value} for value in (5, True, "1", 1.0)),
    *({"blocks": value} for value in ("nope.*", "", 5, [5], True)),
    *({"part": value} for value in ("nope", 5)),
    *({"mask": value} for value in ("", 5, True)),
]


def refusal(act: Any) -> str:
    with pytest.raises(ValueError, match=r"\S") as refused:
        act()
    line = str(refused.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("option", WITHOUT_A_MODEL + OF_A_MODEL, ids=repr)
def test_a_wrong_option_of_a_watch_is_refused_and_repeated(option: dict[str, Any]):
    model, _ = zoo.make("bert")
    (value,) = option.values()
    line = refusal(lambda: depthscope.watch(model, **option))
    assert repr(value[-1] if isinstance(value, list) and option.keys() & {"measures", "stations"} else value) in line
    assert not [*hooks_in(model)]


@pytest.mark.parametrize("option", [*WITHOUT_A_MODEL, {"module": 5}, {"module": ""}], ids=repr)
def test_a_wrong_option_of_lightnings_callback_is_refused_before_training(option: dict[str, Any]):
    pytest.importorskip("lightning")
    assert refusal(lambda: DepthCallback(**option))


@pytest.mark.parametrize("model", [None, 5, "bert", nn.Linear, torch.zeros(2)], ids=str)
def test_what_is_no_model_is_not_watched(model: Any):
    assert repr(model) in refusal(lambda: depthscope.watch(model))


def test_a_folder_is_no_file_of_records(tmp_path: Path):
    model, _ = zoo.make("bert")
    for path in (tmp_path, tmp_path / "no" / "such"):
        assert str(path) in refusal(depthscope.watch(model, path=path).open)
    assert not model._forward_pre_hooks
