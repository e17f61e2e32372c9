"""`hashes/`: made from the index by `make lock`, named by `make`, and compared by pip."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from hashlib import sha256
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SUM = {name: sha256(name.encode()).hexdigest() for name in ("x86", "mac", "musl", "old", "sdist", "other", "withdrawn")}
PAGE = f"""<!DOCTYPE html><html><body>
<a href="https://files.example/a/Stub_Package-1.2-cp311-cp311-manylinux_2_28_x86_64.whl#sha256={SUM["x86"]}">x</a>
<a href="../../files/stub_package-1.2-cp39-abi3-macosx_11_0_arm64.whl#sha256={SUM["mac"]}" data-requires-python="3">
<a href="stub_package-1.2-cp311-cp311-musllinux_1_2_x86_64.whl#sha256={SUM["musl"]}">no torch there</a>
<a href="stub_package-1.2-cp310-cp310-manylinux_2_28_x86_64.whl#sha256={SUM["old"]}">an older Python</a>
<a href="stub_package-1.2.tar.gz#sha256={SUM["sdist"]}">a source</a>
<a href="stub_package-1.20-py3-none-any.whl#sha256={SUM["other"]}">another version</a>
<a href="stub_package-1.2-1-py3-none-any.whl#sha256={SUM["withdrawn"]}" data-yanked="broken">a withdrawn build</a>
</body></html>"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    described = importlib.util.spec_from_file_location("lock", ROOT / "scripts" / "lock.py")
    described.loader.exec_module(module := importlib.util.module_from_spec(described))
    return module


def hashed(name: str) -> dict[str, str]:
    text = (ROOT / "hashes" / name).read_text()
    assert re.findall(r"(?m)^(\S+==\S+) \\\n    --hash=sha256:[0-9a-f]{64}", text) == re.findall(r"\S+==\S+", text)
    return dict(re.findall(r"(?m)^(\S+)==(\S+)", text))


def test_of_a_page_the_wheels_of_that_version_for_our_machines_are_taken(script: ModuleType):
    lines = script.lock({"stub-package": "1.2"}, {"stub-package": PAGE}.__getitem__)
    sums = sorted([SUM["x86"], SUM["mac"]])
    assert lines == f"stub-package==1.2 \\\n    --hash=sha256:{sums[0]} \\\n    --hash=sha256:{sums[1]}\n"


@pytest.mark.parametrize("page", ["", PAGE.replace("-1.2-", "-1.3-")])
def test_a_version_without_a_wheel_is_an_error(page: str, script: ModuleType):
    with pytest.raises(SystemExit, match=r"no wheel of stub-package 1\.2"):
        script.lock({"stub-package": "1.2"}, lambda _name: page)


def test_an_index_without_sums_is_an_error(script: ModuleType):
    with pytest.raises(SystemExit, match="no SHA-256"):
        script.lock({"stub-package": "1.2"}, lambda _name: PAGE.replace("#sha256=", "#md5="))


def test_pip_takes_what_has_the_sum_and_nothing_else(tmp_path: Path, script: ModuleType):
    wheel = tmp_path / "stub_package-1.2-py3-none-any.whl"

    def install(word: str) -> subprocess.CompletedProcess[str]:
        described = "stub_package-1.2.dist-info"
        with zipfile.ZipFile(wheel, "w") as file:
            file.writestr("stub.py", f"word = {word!r}\n")
            file.writestr(f"{described}/METADATA", "Metadata-Version: 2.1\nName: stub-package\nVersion: 1.2\n")
            file.writestr(f"{described}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            file.writestr(f"{described}/RECORD", "")
        if not lines.exists():
            page = f'<a href="{wheel.name}#sha256={sha256(wheel.read_bytes()).hexdigest()}">it</a>'
            lines.write_text(script.lock({"stub-package": "1.2"}, lambda _name: page))
        alone = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        shell = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "install", "--dry-run"]
        return subprocess.run(
            [*shell, "--no-index", "--find-links", str(tmp_path), *options, str(lines)],
            env=alone | {"PIP_CONFIG_FILE": os.devnull},
            capture_output=True,
            text=True,
            check=False,
        )

    (options,) = {tuple(line.split()[5:-1]) for line in made("yes") if "--require-hashes" in line}
    lines = tmp_path / "lines.txt"
    assert "Would install stub-package-1.2" in install("as it was").stdout
    refused = install("other")
    assert refused.returncode != 0
    assert "DO NOT MATCH THE HASHES" in refused.stderr


def made(hashes: str) -> list[str]:
    """What make would run for the tests on a machine without `.venv`."""
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", f"HASHES={hashes}", ".venv/installed-dev"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=True).stdout.splitlines()


def test_make_compares_hashes_before_it_installs_anything_else():
    installs = [line for line in made("yes") if " pip install " in line]
    assert [line.split()[-1] for line in installs if "--require-hashes" in line] == [
        "hashes/run.txt",
        "hashes/develop.txt",
    ]
    places = [index for index, line in enumerate(installs) if "--require-hashes" in line]
    assert places[0] == 0
    assert "'.[dev]'" in installs[places[1] + 1]
    editable = [line for line in installs if "--editable" in line]
    assert all("--no-build-isolation" in line for line in editable)  # else pip would fetch what builds, without sums
    without = made("no")
    assert not any("--require-hashes" in line for line in without)
    assert sum(line.startswith('echo "packages are taken by version') for line in without) == 2


def test_the_hashes_are_of_the_versions_in_the_constraints(script: ModuleType):
    pins = script.read_pins((ROOT / "constraints.txt").read_text())
    run, develop = hashed("run.txt"), hashed("develop.txt")
    assert not run.keys() & develop.keys()
    assert run | develop == {name: version for name, version in pins.items() if name not in script.BY_VERSION_ONLY}
    assert run.keys() >= {"numpy", "safetensors", "pandas", "pyarrow", "typer", "rich", "hatchling", "editables"}
    assert run.keys() >= {"transformers", "altair", "scikit-learn"}  # what the tour needs besides
    assert not {"pytest", "mkdocs", "lightning"} & run.keys()


def test_what_builds_is_pinned_exactly(script: ModuleType):
    for place in (ROOT, ROOT / "lab"):
        (builder,) = map(Requirement, tomllib.loads((place / "pyproject.toml").read_text())["build-system"]["requires"])
        assert str(builder.specifier) == f"=={hashed('run.txt')[builder.name]}"
