"""`depthscope train` as a user meets it."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from depthscope.cli.app import main
from depthscope.report import read_metrics
from depthscope_lab.training.config import ImageConfig, LanguageConfig, field_help
from depthscope_lab.training.display import Terminal
from depthscope_lab.training.loop import NonFiniteLoss
from depthscope_lab.training.run import Run
from depthscope_lab.training.variants import VARIANTS

TINY = ("--depth", "1", "--width", "8", "--set", "ffn_width=8")
SMALL = ("vit-digits", *TINY, "--set", "heads=1", "--steps", "3")
QUIET = ("--set", "tracker=none", "--cpu", "--set", "log_every=1")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The program in this process: exit code, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["depthscope", "train", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def test_without_a_recipe_they_are_listed(run):
    code, out, _err = run()
    assert code == 0
    assert "vit-digits" in out
    assert "vit-cifar10" in out


def test_a_gate_ends_a_run_with_code_3_and_says_what_it_saw(run, tmp_path: Path):
    out = tmp_path / "out"
    small = (*SMALL[:-1], "9", "--set", "lr=0.1")  # too large a rate: the loss soon rises
    rules = ("--stop-if", "token_similarity>-9 for 2 after 0", "--set", "warn_if=cosine_similarity>-9 after 0")
    code, printed, err = run(*small, *QUIET, "--set", "watch_every=1", *rules, "--json", "--out", str(out))
    assert code == 3
    found = json.loads(printed)
    assert (found["step"], found["total_steps"], found["signal"], found["failed"]) == (4, 9, None, None)
    assert found["stopped"].startswith(
        "token_similarity>-9 in half of the blocks for 2 after 0 holds since step 0; step 3: "
    )
    *_, last = err.splitlines()
    assert last == f"depthscope: stopped at step 4 of 9, saved in {found['checkpoint']}: {found['stopped']}"
    assert "warning: cosine_similarity>-9 in half of the blocks after 0 holds since step 0" in err
    code, printed, err = run(*small, *QUIET, "--json", "--out", str(out), "--resume")
    assert (code, json.loads(printed)["stopped"]) == (0, None)


def test_the_variants_are_listed_with_them(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    _code, out, _err = run()
    for name, variant in VARIANTS.items():
        assert any(line.startswith(f"{name} ") and variant.title in line for line in out.splitlines())


@pytest.mark.parametrize(("recipe", "config"), [("vit-digits", ImageConfig), ("txl-manual", LanguageConfig)])
def test_a_dry_run_lists_every_setting_with_its_help(run, recipe: str, config: type):
    code, out, _err = run(recipe, "--dry-run", "--set", "watch_every=0", "--set", "clip_norm=0.25")
    assert code == 0
    lines = out.splitlines()
    for name, text in (field_help(config) | field_help(Run)).items():
        assert any(line.split()[0] == name and line.endswith(text) for line in lines), name
    assert any(line.split()[:2] == ["clip_norm", "0.25"] for line in lines)
    assert any(line.split()[:2] == ["watch_every", "none"] for line in lines)


def test_the_help_has_few_flags_and_needs_no_torch():
    code = (
        "import sys; sys.argv = ['depthscope', 'train', '--help']\n"
        "from depthscope.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    flags = {word for word in shown.split() if re.fullmatch("--[a-z-]+", word)}
    assert {"--variant", "--set", "--depth", "--resume"} <= flags
    assert "--stop-if" in flags
    assert len(flags) <= 20


def test_a_dry_run_shows_everything_and_trains_nothing(run, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, rest, _err = run("vit-cifar10", "--variant", "post", "--dry-run")
    assert code == 0
    shown = {line.split()[0]: line.split()[1] for line in rest.splitlines()}
    assert (shown["depth"], shown["lr"], shown["variant"]) == ("80", "5e-05", "post")
    assert (shown["wiring"], shown["remedies"], shown["initialiser"]) == ("post", "none", "pytorch_default")
    # By hand: a block has 4d² + 4d (attention), 2·2d² + 3d (FFN of width 2d), 4d (norms) for d = 192
    block = 4 * 192**2 + 4 * 192 + 4 * 192**2 + 3 * 192 + 4 * 192
    parameters = 80 * block + (48 * 192 + 192) + 192 + 65 * 192 + (192 * 10 + 10)
    assert f"parameters  {parameters:,}" in rest
    assert "steps       58,500 (390 per epoch)" in rest
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_the_papers_transformer_xl_has_its_size(run):
    code, out, _err = run("txl-wikitext103", "--variant", "deescalated-leaking", "--dry-run")
    assert code == 0
    assert "parameters  200,987,338\n" in out
    assert "steps       50,000 (17205 per epoch)" in out


def test_a_variant_that_a_recipe_does_not_have_is_refused(run):
    code, _out, err = run("vit-digits", "--variant", "deescalated-leaking", "--dry-run")
    assert code == 2
    assert "vit-digits has no variant 'deescalated-leaking': expected one of post, pre, deescalated" in err


def test_a_language_model_is_trained_and_shows_its_perplexity(run, tmp_path: Path):
    settings = ("heads=2", "eval_segments=2", "hidden_segments=1", "warmup_steps=1", "clip_norm=1")
    small = (*TINY, "--steps", "2", *(part for setting in settings for part in ("--set", setting)))
    leaking = ("--variant", "deescalated-leaking")
    code, printed, shown = run("txl-manual", *small, *leaking, *QUIET, "--out", str(tmp_path / "run"))
    assert code == 0, shown
    assert printed.startswith("done: 2 steps, valid loss 7.")
    assert "valid perplexity future hidden " in printed
    assert "tokens/s" in shown


def test_the_memory_estimate_grows_with_the_batch_and_falls_with_checkpointing():
    from depthscope_lab.training.estimate import estimate
    from depthscope_lab.training.recipes import vit_digits

    config = vit_digits("deescalated").changed(depth=12)
    plain, double, checkpointed, shared = (
        estimate(changed)
        for changed in (
            config,
            config.changed(batch_size=128),
            config.changed(checkpoint_activations=True),
            config.changed(accumulate=2),
        )
    )
    assert double.activations == pytest.approx(2 * plain.activations, rel=0.01)  # but for a few vectors
    assert shared.activations == pytest.approx(plain.activations / 2, rel=0.01)
    assert checkpointed.activations < plain.activations / 4
    assert plain.weights == 4 * plain.parameters
    # A post-norm block keeps at least its input, q, k, v, attention, and the hidden layer of its FFN.
    tokens = 64 * 17 * 4
    assert plain.activations > 12 * tokens * (5 * 64 + 128)


def test_a_short_run_leaves_what_it_says_and_can_be_continued(run, tmp_path: Path):
    out = str(tmp_path / "run")
    code, printed, shown = run(*SMALL, *QUIET, "--variant", "pre", "--set", "drop_at=0.5", "--out", out)
    assert code == 0
    assert printed.startswith("done: 3 steps, test loss ")
    assert "step 3/3  loss " in shown
    assert "images/s" in shown
    assert "t_sim 0." in shown
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert (config["variant"], config["drop_at"], config["lr"]) == ("pre", [0.5], 1e-3)
    assert [row["lr"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "lr" in row] == [1e-3, 1e-3, 2e-4]
    code, _printed, shown = run(*SMALL, *QUIET, "--variant", "pre", "--set", "drop_at=0.5", "--out", out)
    assert code == 2
    assert "--resume continues it" in shown
    code, printed, shown = run(*SMALL, *QUIET, "--variant", "pre", "--set", "drop_at=0.5", "--out", out, "--resume")
    assert code == 0
    assert "continuing at step 3 of 3" in shown
    code, _printed, shown = run(*SMALL, *QUIET, "--variant", "pre", "--lr", "1", "--out", out, "--resume")
    assert code == 2
    assert "lr: 0.001 → 1.0; drop_at: [0.5] → [0.7, 0.9]" in shown


def test_interrupted_it_saves_and_says_how_to_go_on(run, tmp_path: Path, monkeypatch):
    def interrupt(_self, step: int, *_a, **_k) -> None:
        if step == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Terminal, "logged", interrupt)
    code, _out, err = run(*SMALL, *QUIET, "--out", str(tmp_path))
    assert code == 130
    assert err.splitlines()[-1].startswith("depthscope: stopped at step 2 of 3, saved in ")
    assert err.splitlines()[-1].endswith("the same command with --resume goes on")


def test_a_loss_that_is_not_finite_is_one_line_and_code_4(run, tmp_path: Path, monkeypatch):
    def overflow(*_a, **_k):
        raise NonFiniteLoss("the loss is not finite at step 1")

    monkeypatch.setattr("depthscope_lab.training.loop.train", overflow)
    code, _out, err = run(*SMALL, *QUIET, "--out", str(tmp_path))
    assert code == 4
    assert err.splitlines()[-1] == "depthscope: the loss is not finite at step 1"


@pytest.mark.parametrize(("size", "rank"), [("0", "0"), ("-1", "0"), ("two", "0"), ("2", "2"), ("2", "x")])
def test_an_environment_that_is_not_torchruns_is_one_line(run, monkeypatch, size: str, rank: str):
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("RANK", rank)
    for more in ([], ["--dry-run"]):
        code, _out, err = run(*SMALL, *more)
        assert code == 2
        assert err.endswith(f"as torchrun sets them, got WORLD_SIZE={size!r}, RANK={rank!r}\n")


def test_a_home_is_expanded_and_a_mistake_leaves_no_folder(run, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    code, _out, _err = run(*SMALL, *QUIET, "--data", "folder", "--out=~/x/y")
    assert code == 2
    assert list(tmp_path.iterdir()) == []
    code, out, _err = run(*SMALL, *QUIET, "--out=~/x/y")
    assert code == 0
    assert str(tmp_path / "x" / "y" / "checkpoints") in out
    own = [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")]  # matplotlib has folders at home
    assert own == ["x"]


def test_a_run_that_ends_without_a_finite_loss_is_one_line_and_code_4(run, tmp_path: Path):
    code, out, err = run(*SMALL[:-1], "1", *QUIET, "--lr", "1e37", "--out", str(tmp_path))
    assert (code, out) == (4, "")
    assert re.search(r"\ndepthscope: the .* is not finite at step 1.*checkpoint.*\n$", err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vit-digit"], "did you mean 'vit-digits'"),
        (["--resume", "--out", "x"], "expected a recipe before its options; `depthscope train` alone lists them"),
        (["--depth", "3"], "expected a recipe before its options"),
        (["vit-digits", "--dept", "3"], "--depth"),
        (["vit-digits", "--variant", "depth"], "expected one of post, pre"),
        (["vit-digits", "--variant", "pots"], "unknown variant 'pots': did you mean 'post'?"),
        (["vit-digits", "--variant", "post+de-escalation(0.5)"], "every option of"),
        (["vit-digits", "--variant", "deescalated(tau=7)"], "expected tau in [0, 1], got 7"),
        (["vit-digits", "--variant", "post@xaver"], "did you mean 'xavier'?"),
        (["vit-digits", "--set", "dept=3"], "unknown setting 'dept': did you mean 'depth'?"),
        (["vit-digits", "--set", "segment=3"], "unknown setting 'segment'"),
        (["vit-digits", "--set", "keep=0"], "expected keep of at least 1, got 0"),
        (["vit-digits", "--set", "tracker=nome"], "did you mean 'none'?"),
        (["vit-digits", "--depth", "0"], "expected depth greater than 0, got 0"),
        (["vit-digits", "--set", "drop_at=half"], "expected drop_at to be numbers separated by commas, got 'half'"),
        (["vit-digits", "--data", "folder"], "brings its data"),
        (["vit-cifar10", "--data", "nowhere"], "expected a folder with CIFAR-10, got 'nowhere'"),
        (["vit-digits", "--set", "accumulate=7"], "accumulated parts divide, got 64"),
        (["vit-digits", "--depth", "100000000"], "fits into memory"),
        (["vit-digits", "--set", "heads=5"], "heads that divide the width"),
        ([*SMALL, "--out", "/dev/null/x"], "can be written for --out, got '/dev/null/x': Not a directory"),
        ([*SMALL, "--out", "/proc/x"], "can be written for --out, got '/proc/x'"),
        ([*SMALL, "--out=~nobody-of-this-name/x"], "expected a file or a folder, got '~nobody-of-this-name/x'"),
        (["vit-digits", "--depth", "2000000000"], "fits into memory, got depth 2000000000, "),
        (["vit-digits", "--width", "999999996"], "width 999999996"),
        (["vit-digits", "--width", "4000000000"], "sizes that torch can count with, got width 4000000000"),
        (["vit-digits", "--width", "9" * 30], f"width of at most 9223372036854775807 (2^63 − 1), got {'9' * 30}"),
        (["txl-manual", "--set", "segment=99999999999"], "fits into memory, got depth 60, segment 99999999999"),
        (["vit-digits", "--lr", "1e38"], "expected lr of at most 3.4e+37, as float32 holds no longer steps, got 1e+38"),
        (["vit-digits", "--lr", "1e37", "--set", "weight_decay=1e3"], "expected lr of at most 3.4e+35"),
        (["vit-digits", "--lr", "nan"], "expected lr to be finite, got nan"),
        (["vit-digits", "--set", "drop_factor=nan"], "expected drop_factor to be finite, got nan"),
        (["vit-digits", "--set", "drop_factor=-1"], "expected drop_factor of at least 0, got -1"),
        (["vit-digits", "--set", "drop_at=0.5,nan"], "expected drop_at to be finite, got nan"),
        (["vit-digits", "--set", "drop_at=0.5,7"], "expected drop_at to be shares of the run from 0 to 1, got 0.5,7.0"),
        (["vit-digits", "--set", "weight_decay=inf"], "expected weight_decay to be finite, got inf"),
        (["vit-digits", "--set", "patch_size=0"], "expected patch_size greater than 0, got 0"),
    ],
)
def test_a_mistake_is_one_line(run, arguments, message):
    code, _out, err = run(*arguments)
    assert code == 2
    assert message in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("depthscope: ")
