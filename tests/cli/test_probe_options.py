"""Options of `depthscope probe` that are easily dropped in silence: they are honoured or refused."""

import json
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--exclude-tokens", ""], "'--exclude-tokens': expected indices"),
        (["--exclude-tokens", "500"], "cannot exclude token 500"),
        (["--seed", "99999999999999999999"], "--seed"),
        (["--tokens", "100000000000"], "memory"),
    ],
)
def test_options_are_honoured_or_refused(arguments: list[str], message: str, program):
    refused = program("probe", "encoder", "--depth", "1", "--width", "8", "--heads", "2", *arguments, code=2)
    assert message in refused.err
    assert refused.err.count("\n") == 1


def test_attention_alone_is_shown_drawn_and_printed(tmp_path: Path, program):
    command = ("probe", "encoder", "--depth", "2", "--width", "8", "--heads", "2")
    found = json.loads(program(*command, "--measures", "delta", "--json", "--out", str(tmp_path)).out)
    assert len(found["attention"]["delta"]) == 3
    assert (tmp_path / "profile.png").exists()


FACTORY = """
import torch, transformers as hf
from torch import nn

def t5():
    config = hf.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4)
    ids = torch.arange(14).reshape(2, 7)
    return hf.T5Model(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))

    def forward(self, x, pad):
        for block in self.blocks:
            x = block(x)
        return x

def own():
    pad = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]).bool()
    return Own(), {"x": torch.randn(2, 5, 8), "pad": pad}
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "told_models.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_what_is_said_of_a_model_reaches_the_probe(program, factories):
    found = json.loads(program("probe", "told_models:t5", "--part", "encoder", "--json").out)
    assert found["blocks"] == 2
    assert "only the part encoder is looked at, not decoder (2 blocks)" in found["metadata"]["notes"]
    plain, masked = (
        json.loads(program("probe", "told_models:own", "--token-axis", "1", *more, "--json").out)
        for more in ((), ("--mask", "~pad"))
    )
    assert plain["profile"]["token_similarity"] != masked["profile"]["token_similarity"]
    assert "not used as masks of real tokens: pad" in plain["metadata"]["notes"]
    turned = json.loads(program("probe", "told_models:own", "--token-axis", "0", "--json").out)
    assert (plain["tokens"], turned["tokens"]) == (5, 2)


def test_what_is_said_of_a_model_reaches_fix(program, factories):
    fixed = json.loads(program("fix", "told_models:t5", "--part", "decoder", "--tau", "0.5", "--json").out)
    assert 'part="decoder"' in fixed["python"]
    assert len(fixed["before"]["profile"]["token_similarity"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["told_models:t5", "--part", "decode"], "unknown part 'decode': did you mean 'decoder'"),
        (["told_models:own", "--part", "encoder"], "this model has no parts"),
        (["told_models:own", "--token-axis", "2"], "--token-axis"),
        (["told_models:own", "--mask", "nothing"], "was given an argument 'nothing'"),
    ],
)
@pytest.mark.parametrize("command", ["probe", "fix"])
def test_what_cannot_be_said_of_a_model_ends_in_one_line(
    program, factories, command: str, arguments: list[str], message: str
):
    printed = program(command, *arguments, code=2)
    assert message in printed.err
    assert printed.err.count("\n") == 1
