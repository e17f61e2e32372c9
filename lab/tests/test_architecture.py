"""The lab stands on the instrument: it takes public names of depthscope alone, but for a list that may only shrink."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

import depthscope
import depthscope_lab

SOURCE = Path(depthscope_lab.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
INSTRUMENT = Path(depthscope.__file__).parent
# From the ground up, as in tests/test_architecture.py.
FLOORS = ({"extras"}, {"models"}, {"anatomy", "training"}, {"fair"}, {"papers"}, {"cli"})
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# What the lab still takes from inside of a room: files and names. A name that is no longer taken leaves the list; for a
# new one, ask first whether its room should offer it (`__all__`), or whether the lab can do without.
PRIVATE = {
    "anatomy.odd_families": "ours",
    "cli.completion": "beginning",
    "cli.console": "Screen",
    "cli.documents": "document print_document",
    "cli.command": "add_report ending_in_order note_command require_writable say_damaged",
    "cli.display": "show_table",
    "cli.values": "counted data folder names",
    "models.attention": "join_heads score_scale seen_tokens split_heads",
    "models.families": "build_family",
    "models.initialisers": "DEFAULT HE Law SCHEMES Scheme XAVIER bias_bound draw_block uniform_bound",
    "models.token_means": "CausalMean Full Prefix Running TokenMean",
    "models.wiring": "Norm Wired run_pre_norm wiring_of",
    "value_spectra.from_disk": "require_own_shards",
    "probing.roles": "CAN_LEARN",
    "watching.gate": "Gate make_gate",
    "watching.pictures": "heat_map sender",
    "value_spectra.weights": "WHOLE",
    "remedies.deescalation": "token_mean",
    "remedies.record": "from_dict",
    "remedies.remedy": "Mixing",
    "remedies.reparameterise": "INTERVALS",
    "report.formats": "CHECKPOINT_FORMAT COLUMNS ENDS FACTORS METRICS STUDY_FORMAT Verdict WATCHED "
    "checkpoints_in evaluated folder_name lines_of read_about read_state row_of run_name step_of",
    "theory.collapse": "LARGEST_RANGE",
}


def taken(code: str) -> set[str]:
    """What is imported of depthscope: "models.Block", "models.attention.join_heads"."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, "imports are absolute"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name.removeprefix("depthscope.") for name in found if name.startswith("depthscope.")}


def is_public(name: str) -> bool:
    """Of the package, of a room, or of a module of the ground floor; a leading underscore is never public."""
    parts = name.split(".")
    room, last = parts[0], parts[-1]
    if any(part.startswith("_") for part in parts) and name not in depthscope.__all__:
        return False
    if len(parts) == 1:
        return room in depthscope.__all__ or (INSTRUMENT / f"{room}.py").exists() or (INSTRUMENT / room).is_dir()
    if (INSTRUMENT / f"{room}.py").exists():
        return True
    return last in import_module(f"depthscope.{room}").__all__


def test_the_lab_takes_public_names_and_those_of_the_list():
    inside = {name for path in FILES for name in taken(path.read_text(encoding="utf-8")) if not is_public(name)}
    assert inside == {f"{file}.{name}" for file, names in PRIVATE.items() for name in names.split()}


def test_a_name_from_inside_is_seen():
    code = (
        "import depthscope\nfrom depthscope import probe\nfrom depthscope.models import Block\n"
        "from depthscope.files import _x\nfrom depthscope.models.attention import join_heads\n"
        "from depthscope.progress import Share\n"
    )
    assert {name for name in taken(code) if not is_public(name)} == {"files._x", "models.attention.join_heads"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_imports_go_downwards(path: Path):
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    if room == "__init__":
        return
    assert room in FLOOR_OF, f"{room} is not in the plan of the lab"
    imported: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
        elif isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
    rooms = {name.split(".")[1] for name in imported if name.startswith("depthscope_lab.")}
    assert not {other for other in rooms if other != room and FLOOR_OF[other] >= FLOOR_OF[room]}


def test_the_instrument_does_not_know_the_lab():
    for path in INSTRUMENT.rglob("*.py"):
        assert "depthscope_lab" not in path.read_text(encoding="utf-8"), path
