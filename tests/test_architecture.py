"""The house: imports go downwards only, and no public function has the name of a room."""

import ast
import re
from pathlib import Path

import pytest

import depthscope

SOURCE = Path(depthscope.__file__).parent

# From the ground up. A room may import what stands in a lower line, and itself.
FLOORS = (
    {
        "exit_codes",
        "extras",
        "half_precision",
        "locks",
        "memory",
        "naming",
        "progress",
        "walking",
    },
    {"files", "interruption", "offloading", "registry", "stations", "safety", "text"},
    {"sealed", "transfers"},
    {"drawing", "measures"},
    {"conditions", "theory"},
    {"models"},
    {"anatomy"},
    {"inputs"},
    {"hooks"},
    {"discovery"},
    {"verbs"},
    {"scope"},
    {"probing", "value_spectra"},
    {"attention_paths", "watching"},
    {"usage"},
    {"remedies"},
    {"diagnosis"},
    {"report"},
    {"cli"},
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
TORCH_ONLY = {"measures", "theory"}


def imported_modules(code: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names if node.module == "depthscope")
    return names


def upward_imports(room: str, code: str) -> set[str]:
    if room == "verbs":  # the methods of a scope are the functions of the rooms above, by their public names
        code = re.sub(r"(?ms)^if TYPE_CHECKING:.*?(?=^\S)", "", code)
    rooms = {name.split(".")[1] for name in imported_modules(code) if name.startswith("depthscope.")}
    return {other for other in rooms & FLOOR_OF.keys() if other != room and FLOOR_OF[other] >= FLOOR_OF[room]}


def files() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room not in {"__init__", "__main__"}:
            found.append((room, path))
    return found


@pytest.mark.parametrize(("room", "path"), files(), ids=lambda value: value if isinstance(value, str) else value.stem)
def test_imports_go_downwards(room: str, path: Path):
    assert room in FLOOR_OF, f"{room} is not in the plan of the house"
    assert not upward_imports(room, path.read_text())
    if room in TORCH_ONLY:
        tops = {name.split(".")[0] for name in imported_modules(path.read_text())}
        assert tops <= {
            "torch",
            "depthscope",
            "__future__",
            "typing",
            "functools",
            "math",
            "collections",
            "dataclasses",
        }


def test_an_upward_import_is_seen():
    assert upward_imports("measures", "from depthscope.models import Block") == {"models"}
    assert upward_imports("measures", "import depthscope.cli.app") == {"cli"}
    assert upward_imports("measures", "from depthscope import probing") == {"probing"}
    assert not upward_imports("models", "from depthscope.measures import growth")


def test_no_public_name_is_a_rooms_name():
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert rooms <= FLOOR_OF.keys()
    assert not set(depthscope.__all__) & rooms
    for room in rooms - {"cli"}:
        public = getattr(depthscope, room).__all__
        assert not set(public) & (rooms | FLOOR_OF.keys())
        assert public == sorted(public, key=lambda name: (not name.isupper(), not name[0].isupper(), name))


def test_files_stay_readable():
    long = {str(path): lines for _, path in files() if (lines := len(path.read_text().splitlines())) > 400}
    assert not long
