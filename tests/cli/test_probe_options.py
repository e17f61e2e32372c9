"""Options of `depthscope probe` that are easily dropped in silence: they are honoured or refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--exclude-tokens", ""], "expected --exclude-tokens"),
        (["--exclude-tokens", "500"], "cannot exclude token 500"),
        (["--skip-run", "3"], "--skip-run goes with --skip-loss"),
        (["--seed", "99999999999999999999"], "--seed"),
        (["--tokens", "100000000000"], "memory"),
    ],
)
def test_options_are_honoured_or_refused(arguments: list[str], message: str):
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "depthscope",
            "probe",
            "encoder",
            "--depth",
            "1",
            "--width",
            "8",
            "--heads",
            "2",
            *arguments,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_attention_alone_is_shown_drawn_and_printed(tmp_path: Path):
    command = [sys.executable, "-m", "depthscope", "probe", "encoder", "--depth", "2", "--width", "8", "--heads", "2"]
    command += ["--measures", "delta", "--json", "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(result.stdout)
    assert len(found["attention"]["delta"]) == 3
    assert (tmp_path / "profile.png").exists()
