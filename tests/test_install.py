"""The lines that install: pip takes PyTorch's CPU build where it sees both builds of the version that is pinned."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def make_wheel(folder: Path, version: str) -> Path:
    folder.mkdir()
    described = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{described}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{described}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{described}/RECORD", "")
    return folder


def test_pip_prefers_the_cpu_build_of_the_pinned_version(tmp_path: Path):
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    places = [make_wheel(tmp_path / "pypi", pinned), make_wheel(tmp_path / "pytorch", f"{pinned}+cpu")]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    for order in (places, places[::-1]):
        links = [part for place in order for part in ("--find-links", str(place))]
        command = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "install", "--dry-run"]
        options = ["--ignore-installed", "--no-index", *links, "--constraint", str(ROOT / "constraints.txt")]
        result = subprocess.run(
            [*command, *options, "torch>=2.6"],
            env=alone | {"PIP_CONFIG_FILE": os.devnull},
            capture_output=True,
            text=True,
            check=False,
        )
        assert f"Would install torch-{pinned}+cpu" in result.stdout, result.stderr


def test_the_lines_name_the_index_and_the_extras_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page, readme = (ROOT / "docs" / "install.md").read_text(), (ROOT / "README.md").read_text()
    lines = re.findall(r"(?:uv )?pip install [^`\n]+", page + readme)
    assert len(lines) >= 4
    for line in lines:
        assert "-c constraints.txt" in line
        (named,) = re.findall(r"\.\[(.*?)\]", line)
        assert set(named.split(",")) <= extras.keys()
    assert f"--extra-index-url {CPU_INDEX}" in page
    assert f"--extra-index-url {CPU_INDEX}" in readme
    for text in (page, readme):
        assert f"PIP_EXTRA_INDEX_URL={CPU_INDEX}" in text  # which pip reads itself, also under make


def test_a_major_version_that_nobody_has_tried_is_not_installed():
    """pyarrow and pillow count years and quarters as major versions, and break nothing that is used here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    named = [*project["project"]["dependencies"], *(one for extra in extras if extra != "dev" for one in extras[extra])]
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    for requirement in map(Requirement, named):
        assert requirement.specifier.contains(pinned[requirement.name])
        assert requirement.name in ("pyarrow", "pillow") or not requirement.specifier.contains("99")
    for backend in map(Requirement, project["build-system"]["requires"]):
        assert not backend.specifier.contains("99")
