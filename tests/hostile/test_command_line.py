"""The command line under random options and hostile values, and damaged files: one line, never a traceback."""

import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest

from depthscope import memory
from depthscope.cli.app import main
from depthscope.measures import MEASURES
from depthscope.probing import Profile

SMALL = {"--depth": "2", "--width": "16", "--heads": "2", "--tokens": "4", "--samples": "2"}
NUMBERS = ["0", "-1", "nan", "inf", "-inf", "1e38", "1e9", "2000000000", "99999999999999999999", "0.5", "x", "", "½"]
NAMES = ["", "nan", "[bold]x[/bold]", "a$b_{", "\x1b[31mred", "../..", "/dev/null", "~nobody/x", "None", "0,0", "all"]
MODEL_OPTIONS = {
    **dict.fromkeys(["--depth", "--width", "--heads", "--tokens", "--samples", "--batch"], NUMBERS),
    **dict.fromkeys(["--seed", "--token-axis"], NUMBERS),
    **dict.fromkeys(["--text", "--images", "--device", "--dtype", "--blocks", "--part", "--mask"], NAMES),
    "--out": ["/dev/null/x", "~nobody/x", ""],
}
SETTINGS = [f"{name}={value}" for name in ("patch_size", "heads", "warmup_steps", "no_such") for value in NUMBERS]
# Nothing is trained, and no study is computed.
COMMANDS: dict[str, tuple[list[str], dict[str, list[str]]]] = {
    "probe": (
        ["encoder"],
        MODEL_OPTIONS | dict.fromkeys(["--measures", "--stations", "--exclude-tokens", "--fail-on"], NAMES + NUMBERS),
    ),
    "fix": (["encoder"], MODEL_OPTIONS | dict.fromkeys(["--tau", "--alpha"], NUMBERS)),
    "demo": ([], {"--depth": NUMBERS}),
    "train": (
        ["vit-digits", "--dry-run"],
        dict.fromkeys(["--depth", "--width", "--lr", "--steps", "--epochs", "--batch-size", "--seed"], NUMBERS)
        | {"--variant": NAMES, "--set": SETTINGS},
    ),
    "compare": (
        ["vit-digits", "--dry-run"],
        dict.fromkeys(["--seeds", "--depths", "--lr", "--steps", "--lr-grid", "--jobs"], NUMBERS)
        | {"--variants": NAMES, "--set": SETTINGS},
    ),
    "reproduce": (["no-such-study"], {"--seed": NUMBERS, "--trials": NUMBERS, "--scale": NAMES, "--data": NAMES}),
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Calls the program in this process → (exit code, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["depthscope", *arguments])
        with pytest.raises(SystemExit) as exit:
            main()
        printed = capfd.readouterr()
        assert isinstance(exit.value.code, int)
        return exit.value.code, printed.out, printed.err

    return call


def _lines(generator: random.Random) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Command lines with one to three hostile values, and these: every value of every option is in one of them."""
    for command, (positional, options) in COMMANDS.items():
        left = [(name, value) for name, values in sorted(options.items()) for value in values]
        generator.shuffle(left)
        while left:
            hostile = dict(left[: generator.randint(1, 3)])
            left = [pair for pair in left if pair not in hostile.items()]
            small = {"demo": {"--depth": "2"}, "probe": SMALL, "fix": SMALL}.get(command, {})
            values = {name: value for name, value in small.items() if name not in hostile} | hostile
            flags = [f"{name}={value}" for name, value in values.items()]
            yield [command, *positional, *flags], hostile | {"": positional[0] if positional else ""}


def test_random_command_lines_end_in_a_result_or_in_one_line(run):
    """At least one of the values that may be the mistake stands in the line, or its option does if it is empty."""
    began = time.process_time()
    wrong, codes = [], []
    for arguments, hostile in _lines(random.Random(14)):
        try:
            code, out, err = run(*arguments)
        except Exception as error:
            wrong.append(f"{arguments}: {type(error).__name__}: {error}")
            continue
        codes.append(code)
        if not _ends_well(code, out, err, hostile):
            wrong.append(f"{arguments} → {code}: {out[:99]}{err}")
    assert not wrong, "\n".join(wrong)
    assert codes.count(2) > len(codes) / 3
    assert time.process_time() - began < 60


def _ends_well(code: int, out: str, err: str, hostile: dict[str, str]) -> bool:
    """A result that is shown (0; 3: a condition of --fail-on holds), or one line that repeats a hostile value (2), or
    that says of a training run that it diverged (4)."""
    if "\x1b[31m" in out + err or "Traceback" in err or "[Errno" in err:
        return False
    said = [line for line in err.splitlines() if line.startswith("depthscope: ")]
    if code == 2:
        repeated = any(_repeats(err, name, value) for name, value in hostile.items())
        return repeated and said == err.splitlines()[-1:]
    if code == 4:
        return len(said) == 1 and "not finite" in said[0]
    return bool(out.strip()) and len(said) == (code == 3) and code in (0, 3)


def test_training_for_real_ends_in_a_result_or_in_one_line(run, tmp_path: Path):
    strange = ["1e-300", "3", "7"]  # and allowed for some options
    generator, options = random.Random(14), {name: [*some, *strange] for name, some in COMMANDS["train"][1].items()}
    small = {"--depth": "1", "--width": "16", "--steps": "1", "--batch-size": "8"}
    wrong, codes = [], []
    for trial in range(24):
        name = generator.choice(sorted(set(options) - {"--steps", "--epochs"}))
        hostile = {name: generator.choice(options[name])}
        flags = [f"{option}={value}" for option, value in (small | hostile).items()]
        code, out, err = run("train", "vit-digits", *flags, f"--out={tmp_path / str(trial)}")
        codes.append(code)
        if not _ends_well(code, out, err, hostile):
            wrong.append(f"{flags} → {code}: {out[:99]}{err}")
    assert not wrong, "\n".join(wrong)
    assert set(codes) == {0, 2, 4}


@pytest.mark.parametrize("option", ["--measures", "--stations"])
def test_a_list_without_a_name_is_no_list(option: str, run):
    code, out, err = run("probe", "encoder", f"{option}=,,")
    assert (code, out) == (2, "")
    assert f"{option} with names separated by commas, got ',,'" in err


def _repeats(line: str, option: str, value: str) -> bool:
    if not value or not value.isprintable():
        return option.lstrip("-").split("-")[0] in line or "''" in line or "x1b" in line
    spelled = [value, value.split(",")[0], value.partition("=")[2] or value]
    if "=" in value and value.partition("=")[0] in line:  # the setting is the mistake
        return True
    with suppress(ValueError):
        spelled += [str(float(spelled[-1])), f"{float(spelled[-1]):g}"]
    return any(form in line for form in spelled)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["probe", "encoder", "--width", "999999936", "--heads", "8"], "999999936"),
        (["probe", "encoder", "--depth", "2000000000"], "2000000000"),
        (["probe", "encoder", "--depth", "1000000", "--width", "8", "--heads", "1"], "1000000"),
        (["probe", "encoder", "--depth", "1", "--width", "16", "--heads", "2", "--tokens", "2000000000"], "2000000000"),
        (
            ["probe", "encoder", "--depth", "1", "--width", "16", "--heads", "2", "--samples", "2000000000"],
            "2000000000",
        ),
        (["probe", "bert", "--depth", "1", "--width", "64", "--samples", "2000000000"], "2000000000"),
        (["probe", "vit", "--depth", "1", "--width", "64", "--samples", "2000000000"], "2000000000"),
        (["demo", "--depth", "2000000000"], "--depth 2000000000"),
        (["probe", "encoder", "--seed", "99999999999999999999"], "99999999999999999999"),
        (["demo", "--depth", "1e9"], "'1e9'"),
        (["probe", "encoder", "--device", "hpu"], "'hpu'"),
        (["probe", "bert", "--text", "/dev/zero"], "'/dev/zero'"),
        (["probe", "bert", "--depth", "1", "--width", "64", "--text", "/no/such/file"], "'/no/such/file'"),
        (["reproduce", "yu2024-fig1", "--seed", "99999999999999999999"], "99999999999999999999"),
    ],
)
def test_what_cannot_be_is_refused_at_once_and_repeated(arguments: list[str], value: str, run, tmp_path: Path):
    began = time.process_time()
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert value in err
    assert "[Errno" not in err
    assert time.process_time() - began < 20


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    values = [(block, "output", -1, next(iter(MEASURES)), 0, block / 7) for block in range(5)]
    frame = pd.DataFrame(values, columns=["block", "station", "head", "measure", "sample", "value"])
    metadata = {"model": "made up", "blocks": 4, "tokens": 8, "parts": {"encoder": 2, "decoder": 2}, "notes": ["one"]}
    return Profile(frame, metadata).save(folder)


def _load(folder: Path) -> Profile | None:
    """None if it is refused in one line."""
    try:
        return Profile.load(folder)
    except ValueError as error:
        return None if "\n" not in str(error) else pytest.fail(str(error))


def test_a_saved_profile_with_a_flipped_byte_is_the_same_or_refused(saved: Path, tmp_path: Path):
    generator, whole = random.Random(14), Profile.load(saved)
    files = {path.name: path.read_bytes() for path in saved.iterdir()}
    refused = 0
    for trial in range(200):
        name = sorted(files)[trial % len(files)]
        damaged = bytearray(files[name])
        damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        for other, content in files.items():
            (tmp_path / other).write_bytes(bytes(damaged) if other == name else content)
        found = _load(tmp_path)
        refused += found is None
        if found is not None:
            assert found.metadata == whole.metadata
            pd.testing.assert_frame_equal(found.frame, whole.frame)
    assert refused > 150


def test_a_saved_profile_without_sums_and_with_nonsense_in_it_is_refused(saved: Path, tmp_path: Path):
    """As of a profile that was saved before there were sums."""
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    about = json.loads((saved / "profile.json").read_text())
    del about["files"], about["sha256"], about["kind"]
    for change in (
        {"blocks": 10**9},
        {"blocks": -1},
        {"blocks": "4"},
        {"blocks": None},
        {"parts": {"encoder": 10**9}},
        {"parts": [2, 2]},
        {"parts": {"encoder": "2"}},
    ):
        (tmp_path / "profile.json").write_text(json.dumps(about | change))
        assert _load(tmp_path) is None, change
    for text in ("[]", "null", "7", '"x"', "[" * 100_000):
        (tmp_path / "profile.json").write_text(text)
        assert _load(tmp_path) is None, text[:9]
    (tmp_path / "profile.json").write_text(json.dumps(about))
    assert _load(tmp_path) is not None


@pytest.mark.parametrize(
    "arguments",
    [
        ["t5", "--depth=1", "--width=64", "--samples=1", "--tokens=200000"],
        ["encoder", "--depth=1", "--width=2000", "--heads=2", "--samples=4", "--tokens=500000"],
    ],
)
def test_what_grows_with_the_square_of_the_tokens_is_counted_first(arguments: list[str], run, monkeypatch):
    """Attention matrices, where there are any, and the activations of one block."""
    monkeypatch.setattr(memory, "available_memory", lambda: 20 * 10**9)
    began = time.process_time()
    code, out, err = run("probe", *arguments)
    assert (code, out) == (2, "")
    assert next(a for a in arguments if a.startswith("--tokens=")).partition("=")[2] in err
    assert err.startswith("depthscope: expected input that fits into memory")
    assert time.process_time() - began < 10


@pytest.mark.parametrize("measures", ["all", "delta"])
def test_days_of_attention_are_refused_first(measures: str, run):
    """No n × n matrix is made any more, and n² scores still take their time."""
    began = time.process_time()
    small = ("--depth=1", "--width=16", "--heads=2", "--samples=1")
    code, out, err = run("probe", "encoder", *small, "--tokens=200000", f"--measures={measures}")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "expected at most 65536 tokens for" in err
    assert "got --tokens 200000" in err
    assert time.process_time() - began < 10


def test_long_sequences_cost_what_their_tokens_cost(run):
    """Solved as for padded sequences, the split of the energy takes n³ steps: a minute and a half for 4000 tokens."""
    began = time.process_time()
    code, out, _ = run("probe", "encoder", "--depth=1", "--width=16", "--heads=2", "--tokens=4000", "--samples=2")
    assert code == 0
    assert "4000 tokens" in out
    assert time.process_time() - began < 40


@pytest.mark.parametrize("value", ["1e38", "1e300", "1001", "-1", "-1e-30", "nan", "inf"])
@pytest.mark.parametrize("tau", ["recommended", "0.5"])
def test_a_weight_that_cannot_be_meant_is_refused_also_where_no_remedy_is_put_in(value: str, tau: str, run):
    small = [f"{name}={number}" for name, number in SMALL.items()]
    code, out, err = run("fix", "encoder", *small, f"--alpha={value}", f"--tau={tau}")
    assert (code, out) == (2, "")
    assert f"'--alpha': expected a number in [0, 1000], got '{value}'" in err
