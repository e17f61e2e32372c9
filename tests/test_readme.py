"""The README stays true: its Python prints what it says, its commands and links exist; docs/measures.md is complete."""

import contextlib
import io
import re
from pathlib import Path

from depthscope.cli.agents import agents
from readme import difference

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MEASURES = (ROOT / "docs" / "measures.md").read_text()


def test_the_python_prints_what_the_readme_says():
    examples = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, flags=re.DOTALL)
    namespace: dict[str, object] = {}
    assert examples
    for code, shown in examples:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "README.md", "exec"), namespace)
        found = difference(shown, printed.getvalue())
        assert found is None, found


def test_it_is_short():
    assert len(README.split()) <= 700


def test_the_page_for_agents_is_short_and_is_what_the_command_prints(capsys):
    page = (ROOT / "docs" / "agents.md").read_text()
    assert len(page.split()) < 1200
    agents()
    assert capsys.readouterr().out == page


def test_make_targets_and_links_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_every_measure_is_named():
    """All that a probe can take, each in a row of a table with its group, and all public functions."""
    from depthscope import measures

    letters = {"light": "L", "verdict": "V", "spectral": "S", "all": "A"}  # a row names the smallest groups
    for name, measure in measures.MEASURES.items():
        (row,) = re.findall(rf"^\| `{name}`.*\| ([LVSA, ]+) \|$", MEASURES, flags=re.MULTILINE)
        smallest = [group for group in measure.groups if group != "all"] or ["all"]
        smallest = ["light"] if "light" in smallest else smallest
        assert row.split(", ") == [letters[group] for group in smallest], name
    inner = {"choose_measures", "list_measures", "only_at_outputs"}  # these choose among the measures
    functions = {name for name in measures.__all__ if name.islower()} - inner
    assert {name for name in functions if f"`{name}`" not in MEASURES} == set()
