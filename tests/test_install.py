"""The lines that install, and what they install: a wheel that is whole, runs, and is typed for its users.

pip takes PyTorch's CPU build where it sees both builds of the version that is pinned.
"""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import depthscope

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
        if "--no-deps" not in line:  # a package that brings a model
            (named,) = re.findall(r"\.\[(.*?)\]", line)
            assert set(named.split(",")) <= extras.keys()
    assert f"--extra-index-url {CPU_INDEX}" in page
    assert f"--extra-index-url {CPU_INDEX}" in readme
    for text in (page, readme):
        assert f"PIP_EXTRA_INDEX_URL={CPU_INDEX}" in text  # which pip reads itself, also under make


def test_a_major_version_that_nobody_has_tried_is_not_installed():
    """pyarrow and pillow count years and quarters as major versions, and break nothing that is used here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lab = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]
    ours, *of_the_lab = lab["dependencies"]
    assert ours.endswith(f"=={project['project']['version']}")
    assert lab["version"] == project["project"]["version"]
    extras = project["project"]["optional-dependencies"]
    named = [
        *project["project"]["dependencies"],
        *of_the_lab,
        *(one for extra in extras if extra != "dev" for one in extras[extra]),
    ]
    lines = re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    pinned = {canonicalize_name(name): version for name, version in lines}
    for requirement in map(Requirement, named):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)])
        assert requirement.name in ("pyarrow", "pillow") or not requirement.specifier.contains("99")
    for backend in map(Requirement, project["build-system"]["requires"]):
        assert not backend.specifier.contains("99")


# --- the wheel -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has both packages as pip installs them from the wheels that pip builds, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    alone = ["--quiet", "--no-index", "--no-deps"]
    build = [*pip, "wheel", *alone, "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT), str(ROOT / "lab")]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    instrument, lab = sorted(folder.glob("*.whl"))
    install = [*pip, "install", *alone, "--target", str(folder / "site"), str(instrument), str(lab)]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    return folder / "site"


def installed(site: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A command of Python, in a folder that is not ours, where the installed package comes first."""
    environment = os.environ | {"PYTHONPATH": str(site), "COLUMNS": "80"}
    return subprocess.run(command, cwd=site.parent, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("source", "among_them"),
    [
        ("src/depthscope", {"py.typed", "cli/schemas/train.json", "cli/agents.md"}),
        ("lab/src/depthscope_lab", {"py.typed", "cli/train.py"}),
    ],
)
def test_the_wheel_has_every_file_of_the_package(source: str, among_them: set[str], site: Path):
    ours, theirs = (
        {path.relative_to(place).as_posix() for path in place.rglob("*") if "__pycache__" not in path.parts}
        for place in (ROOT / source, site / Path(source).name)
    )
    assert theirs - {"cli/agents.md"} == ours  # that one comes from docs/
    assert among_them <= theirs


def test_the_installed_program_runs(site: Path):
    program = str(site / "bin" / "depthscope")
    where = installed(site, sys.executable, "-c", "import depthscope; print(depthscope.__file__)").stdout
    assert where.strip() == str(site / "depthscope" / "__init__.py")
    assert installed(site, program, "--version").stdout == f"depthscope {depthscope.__version__}\n"
    assert "probe" in installed(site, program, "--help").stdout
    assert '"title": "depthscope probe --json"' in installed(site, program, "schema", "probe").stdout
    assert installed(site, program, "agents").stdout == (ROOT / "docs" / "agents.md").read_text()
    assert installed(site, program, "reproduce", "--json").returncode == 0


# --- without the lab ---------------------------------------------------------------------------------------------

WITHOUT = """
import importlib.metadata, sys

importlib.metadata.entry_points = lambda **_group: ()  # no other package is installed
sys.modules["depthscope_lab"] = None  # and this one cannot be imported
sys.argv[0] = "depthscope"
from depthscope.cli import main
main()
"""


def without_the_lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "asked", [("train", "vit-digits", "--lr", "1"), ("compare", "--help"), ("reproduce",), ("tour",)]
)
def test_its_commands_say_how_to_get_it(asked: tuple[str, ...]):
    found = without_the_lab(*asked)
    how = "comes with depthscope-lab, which is not installed: pip install ./lab in a checkout"
    assert (found.returncode, found.stdout, found.stderr) == (2, "", f"depthscope: {asked[0]} {how}\n")


def test_what_it_wrote_is_reported(tmp_path: Path):
    found = without_the_lab("report", str(ROOT / "tests" / "saved" / "0.1.0" / "run"), "--out", str(tmp_path))
    assert found.returncode == 0, found.stderr
    assert "Training" in (tmp_path / "report.html").read_text(encoding="utf-8")


# --- what its users see ------------------------------------------------------------------------------------------

CLIENT = """
import torch
from torch import nn

import depthscope
from depthscope.exit_codes import ExitCode
from depthscope.remedies import DeEscalate


def similarity_at_the_end(model: nn.Module, tokens: torch.Tensor) -> float:
    profile = depthscope.probe(model, tokens, measures="light")
    if depthscope.diagnose(profile).verdict == "collapsed":
        depthscope.apply(model, DeEscalate(tau=0.5))
    curve: list[float] = profile.curve("token_similarity")
    return curve[-1]


code: int = ExitCode.GATE
"""
MYPY = """
[mypy]
strict = true
[mypy-torch.*,numpy.*,pandas.*,safetensors.*,transformers.*,matplotlib.*,rich.*,typer.*,accelerate.*,lightning.*]
follow_imports = skip
"""  # other packages are not what is tried, and reading them takes a minute


def test_a_client_sees_the_types(site: Path):
    folder = site.parent
    (folder / "mypy.ini").write_text(MYPY)
    mistakes = {"right": CLIENT, "wrong": CLIENT.replace("list[float]", "list[str]").replace("tau=0.5", "tua=0.5")}
    for name, code in mistakes.items():
        (folder / f"{name}.py").write_text(code)
    command = (sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "types")
    right = installed(site, *command, "right.py")
    assert right.stdout.startswith("Success"), right.stdout
    wrong = installed(site, *command, "wrong.py").stdout
    assert 'Unexpected keyword argument "tua" for "DeEscalate"' in wrong
    assert "[assignment]" in wrong
    assert (site / "depthscope" / "py.typed").exists()  # without it another checkout on the path may hide the lack


# --- what stands beside it ---------------------------------------------------------------------------------------


def test_the_citation_is_of_this_version_and_names_the_papers():
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert found["cff-version"] == "1.2.0"
    assert (found["title"], found["version"], found["license"]) == (
        project["name"],
        project["version"],
        project["license"],
    )
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    papers = {reference["url"]: reference for reference in found["references"]}
    assert papers.keys() == set(re.findall(r"https://arxiv\.org/abs/[\d.]+", readme))
    for url, paper in papers.items():
        assert paper["identifiers"] == [{"type": "other", "value": f"arXiv:{url.rpartition('/')[2]}"}]
        assert all(author.keys() == {"family-names", "given-names"} for author in paper["authors"])
        assert str(paper["year"]) in readme


def test_the_hooks_before_a_commit_are_those_of_make_test_and_need_no_network():
    found = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (repository,) = found["repos"]
    assert repository["repo"] == "local"
    makefile = (ROOT / "Makefile").read_text()
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        tool = " ".join(hook["entry"].split()[:2]).removeprefix(".venv/bin/")
        assert f"$(BIN)/{tool}" in makefile
