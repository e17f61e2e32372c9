"""`depthscope probe`, as a user calls it: mostly in this process, for speed, through the program's own entry."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import depthscope
from depthscope.cli.display import format_value
from depthscope.probing import Profile
from depthscope.remedies import DeEscalate

pytestmark = pytest.mark.usefixtures("short_manual")

TINY = ("--depth", "3", "--width", "32", "--heads", "4", "--samples", "2", "--tokens", "8")
FACTORY = """
import sys
import torch
from depthscope.models import BlockConfig, Encoder

def make():
    print("a model that talks")
    return Encoder(2, BlockConfig(16, 4)), torch.randn(2, 5, 16)

def three(): return 3
def interrupts(): raise KeyboardInterrupt
def leaves(): raise GeneratorExit("gone")
class Quits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = Encoder(2, BlockConfig(16, 4)).blocks
    def forward(self, x): sys.exit()
def quits(): return Quits(), torch.randn(2, 5, 16)
def broken(): raise RuntimeError("two\\nlines")
def misfit(): return Encoder(2, BlockConfig(16, 4)), torch.randn(2, 5, 17)
def batches(): return Encoder(2, BlockConfig(16, 4)), (torch.randn(2, 5, 16) for _ in range(3))
def linear(): return torch.nn.Linear(2, 2), torch.zeros(1, 2)

