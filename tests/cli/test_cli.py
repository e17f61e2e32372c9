"""The program as a user runs it: in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

import depthscope
from depthscope.cli.console import sparkline


def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, "-m", "depthscope", *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == code, result.stderr
    return result


def test_help_and_version():
    shown = run("--help").stdout
    assert shown.index(" probe ") < shown.index(" fix ") < shown.index(" paths ")
    assert "--mask" not in run("probe", "--help").stdout
    assert "--mask" in run("probe", "--help-all").stdout
    assert run("--version").stdout == f"depthscope {depthscope.__version__}\n"


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(option: str):
    code = (
        "import sys; sys.argv = ['depthscope', sys.argv[1]]\n"
        "from depthscope.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pandas', 'pyarrow', 'transformers', 'matplotlib'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code, option], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("model", ["bret", "no_such_module:make", ":make", "Some/model"])
def test_a_mistyped_model_is_refused_before_anything_heavy_is_imported(model: str):
    code = (
        "import sys; sys.argv = ['depthscope', 'probe', sys.argv[1]]\n"
        "from depthscope.cli import main\n"
        "try: main()\n"
        "except SystemExit as error: assert error.code == 2\n"
        "assert not {'torch', 'numpy', 'pandas', 'transformers'} & sys.modules.keys()"
    )
    result = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("\n") == 1
    assert f"model {model!r}: did you mean 'bert'?" in result.stderr or f"{model!r}" in result.stderr


def test_demo_shows_the_collapse_and_the_repair():
    out = run("demo", "--depth", "30").stdout
    last = next(line.split() for line in out.splitlines() if line.split()[:1] == ["30"])
    post, mended, pre = map(float, last[1:])
    assert post > 0.99
    assert mended < 0.3
    assert mended < pre < post


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--depth", "0"], "expected a whole number from 1 to"),
        (["dmo"], "No such command 'dmo'. Did you mean 'demo'? Try --help.\n"),
        (
            ["probe", "bert", "--seed", "-1"],
            "'--seed': expected a whole number from 0 to",
        ),
    ],
)
def test_a_users_mistake_ends_in_a_message_and_code_2(arguments: list[str], message: str):
    result = run(*arguments, code=2)
    assert message in result.stderr
    assert result.stderr.startswith("depthscope: ")
    assert result.stderr.count("\n") == 1


def test_a_missing_extra_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from depthscope.extras import MissingExtra, require

    with pytest.raises(MissingExtra, match=r"^this needs no_such_module: pip install 'depthscope\[figures\]'$"):
        require("no_such_module.figure", "figures")
    broken = tmp_path / "broken_module.py"
    broken.write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        require("broken_module", "figures")


def test_sparkline():
    assert sparkline([0, 0.5, 1, float("nan"), 2, -1]) == "▁▅█·█▁"
    assert len(sparkline(list(range(1000)), high=999, width=50)) == 50
    assert sparkline([3, 3], low=3, high=3) == "▁▁"
