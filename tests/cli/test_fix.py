"""`depthscope fix`, as a user calls it."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import depthscope
import zoo
from depthscope.models import BlockConfig, Encoder, xavier
from depthscope.models.families import build_family
from depthscope.probing import Profile, probe
from depthscope.remedies import DeEscalate, ResidualWeight, applied
from depthscope.remedies.recommendation import sink_positions
from samples import seeded

pytestmark = pytest.mark.usefixtures("short_manual")
SMALL = ("--width", "64", "--heads", "4", "--samples", "2", "--tokens", "16")


@pytest.fixture
def run(program):
    """`depthscope fix`."""
    return partial(program, "fix")


def test_a_collapsing_encoder_is_shown_before_and_after(run, tmp_path: Path):
    printed = run("encoder", "--depth", "20", *SMALL, "--tau", "recommended", "--out", str(tmp_path / "fixed")).out
    words = " ".join(printed.split())  # wrapped to the terminal
    assert "token similarity before " in words
    assert "token similarity after " in words
    assert "With the remedy: no collapse." in words
    assert "τ_c = 0." in words
    assert len(printed.splitlines()) <= 21  # and where it was written
    for name in ("before", "after"):
        assert Profile.load(tmp_path / "fixed" / name).depth == 20
    saved = json.loads((tmp_path / "fixed" / "fix.json").read_text())
    # The printed lines do what was measured.
    model = build_family("encoder", 20, 64, 4, seed=0)
    exec(saved["python"], {"depthscope": depthscope, "model": model})
    assert [saved[when]["diagnosis"]["verdict"] for when in ("before", "after")] == ["collapsed", "no collapse"]
    assert "DeEscalate(tau=" in printed
    x = torch.randn(2, 16, 64, generator=seeded(0))
    assert probe(model, x).curve("token_similarity") == pytest.approx(
        saved["after"]["profile"]["token_similarity"], rel=1e-4
    )


def test_what_is_asked_for_is_put_in(run):
    printed = run("encoder", "--depth", "4", *SMALL, "--tau", "0.5", "--alpha", "0.5", "--json").out
    found = json.loads(printed)
    assert found["remedies"] == [
        {"remedy": "de-escalation", "tau": 0.5},
        {"remedy": "residual-weight", "alpha": 0.5},
    ]
    assert 'DeEscalate(tau=0.5, at="output"), ResidualWeight(alpha=0.5)' in found["python"]


def test_nothing_is_put_in_where_nothing_escalates(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "still.py").write_text(
        "import torch\nfrom depthscope.models import BlockConfig, Encoder, pre_norm\n"
        "def make():\n"
        "    model = Encoder(3, BlockConfig(16, 4, placement=pre_norm))\n"
        "    for p in [p for b in model.blocks for p in (*b.attention.output.parameters(), *b.ffn[2].parameters())]:\n"
        "        torch.nn.init.zeros_(p)\n"
        "    return model, torch.randn(2, 5, 16)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    printed = run("still:make").out
    assert "No collapse: " in printed
    assert "What to do: leave it as it is at this depth" in " ".join(printed.split())
    asked = run("still:make", "--tau", "0.5").out
    assert "applied on request, although no remedy is called for" in " ".join(asked.split())
    assert "DeEscalate(tau=0.5" in asked


def test_no_remedy_for_what_it_does_not_mend_and_the_line_fits_an_unknown_model(run, tmp_path: Path, monkeypatch):
    (tmp_path / "odd.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Mix(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)\n"
        "    def forward(self, x):\n"
        "        return self.norm(x + self.linear(x.mean(dim=1, keepdim=True)) * 3)\n"
        "def mixing(): return nn.Sequential(*(Mix() for _ in range(12))), torch.randn(4, 9, 16)\n"
        "class Pull(nn.Module):\n"
        "    def __init__(self, v):\n"
        "        super().__init__()\n"
        "        self.v = nn.Parameter(v)\n"
        "    def forward(self, x): return 0.3 * x + (x @ self.v).sign().unsqueeze(-1) * self.v\n"
        "def clusters():\n"
        "    v = torch.randn(16)\n"
        "    half = torch.randn(4, 4, 16)\n"
        "    return nn.Sequential(*(Pull(v) for _ in range(8))), torch.cat([half, -half], dim=1)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = json.loads(run("odd:clusters", "--json").out)
    assert found["before"]["diagnosis"]["verdict"] == "rank collapse"
    assert found["remedies"] == []
    assert "causal=False)" in json.loads(run("odd:mixing", "--json").out)["python"]


def test_a_trained_causal_model_is_told_to_train_and_keeps_its_sink(run, tmp_path: Path):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=500, n_embd=32, n_layer=3, n_head=4, n_positions=64))
    with torch.no_grad():
        model.transformer.wpe.weight[0] += 30.0  # token 0 is a sink
        for block in model.transformer.h:
            block.ln_1.bias += 0.1  # as training leaves it
    model.save_pretrained(tmp_path / "model")
    arguments = (f"hf:{tmp_path / 'model'}", "--samples", "2", "--tokens", "16", "--tau", "0.3")
    found = json.loads(run(*arguments, "--json").out)
    assert found["trained"]
    (remedy,) = found["remedies"]
    assert remedy["leave_alone"] == remedy["skip_in_mean"] == [0]
    assert found["loss"]["after"] != found["loss"]["before"]
    printed = run(*arguments, "--full").out
    words = " ".join(printed.split())
    assert "The weights are trained: put a remedy in and train on" in words
    assert "loss on this text" in words
    assert "left alone: token 0" in words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("encoder", "--tau", "2"), "'--tau': expected a number in [0, 1], or recommended, got '2'"),
        (("encoder", "--tau", "much"), "a number in [0, 1], or recommended, got 'much'"),
        (("enkoder",), "did you mean 'encoder'"),
    ],
)
def test_mistakes_end_in_one_line(run, arguments: tuple[str, ...], message: str):
    printed = run(*arguments, code=2)
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_sinks_are_positions_that_most_samples_share():
    model = Encoder(2, BlockConfig(16, 4), generator=seeded(0))
    x = torch.randn(3, 8, 16, generator=seeded(1))
    x[:, 2] *= 200
    x[0, 5] *= 200
    profile = probe(model, x)
    assert sink_positions(profile) == (2,)
    assert DeEscalate(leave_alone=sink_positions(profile)).leave_alone == (2,)
    assert ResidualWeight(0.5).alpha == 0.5


@pytest.mark.parametrize("wishes", [{}, {"tau": "recommended"}])
def test_the_python_of_the_library_runs_as_it_stands(wishes: dict):
    model = Encoder(20, BlockConfig(64, 4, initialise=xavier), generator=seeded(0))
    x = torch.randn(2, 16, 64, generator=seeded(1))
    fixed = depthscope.fix(model, iter([x]), **wishes)
    assert fixed.verdicts[0].verdict == "collapsed"
    assert not applied(model)
    exec(fixed.python, {"model": model})
    assert {entry.remedy for entry in applied(model)} == set(fixed.remedies)
    again = probe(model, x).curve("token_similarity")
    assert again == pytest.approx(fixed.after.curve("token_similarity"), rel=1e-5)
    assert "Before: collapsed" in str(fixed)


def test_probe_and_fix_give_one_answer_also_for_what_a_factory_streams(run, program, tmp_path: Path, monkeypatch):
    (tmp_path / "streams.py").write_text(
        "import torch\nfrom torch.utils.data import DataLoader\n"
        "from depthscope.models import BlockConfig, Encoder, xavier\n"
        "def make(): return Encoder(16, BlockConfig(32, 4, initialise=xavier)), torch.randn(4, 9, 32)\n"
        "def loader():\n    model, x = make()\n    return model, DataLoader(x, batch_size=2)\n"
        "def stream():\n    model, x = make()\n    return model, iter(x.split(2))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for factory in ("streams:loader", "streams:stream"):
        probed = json.loads(program("probe", factory, "--json").out)["diagnosis"]["recommendation"]
        fixed = json.loads(run(factory, "--json").out)
        assert probed["remedies"] == fixed["remedies"] != []
        assert probed["reason"] == fixed["before"]["diagnosis"]["recommendation"]["reason"]


def test_an_estimate_is_called_one_and_says_how_to_measure(program, tmp_path: Path, monkeypatch):
    """Of a model of no known family, for which no training says what is best."""
    (tmp_path / "own.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Mix(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)\n"
        "    def forward(self, x):\n"
        "        return self.norm(x + self.linear(x.mean(dim=1, keepdim=True)) * 3)\n"
        "def mixing(): return nn.Sequential(*(Mix() for _ in range(12))), torch.randn(4, 9, 16)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    measured, estimated = (
        json.loads(program("probe", "own:mixing", "--json", *more).out)["diagnosis"]["recommendation"]
        for more in ((), ("--estimate",))
    )
    assert (measured["measured"], estimated["measured"]) == (True, False)
    assert "as measured on this model" in measured["reason"]
    assert estimated["remedies"] == []
    assert "depthscope.fix(model, inputs)" in estimated["reason"]


def test_every_part_has_its_own_curves_and_rows(capsys: pytest.CaptureFixture[str]):
    from depthscope.cli.display import show
    from depthscope.cli.fix import tables
    from depthscope.diagnosis.summary import of_fix

    model, inputs = zoo.make("bart")
    fixed = depthscope.fix(model, inputs, tau=0.5)
    show(of_fix(fixed), full=True, tables=tables(fixed))
    out = capsys.readouterr().out
    for row in ("token similarity encoder before", "token similarity decoder after", "decoder in", "decoder 6"):
        assert row in out


@pytest.mark.parametrize("said", ["--causal", "--no-causal"])
def test_what_is_said_of_causality_wins(run, program, said: str):
    causal = said == "--causal"
    found = json.loads(run("encoder", "--depth", "4", *SMALL, "--tau", "0.5", said, "--json").out)
    assert f"causal={causal}" in found["python"]
    printed = program("probe", "gpt2", "--depth", "2", *SMALL, said, "--json").out
    assert json.loads(printed)["metadata"]["causal"] is causal
