"""`draw` of a study shows what is in its frame: nothing that it reaches computes.

Read from the sources: every function that `draw` calls, in its own module or in another of the studies, is followed.
What it uses may come from pandas, matplotlib and `depthscope.drawing`, and from no room that computes, nor from torch,
numpy, math or statistics. Means and standard deviations over trials are pandas' own, and allowed.
"""

import ast
from pathlib import Path

import pytest

import depthscope_lab
from depthscope_lab.papers import STUDIES

SOURCE = Path(depthscope_lab.__file__).parent
COMPUTING = {"torch", "numpy", "math", "statistics", "scipy", "cmath"}
SHOWING_ROOMS = {"depthscope": {"drawing"}, "depthscope_lab": {"papers"}}
FITS = {"polyfit", "rolling", "ewm", "cumsum", "cumprod", "pct_change", "shift", "diff", "corr", "cov", "interpolate"}
FITS |= {"apply", "transform", "map", "pipe", "agg", "eval"}  # through which anything could be computed


def file_of(module: str) -> Path:
    whole = SOURCE.parent.joinpath(*module.split("."))
    return whole / "__init__.py" if whole.is_dir() else whole.with_suffix(".py")


def source_of(module: str) -> str:
    return file_of(module).read_text()


def imports_of(tree: ast.Module) -> dict[str, str]:
    """Name in this module → what it stands for, as `package.module.name`."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def computes(whole_name: str) -> bool:
    parts = whole_name.split(".")
    return parts[0] in COMPUTING or (parts[0] in SHOWING_ROOMS and parts[1] not in SHOWING_ROOMS[parts[0]])


def offences(code: str, function: str = "draw", seen: frozenset[str] = frozenset()) -> set[str]:
    """What a function of this module reaches and should not, each with the functions on the way to it."""
    tree = ast.parse(code)
    imported = imports_of(tree)
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found: set[str] = set()
    body = ast.Module(defined[function].body, type_ignores=[])  # without annotations and defaults
    for node in ast.walk(body):
        if isinstance(node, ast.Attribute) and node.attr in FITS:
            found.add(f"{function} → .{node.attr}")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.FloorDiv):
            found.add(f"{function} → a power or a window")
        if not isinstance(node, ast.Name) or node.id in seen:
            continue
        if node.id in defined and node.id != function:
            further = offences(code, node.id, seen | {function, node.id})
        elif node.id in imported and computes(imported[node.id]):
            further = {imported[node.id]}
        elif imported.get(node.id, "").startswith("depthscope_lab.papers.") and file_of(imported[node.id]).exists():
            further = {f"{imported[node.id]}, a whole module: import the functions that draw"}
        elif imported.get(node.id, "").startswith("depthscope_lab.papers."):
            module, _, name = imported[node.id].rpartition(".")
            other = source_of(module)
            has = any(isinstance(item, ast.FunctionDef) and item.name == name for item in ast.parse(other).body)
            further = offences(other, name, seen | {function}) if has else set()
        else:
            continue
        found |= {f"{function} → {path}" for path in further}
    return found


@pytest.mark.parametrize("name", [name for name in STUDIES if STUDIES.owner(name) == "depthscope"])
def test_draw_computes_nothing(name: str):
    assert offences(source_of(STUDIES[name].module)) == set()


@pytest.mark.parametrize(
    ("study", "shown", "computed", "offence"),
    [
        (
            "yu2024-fig4",
            'mean["predicted_similarity"]',
            "predicted(frame)",
            "draw → predicted → depthscope.theory.pre_norm_odds",
        ),
        (
            "yu2024-rate",
            'alone["predicted_share"].iloc[0]',
            "asymptotic_rate(alpha)",
            "draw → depthscope.theory.asymptotic_rate",
        ),
        (
            "causal-rate",
            'curve(frame, case=case, measure="mean_diversity")',
            '_mean(frame, case, "diversity")',
            "numpy",
        ),
        ("yu2024-fig8", 'one["expected_size"]', "_size(frame)", "draw → _size → a power or a window"),
    ],
)
def test_a_draw_that_computes_is_seen(study: str, shown: str, computed: str, offence: str):
    code = source_of(STUDIES[study].module)
    if shown not in code:
        pytest.fail(f"{shown} is not in {study}")
    assert any(offence in found for found in offences(code.replace(shown, computed)))


def test_what_another_module_of_the_studies_computes_is_seen():
    code = (
        "from depthscope_lab.papers.simulation.collapse_rate import fit\n"
        "def draw(frame):\n    return fit(frame, 'x', 1.0)"
    )
    assert any(found.startswith("draw → fit → ") for found in offences(code))
