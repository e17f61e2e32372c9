"""A processor that announces AMX and kills what uses it, as a process that kills itself."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from depthscope import half_precision
from depthscope.half_precision import VARIABLE, WITHOUT_AMX, require_half_precision
from processes import ENVIRONMENT
from tiny_training import run_in, tiny_config

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
DIES_OF_AMX = (
    f"import os, signal; os.environ.get('{VARIABLE}') == '{WITHOUT_AMX}' or os.kill(os.getpid(), signal.SIGILL)"
)


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch):
    """Makes this processor one whose trial is the given code, and says how often it was tried."""
    monkeypatch.setenv(VARIABLE, "")
    require_half_precision.cache_clear()
    tried = []
    run = subprocess.run

    def is_(code: str) -> list[int]:
        trial = (sys.executable, "-c", code)
        monkeypatch.setattr(half_precision, "TRIAL", trial)

        def counted(command: tuple[str, ...], **options: object) -> subprocess.CompletedProcess[bytes]:
            result = run(command, **options)
            if command == trial:
                tried.append(result.returncode)
            return result

        monkeypatch.setattr(half_precision.subprocess, "run", counted)
        return tried

    yield is_
    require_half_precision.cache_clear()


def test_a_processor_that_can_is_tried_once_and_left_alone(processor):
    tried = processor("raise SystemExit(1)")  # an error is not a death
    require_half_precision()
    require_half_precision()
    assert tried == [1]
    assert os.environ[VARIABLE] == ""


def test_a_processor_that_dies_of_amx_goes_on_without(processor):
    tried = processor(DIES_OF_AMX)
    require_half_precision()
    assert tried == [-signal.SIGILL, 0]
    assert os.environ[VARIABLE] == WITHOUT_AMX


def test_a_processor_that_always_dies_is_told_of_in_one_line(processor):
    tried = processor(DIES)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^this processor kills programs that .*; take float32$"):
            require_half_precision()
    assert tried[:2] == [-signal.SIGILL, -signal.SIGILL]


def test_the_trial_itself_runs_here():
    subprocess.run(half_precision.TRIAL, env=ENVIRONMENT, check=True)


def test_the_variable_is_heeded_when_set_after_torch_was_imported():
    """Its log says what oneDNN saw of the processor."""
    code = (
        "import os, torch\n"
        f"os.environ['{VARIABLE}'] = 'AVX2'\n"
        "torch.nn.functional.conv2d(torch.ones(2, 3, 16, 16), torch.ones(4, 3, 3, 3))\n"
    )
    environment = ENVIRONMENT | {"ONEDNN_VERBOSE": "1"}
    environment.pop(VARIABLE, None)
    log = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    isa = [line for line in log.stdout.splitlines() if "cpu,isa:" in line]
    if not isa:
        pytest.skip("this build of torch has no oneDNN")
    assert "AVX-512" not in isa[0]


@pytest.mark.parametrize("command", ["probe", "fix"])
def test_the_program_tries_before_it_multiplies_and_only_when_asked(command: str, processor, program):
    shape = ("encoder", "--depth", "2", "--width", "16", "--heads", "2", "--tokens", "8")
    tried = processor(DIES)
    program(command, *shape)
    program(command, *shape, "--dtype", "float64")
    assert tried == []
    said = program(command, *shape, "--dtype", "bfloat16", code=2).err
    assert said.startswith("depthscope: this processor kills programs")
    assert said.count("\n") == 1
    processor(DIES_OF_AMX)
    require_half_precision.cache_clear()
    program(command, *shape, "--dtype", "bfloat16")
    assert os.environ[VARIABLE] == WITHOUT_AMX


def test_a_factorys_own_bfloat16_is_tried_too(processor, program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "in_half.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def make():\n"
        "    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)\n"
        "    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).bfloat16()\n"
        "    return model, torch.randn(2, 8, 16).bfloat16()\n"
    )
    monkeypatch.chdir(tmp_path)
    tried = processor(DIES)
    program("probe", "in_half:make", code=2)
    assert tried == [-signal.SIGILL, -signal.SIGILL]


def test_training_tries_too(processor, tmp_path: Path):
    tried = processor(DIES)
    run_in(tmp_path / "single", tiny_config(steps=1))
    assert tried == []
    with pytest.raises(ValueError, match="this processor kills programs"):
        run_in(tmp_path / "mixed", tiny_config(steps=1, precision="bfloat16"))


def test_the_tests_themselves_begin_with_a_trial(tmp_path: Path):
    """A session on a processor that always dies ends in one line instead of a death in the middle."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys; from depthscope import half_precision; half_precision.TRIAL = (sys.executable, '-c', {DIES!r})\n"
    )
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])}
    command = [sys.executable, "-m", "pytest", "-q", str(Path(__file__).parents[1] / "test_files.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "this processor kills programs" in result.stderr