class Loop(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    def forward(self, x):
        for _ in range(5):
            x = self.block(x)
        return x

def loop(): return Loop(), torch.randn(2, 5, 4)
"""


@pytest.fixture
def run(program):
    """`depthscope probe`."""
    return partial(program, "probe")


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the current folder."""
    (tmp_path / "my_models.py").write_text(FACTORY)
    (tmp_path / "my_script.py").write_text("raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    return "my_models"


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with a tokenizer, as save_pretrained leaves it."""
    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghij"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )
    config = BertConfig(
        vocab_size=14,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=24,
    )
    BertModel(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


# --- what comes out -----------------------------------------------------------------------------------


def test_a_person_sees_curves_blocks_and_a_sentence(run):
    out = run("encoder", "--depth", "30", "--width", "64", "--samples", "2", "--tokens", "16").out
    words = " ".join(out.split())
    assert "encoder · 30 blocks of width 64 · post-norm · random weights · 2 × 16 tokens" in words
    first, bars, last = next(line.split()[2:] for line in out.splitlines() if line.startswith("token similarity "))
    assert bars.startswith("▁")
    assert bars.endswith("█")
    assert float(first) < 0.2 < 0.99 < float(last)
    assert "Token similarity passes 0.9 after block " in words
    assert "Collapsed: the tokens of a sequence become equal" in words
    assert "depthscope.apply(model, " in out
    assert max(map(len, out.splitlines())) <= 80
    assert len(out.splitlines()) <= 20
    full = run("encoder", "--depth", "30", "--width", "64", "--samples", "2", "--tokens", "16", "--full").out
    assert "effective_rank" in full
    assert next(line.split() for line in full.splitlines() if line.split()[:1] == ["30"])


def test_json_is_one_object_and_nothing_else(run):
    printed = run("gpt2", *TINY, "--gradients", "--json")
    found = json.loads(printed.out)
    assert printed.out.count("\n") == 1
    assert printed.err == ""
    assert (found["model"], found["blocks"], found["tokens"]) == ("gpt2", 3, 8)
    assert all(len(curve) == 4 for curve in found["profile"].values())
    assert all(0 <= value <= 1 for value in found["profile"]["token_similarity"])
    assert found["profile"]["angular_distance"][0] is None
    assert found["profile"]["output_gradient"][3] > 0
    assert len(found["metadata"]["text"]["sha256"]) == 64
    assert found["metadata"]["seed"] == 0
    assert found["diagnosis"]["verdict"] == "no collapse"
    assert found["diagnosis"]["recommendation"]["remedies"] == []
    assert "attention learns" in {finding["rule"] for finding in found["diagnosis"]["findings"]}


def test_the_same_seed_gives_the_same_curves(run):
    first, second, other = (
        json.loads(run("bert", *TINY, "--seed", seed, "--json").out)["profile"] for seed in ("0", "0", "1")
    )
    assert first == second
    assert first["token_similarity"] != other["token_similarity"]


def test_out_holds_the_profile_and_a_picture(run, tmp_path: Path):
    out = tmp_path / "new" / "folder"
    assert f"wrote {out}" in run("llama", *TINY, "--out", str(out)).out
    profile = Profile.load(out)
    assert profile.depth == 3
    assert profile.metadata["model"] == "llama"
    assert (out / "profile.png").read_bytes().startswith(b"\x89PNG")
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    kept = {path.name: path.read_bytes() for path in out.iterdir()}
    run("llama", *TINY[:-1], "99999", "--out", str(out), code=2)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == kept


def test_measures_stations_and_excluded_tokens(run):
    asked = ("--measures", "token_similarity,delta", "--stations", "after_attention", "--exclude-tokens", "0")
    found = json.loads(run("bert", *TINY, *asked, "--json").out)
    assert set(found["profile"]) == {"token_similarity"}
    assert found["metadata"]["stations"] == ["after_attention", "output"]
    assert found["metadata"]["excluded_tokens"] == [0]
    assert "delta (attention)" in run("bert", *TINY, *asked, "--full").out


def test_images_and_text_of_the_user(run, tmp_path: Path):
    from PIL import Image

    Image.new("RGB", (9, 9)).save(tmp_path / "black.png")
    found = json.loads(run("vit", *TINY[:6], "--samples", "1", "--images", str(tmp_path), "--json").out)
    assert found["tokens"] == 197
    text = tmp_path / "mine.txt"
    text.write_text("Ünï cödé " * 50, encoding="utf-8")
    found = json.loads(run("t5", *TINY, "--text", str(text), "--json", "--dtype", "float64").out)
    assert found["blocks"] == 6  # encoder and decoder
    assert found["metadata"]["text"]["source"] == str(text)
    assert found["metadata"]["dtype"] == "float64"


# --- --fail-on ----------------------------------------------------------------------------------------


def test_fail_on_ends_with_code_3_after_everything_was_printed(run, tmp_path: Path):
    asked = ("encoder", *TINY, "--json", "--out", str(tmp_path / "out"))
    printed = run(*asked, "--fail-on", "token_similarity<=1", "--fail-on", "frobenius_norm<0", code=3)
    value = json.loads(printed.out)["profile"]["token_similarity"][-1]
    assert printed.err == f"depthscope: token_similarity<=1 at the last block holds: {value:.6g} at block 3\n"
    assert (tmp_path / "out" / "profile.png").exists()
    assert run(*asked, "--fail-on", "token_similarity > 1").err == ""


def test_fail_on_asks_any_block_and_station(run):
    found = json.loads(run("encoder", *TINY, "--json", "--stations", "trunk").out)
    first = found["profile"]["token_similarity"][1]
    asked = ("encoder", *TINY, "--stations", "trunk", "--fail-on")
    assert f"holds: {first:.6g} at block 1\n" in run(*asked, "token_similarity<=1 at block 1", code=3).err
    assert "at block 1, the first of 3 of 3 blocks" in run(*asked, "token_similarity<=1 in all blocks", code=3).err
    assert "at ffn_input holds" in run(*asked, "token_similarity<=1 at ffn_input", code=3).err
    assert "asks for block 9, and the last one is 3" in run(*asked, "token_similarity<=1 at block 9", code=2).err
    assert "there is one look only" in run(*asked, "token_similarity<=1 for 3", code=2).err


def test_a_condition_on_what_is_undefined_or_ambiguous_is_an_error(run):
    undefined = "--fail-on cannot be decided: escalation_rate is undefined at block 1"
    one_token = ("encoder", "--depth", "1", "--width", "32", "--heads", "4", "--tokens", "1")
    assert undefined in run(*one_token, "--fail-on", "escalation_rate>1", code=2).err
    two_branches = ("--measures", "branch_ratio", "--fail-on", "branch_ratio>1")
    assert "stands at attention_branch, ffn_branch" in run("encoder", *TINY, *two_branches, code=2).err


def test_a_measure_of_attention_is_taken_where_it_stands(run):
    asked = ("--measures", "delta", "--fail-on", "delta>1e9", "--fail-on", "delta>=0")
    assert "delta>=0 at the last block holds" in run("bert", *TINY, *asked, code=3).err


# --- hf: and module:factory ---------------------------------------------------------------------------


def test_a_folder_with_its_own_tokenizer(run, bert_folder: Path, tmp_path: Path):
    text = tmp_path / "letters.txt"
    text.write_text("a b c d e f g h i j " * 9)
    options = ("--text", str(text), "--tokens", "12", "--samples", "3", "--batch", "2", "--json")
    found = json.loads(run(f"hf:{bert_folder}", *options).out)
    assert (found["blocks"], found["tokens"], found["metadata"]["samples"]) == (2, 12, 3)
    assert found["metadata"]["notes"] == []
    letters = [4 + i % 10 for i in range(30)]
    ids = torch.tensor([[2, *letters[i : i + 10], 3] for i in (0, 10, 20)])
    model = BertModel.from_pretrained(bert_folder)
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
    from depthscope.measures import token_similarity

    expected = [token_similarity(state).mean().item() for state in states]
    assert found["profile"]["token_similarity"] == pytest.approx(expected, abs=1e-6)


def test_a_folder_without_a_tokenizer_says_so(run, tmp_path: Path):
    config = GPT2Config(vocab_size=60, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    options = ("--samples", "2", "--json")
    found = json.loads(run(f"hf:{tmp_path}", *options).out)
    assert found["tokens"] == 32
    assert "no tokenizer" in found["metadata"]["notes"][0]


def test_a_block_in_a_loop_is_found_when_the_model_runs(run, factory: str):
    assert len(json.loads(run(f"{factory}:loop", "--json").out)["profile"]["token_similarity"]) == 6


def test_trained_weights_have_no_verdict_on_inputs_that_are_not_theirs(run, tmp_path: Path):
    config = GPT2Config(vocab_size=60, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "random")
    torch.nn.init.constant_(model.transformer.h[0].ln_1.bias, 0.01)
    model.save_pretrained(tmp_path / "trained")
    options = ("--samples", "2", "--tokens", "16", "--json")
    found = json.loads(run(f"hf:{tmp_path / 'trained'}", *options).out)
    assert found["diagnosis"]["verdict"] == "cannot tell"
    assert "no tokenizer came with the model" in found["diagnosis"]["headline"]
    assert all(value is not None for value in found["profile"]["token_similarity"])  # the numbers are there
    assert "trained weights on inputs of their own" in found["diagnosis"]["recommendation"]["reason"]
    assert json.loads(run(f"hf:{tmp_path / 'random'}", *options).out)["diagnosis"]["verdict"] == "no collapse"


def test_every_block_is_shown_and_pre_norm_with_what_is_read(run):
    shown = run("gpt2", *TINY, "--full").out
    assert re.search(r"attention reads +FFN reads", shown)
    assert re.search(r"^3 .*0\.\d{3}", shown, flags=re.MULTILINE)
    assert " largest_feature " not in shown  # the number of a feature has no mean and no curve


def test_a_factory(run, factory: str):
    printed = run(f"{factory}:make", "--json")
    assert json.loads(printed.out)["blocks"] == 2
    assert printed.err == "a model that talks\n"
    found = json.loads(run(f"{factory}:batches", "--json", "--dtype", "float64").out)
    assert (found["metadata"]["samples"], found["metadata"]["dtype"]) == (6, "float64")


def test_pickles_are_not_run(run, bert_folder: Path, tmp_path: Path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "sprung",)

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((bert_folder / "config.json").read_bytes())
    torch.save({"trap": Trap()}, folder / "pytorch_model.bin")
    assert len(run(f"hf:{folder}", code=2).err.splitlines()) == 1
    assert not (tmp_path / "sprung").exists()


# --- mistakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bret"], "unknown model 'bret': did you mean 'bert'? expected a family's name"),
        (["hf:missing/folder/here"], "'missing/folder/here', which is none of them"),
        (["hf:"], "got '', which is none of them"),
        (["hf:."], "expected a folder with a config.json"),
        (["."], "it is a folder, say hf:."),
        (["no_such_module:make"], "no module 'no_such_module' from here"),
        (["my_models:mak"], "did you mean 'make'? expected a function in"),
        (["my_models:three"], "to return a model or (model, inputs), got int"),
        (["my_models:broken"], "my_models:broken() failed: RuntimeError: two lines"),
        (["builtins:quit"], "builtins:quit() failed: SystemExit: None (DEPTHSCOPE_TRACEBACK=1 shows where)"),
        (["my_models:interrupts"], "my_models:interrupts() failed: KeyboardInterrupt"),
        (["my_models:leaves"], "my_models:leaves() failed: GeneratorExit: gone"),
        (["my_models:quits"], "running my_models:quits failed: SystemExit"),
        (["my_script:make"], "importing 'my_script' failed: SystemExit: 0"),
        (["my_models:misfit"], "fails on these inputs, float32 (2, 5, 17): RuntimeError: mat1 and mat2"),
        (["my_models:linear"], "no repeated blocks in Linear"),
        (["my_models:make", "--depth", "2"], "--depth with a family's name only"),
        (["my_models:batches", "--tokens", "2"], "the factory brings its own input"),
        (["bert", "--depth", "0"], "expected a whole number from 1 to"),
        (["bert", "--width", "100", "--heads", "7"], "heads that divide the width, got width 100 and 7 heads"),
        (["bert", "--depth", "99999999"], "GB available"),
        (["encoder", *TINY, "--out", "/dev/null/x"], "can be written for --out, got '/dev/null/x'"),
        (["bert", *TINY, "--text", "latin.txt"], "expected UTF-8 in 'latin.txt', got byte 0xe9 at position 3"),
        (["bert", *TINY, "--text", "missing.txt"], "'missing.txt': No such file or directory"),
        (["bert", *TINY, "--text", "short.txt"], "at least 2 × 8 tokens in 'short.txt', got 2"),
        (["vit", *TINY[:6], "--images", "missing"], "expected a folder of images, got 'missing'"),
        (["vit", *TINY[:6], "--images", "."], "images (png, jpg) in '.', got 0"),
        (["encoder", "--device", "nowhere"], "expected a device of this machine, such as cpu, got 'nowhere'"),
        (["encoder", "--dtype", "int8"], "'int8' is not one of"),
        (["encoder", "--measures", "simlarity"], "unknown measure 'simlarity'"),
        (["encoder", *TINY, "--stations", "platform"], "unknown station 'platform'"),
        (["encoder", "--exclude-tokens", "first"], "indices such as 0,1, got 'first'"),
        (["encoder", "--fail-on", "token_similarity"], "expected --fail-on"),
        (["encoder", "--fail-on", "delta>1"], "'delta', which is not measured"),
        (["encoder", "--samples", "0"], "expected a whole number from 1 to"),
        ([], "Missing argument 'MODEL'"),
    ],
)
def test_a_mistake_ends_in_one_line_and_code_2(run, factory: str, arguments: list[str], message: str):
    Path("latin.txt").write_bytes("café".encode("latin-1"))
    Path("short.txt").write_text("too short")
    printed = run(*arguments, code=2)
    assert message in printed.err
    assert printed.err.startswith("depthscope: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_folder_too_large_for_memory(run, bert_folder: Path, monkeypatch: pytest.MonkeyPatch):
    from depthscope import memory

    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    assert "0.0 GB available" in run(f"hf:{bert_folder}", code=2).err


def test_a_name_that_cannot_be_had(tmp_path: Path):
    """In a process of its own, with an empty cache and a hub that refuses: one line, and soon."""
    result = subprocess.run(
        [sys.executable, "-m", "depthscope", "probe", "hf:no-such/model"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"},
    )
    assert result.returncode == 2
    assert result.stderr.startswith("depthscope: cannot get 'no-such/model'")
    assert "hf:FOLDER" in result.stderr
    assert result.stderr.count("\n") == 1


# --- words --------------------------------------------------------------------------------------------


def test_values():
    assert format_value(1.5e-7) == "1.50e-07"
    assert format_value(0.99951) == "1.000"
    assert format_value(12345.0) == "1.23e+04"
    assert format_value(float("nan")) == "·"


def test_the_seed_holds_for_a_factory_that_draws_from_the_global_state(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "drawn.py").write_text(
        "import torch\nfrom depthscope.models import BlockConfig, Encoder\n"
        "def make(): return Encoder(2, BlockConfig(16, 4)), torch.randn(2, 5, 16)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    random = torch.get_rng_state()
    first, again, other = (json.loads(run("drawn:make", "--seed", seed, "--json").out) for seed in ("3", "3", "4"))
    assert first["profile"] == again["profile"]
    assert first["profile"] != other["profile"]
    assert torch.equal(torch.get_rng_state(), random)


def test_a_folder_that_was_saved_with_a_remedy_says_so(run, tmp_path: Path):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=500, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    depthscope.apply(model, DeEscalate(0.5))
    model.save_pretrained(tmp_path / "model")
    found = json.loads(run(f"hf:{tmp_path / 'model'}", "--samples", "2", "--tokens", "16", "--json").out)
    (note,) = [note for note in found["metadata"]["notes"] if "saved with" in note]
    assert 'DeEscalate(tau=0.5, at="output")' in note
    assert "restore(model)" in note
