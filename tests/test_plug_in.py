"""A plug-in, built as a wheel and installed by pip: measure, family, remedy, study, chart, wiring and variants."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from warm import run_warm

SOURCE = Path(__file__).parent / "plug_in"
NAME, VERSION = "example_plug_in", "1.0"


def build_wheel(folder: Path, entry_points: str) -> Path:
    """A wheel of the package beside this file: its sources, its metadata, and a record of both."""
    information = f"{NAME}-{VERSION}.dist-info"
    files = {
        f"{NAME}/{path.name}": path.read_text(encoding="utf-8") for path in sorted((SOURCE / NAME).glob("*.py"))
    } | {
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{information}/entry_points.txt": entry_points,
    }
    digests = {
        name: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        for name, text in files.items()
    }
    record = "".join(f"{name},sha256={digests[name]},{len(text.encode())}\n" for name, text in files.items())
    wheel = folder / f"{NAME}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in (files | {f"{information}/RECORD": record + f"{information}/RECORD,,\n"}).items():
            archive.writestr(name, text)
    return wheel


def install(folder: Path, entry_points: str, by_pip: bool = False) -> dict[str, str]:
    """Installs the wheel into a folder of its own; the environment of a process that sees it."""
    wheel, site = build_wheel(folder, entry_points), folder / "site"
    if by_pip:
        install_by_pip(wheel, site)
    else:
        zipfile.ZipFile(wheel).extractall(site)
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def install_by_pip(wheel: Path, site: Path) -> None:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(pip, check=True, capture_output=True, timeout=300)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    points = (SOURCE / "entry_points.txt").read_text(encoding="utf-8")
    return install(tmp_path_factory.mktemp("installed"), points, by_pip=True)


def run(installed: dict[str, str], *command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    result = run_warm(*command, env=installed)
    assert result.returncode == code, result.stderr
    return result


def test_the_command_line_knows_the_measure_and_the_family(installed):
    model = "example_plug_in.models:make"
    found = json.loads(
        run(installed, "-m", "depthscope", "probe", model, "--json", "--measures", "token_spread,light").stdout
    )
    assert found["metadata"]["family"] == "soft"
    assert found["metadata"]["placement"] == "pre"
    assert all(value >= 1 for value in found["profile"]["token_spread"])
    everything = json.loads(run(installed, "-m", "depthscope", "probe", model, "--json", "--measures", "all").stdout)
    assert everything["profile"]["token_spread"] == found["profile"]["token_spread"]


def test_the_chart_is_on_the_page(installed, tmp_path: Path):
    model = "example_plug_in.models:make"
    run(installed, "-m", "depthscope", "probe", model, "--measures", "token_spread,light", "--out", str(tmp_path))
    assert "How unequal the tokens are" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_study_is_listed_and_computed(installed, tmp_path: Path):
    assert "soft-mean" in run(installed, "-m", "depthscope", "reproduce").stdout
    out = ("--out", str(tmp_path))
    found = json.loads(run(installed, "-m", "depthscope", "reproduce", "soft-mean", *out, "--quick", "--json").stdout)
    assert [claim["verdict"] for claim in found["studies"]["soft-mean"]["claims"]] == ["reproduced"]
    assert (tmp_path / "soft-mean" / "figure.png").stat().st_size > 1000


def test_the_remedy_goes_in_is_recorded_and_comes_out(installed):
    code = """
import torch, depthscope
from depthscope.remedies import applied
from depthscope.remedies.record import from_dict, to_dict
from example_plug_in.models import make
from example_plug_in.remedies import Shrink
torch.manual_seed(0)
model, x = make()
before = model(x)
depthscope.apply(model, Shrink(0.25))
assert [entry.block for entry in applied(model)] == ["blocks.0", "blocks.1", "blocks.2"]
assert not torch.allclose(model(x), before)
assert from_dict(to_dict(Shrink(0.25))) == Shrink(0.25) == from_dict({"remedy": "shrink", "factor": 0.25})
assert torch.equal(depthscope.remove(model)(x), before)
"""
    run(installed, "-c", code)


@pytest.mark.parametrize(
    ("variant", "wiring", "remedies"),
    [
        ("shrunk", "post", [{"remedy": "shrink", "blocks": None, "every": 1, "allow_leak": False, "factor": 0.5}]),
        ("parallel", "parallel", []),
    ],
)
def test_the_variants_are_trained(installed, tmp_path: Path, variant: str, wiring: str, remedies: list[dict]):
    sizes = ("--depth", "2", "--width", "16", "--steps", "2", "--cpu", "--set", "tracker=none")
    out = ("--out", str(tmp_path))
    run(installed, "-m", "depthscope", "train", "vit-digits", "--variant", variant, *sizes, *out)
    config = json.loads((tmp_path / "config.json").read_text())["config"]
    assert (config["variant"], config["wiring"], config["remedies"]) == (variant, wiring, remedies)
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 2


def test_a_plug_in_that_takes_one_of_our_names_is_named(tmp_path: Path):
    taken = install(tmp_path, "[depthscope.measures]\nmine = example_plug_in.clash:MINE\n")
    site = Path(taken["PYTHONPATH"].split(os.pathsep)[0])
    (site / NAME / "clash.py").write_text(
        "from depthscope.measures import Measure, effective_rank\n"
        "MINE = Measure('token_similarity', 'tokens', effective_rank)\n"
    )
    command = ("-m", "depthscope", "probe", "encoder", "--depth", "2", "--measures", "all")
    message = run(taken, *command, code=2).stderr
    assert "exists twice: one of depthscope, one of example_plug_in" in message
    assert message.count("\n") == 1


def test_a_plug_in_that_takes_the_name_of_a_command_is_named(tmp_path: Path):
    taken = install(tmp_path, "[depthscope.commands]\nprobe = example_plug_in.clash:probe\n")
    site = Path(taken["PYTHONPATH"].split(os.pathsep)[0])
    (site / NAME / "clash.py").write_text("def probe() -> None: ...\n")
    message = run(taken, "-m", "depthscope", "--version", code=2).stderr
    assert message == "depthscope: the command 'probe' exists twice: one of depthscope, one of example_plug_in\n"


def test_a_plug_in_that_is_broken_does_not_stop_the_rest(tmp_path: Path):
    broken = install(tmp_path, "[depthscope.measures]\nmine = example_plug_in.missing:MINE\n")
    result = run(
        broken, "-m", "depthscope", "probe", "encoder", "--depth", "2", "--width", "16", "--heads", "2", "--json"
    )
    assert json.loads(result.stdout)["blocks"] == 2
    assert "example_plug_in offers 'mine' in depthscope.measures" in result.stderr
