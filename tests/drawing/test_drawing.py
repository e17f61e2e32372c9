"""Pictures show the numbers that they are given, in the colours of the house, and need matplotlib on first use only."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex

import depthscope
from depthscope import drawing
from depthscope.drawing import Curve, ReferenceBand


def test_importing_the_room_does_not_import_matplotlib():
    code = "import sys, depthscope.drawing\nassert 'matplotlib' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_matplotlib_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'depthscope\[figures\]'"):
        drawing.panels(1)


def test_panels_are_in_reading_order_and_look_alike():
    figure, axes = drawing.panels(3, 2, width=2.0, height=1.5)
    assert figure.get_size_inches().tolist() == [6.0, 3.0]
    assert [ax.get_subplotspec().num1 for ax in axes] == list(range(6))
    assert not any(ax.spines[side].get_visible() for ax in axes for side in ("top", "right"))


def test_a_band_lies_around_its_line():
    _, (ax,) = drawing.panels(1)
    x, centre, spread = np.arange(3), np.array([1.0, 2.0, 3.0]), np.array([0.1, 0.2, 0.3])
    drawing.line_with_band(ax, x, centre, spread, colour=drawing.GREEN, name="a")
    (line,), (band,) = ax.get_lines(), ax.collections
    assert line.get_color() == drawing.GREEN
    assert to_hex(band.get_facecolor()[0]) == drawing.GREEN.lower()
    edges = band.get_paths()[0].vertices[:, 1]
    assert edges.min() == pytest.approx(0.9)
    assert edges.max() == pytest.approx(3.3)


def by_block(**changes) -> Curve:
    usual = {"blocks": [0, 1, 2], "values": [0.1, 0.5, 0.9], "colour": drawing.BEFORE, "name": "before"}
    return Curve(**usual | changes)


def test_measures_over_blocks_have_a_panel_each_and_one_legend():
    after = by_block(values=[0.1, 0.2, 0.2], colour=drawing.AFTER, name="after")
    figure = drawing.draw_by_block({"token_similarity": [by_block(), after], "effective_rank": [by_block(), after]})
    first, second = figure.axes
    assert [ax.get_title("left") for ax in figure.axes] == ["token similarity", "effective rank"]
    assert [line.get_color() for line in first.get_lines()] == [drawing.BEFORE, drawing.AFTER]
    np.testing.assert_array_equal(second.get_lines()[1].get_ydata(), after.values)
    assert [text.get_text() for text in first.get_legend().get_texts()] == ["before", "after"]
    assert second.get_legend() is None
    assert first.get_xlim() == (0, 2)


def test_similarities_have_one_y_axis_unless_they_are_negative():
    def limits(*values: float) -> tuple[float, float]:
        return drawing.draw_by_block({"cosine_similarity": [by_block(values=values)]}).axes[0].get_ylim()

    assert limits(0.2, 0.3, 0.4) == limits(0.0, 1.0, 1.0) == (-0.02, 1.02)
    assert limits(0.2, float("nan"), 0.4) == (-0.02, 1.02)
    assert limits(-0.5, 0.3, 0.4) == (-0.5, 1.02)
    figure = drawing.draw_by_block({"effective_rank": [by_block(values=(3.0, 2.0, 1.0))]})
    assert figure.axes[0].get_ylim()[1] > 2


def test_a_reference_lies_behind_the_curves():
    normal = ReferenceBand([0, 1, 2], [0.0, 0.1, 0.2], [0.3, 0.4, 0.5], "what is normal")
    figure = drawing.draw_by_block({"token_similarity": [by_block()]}, references={"token_similarity": normal})
    (band,), (line,) = figure.axes[0].collections, figure.axes[0].get_lines()
    assert band.get_zorder() < line.get_zorder()
    assert {text.get_text() for text in figure.axes[0].get_legend().get_texts()} == {"before", "what is normal"}


def test_a_model_of_one_block_can_be_drawn():
    figure = drawing.draw_by_block({"token_similarity": [by_block(blocks=[0], values=[0.3])]})
    figure.canvas.draw()
    assert figure.axes[0].get_lines()[0].get_ydata().tolist() == [0.3]


def test_a_heat_map_has_cells_around_blocks_and_steps_and_a_line_at_the_level():
    values = np.array([[0.1, 0.95], [0.2, np.nan], [0.3, 0.99]])
    figure = drawing.draw_heat_map(values, np.arange(3.0), np.array([0.0, 100.0]), title="t", limits=(0, 1), level=0.9)
    assert figure.axes[0].get_xlim() == (0, 100)  # there is no step before the first
    ax, bar = figure.axes
    mesh = ax.collections[0]
    np.testing.assert_array_equal(np.ma.filled(mesh.get_array(), np.nan), values)
    assert mesh.get_clim() == (0, 1)
    assert mesh.get_coordinates()[0, :, 0].tolist() == [-50, 50, 150]
    assert len(ax.collections) == 2  # the cells, and the line where values pass the level
    assert [line.get_ydata()[0] for line in bar.get_lines()] == [0.9]
    plain = drawing.draw_heat_map(values, np.arange(3.0), np.array([0.0, 100.0]), title="t")
    assert len(plain.axes[0].collections) == 1
    assert plain.axes[0].collections[0].get_clim() == (0.1, 0.99)


def runs(**changes) -> pd.DataFrame:
    rows = [
        {"variant": variant, "depth": depth, "lr": 1e-3, "warmup_steps": 0, "seed": seed, "step": step}
        | {"quantity": "loss", "value": float(seed + step)}
        for variant in ("post", "deescalated", "new")
        for depth in (6, 12)
        for seed in (0, 2)
        for step in range(12)
    ]
    return pd.DataFrame(rows).assign(**changes)


def test_training_curves_are_means_over_seeds_in_the_colours_of_their_variants():
    figure = drawing.draw_training_curves(runs(), {"post": "post-norm", "deescalated": "de-escalated"})
    assert [ax.get_title("left") for ax in figure.axes] == ["6 blocks", "12 blocks"]
    lines = figure.axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["post-norm", "de-escalated", "new"]
    assert [line.get_color() for line in lines][:2] == [drawing.VARIANT_COLOURS[v] for v in ("post", "deescalated")]
    assert lines[2].get_color() not in drawing.VARIANT_COLOURS.values()
    assert lines[0].get_ydata()[0] == 1.0  # the mean of the seeds 0 and 2
    assert len(figure.axes[0].collections) == 3  # a band each
    assert len(drawing.draw_training_curves(runs(seed=0)).axes[0].collections) == 0


def test_a_quantity_that_nobody_gave_a_title_has_its_name_for_one_behind_those_that_have():
    frame = pd.concat([runs(quantity=name) for name in ("words_right", "loss", "x", "token_similarity")])
    axes = drawing.draw_training_curves(frame).axes
    assert [ax.get_ylabel() for ax in axes[:4]] == ["training loss", "t_sim, last block", "words right", "x"]


def test_a_figure_without_numbers_says_why():
    (ax,) = drawing.empty("needs a GPU").axes
    assert [text.get_text() for text in ax.texts] == ["needs a GPU"]


SOURCE = Path(depthscope.__file__).parent
OTHERS = [path for path in sorted(SOURCE.rglob("*.py")) if path.parent.name != "drawing"]


def drawn_elsewhere(code: str) -> list[str]:
    """Imports of matplotlib that run, colours, and figures that are made by hand."""
    tree = ast.parse(code)
    for_types = [
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    ]
    found = []
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            found += [name for name in modules if name.split(".")[0] == "matplotlib"]
        if isinstance(node, ast.Constant) and re.fullmatch("#[0-9a-fA-F]{6}", str(node.value)):
            found.append(str(node.value))
        if isinstance(node, ast.Attribute) and node.attr in {"Figure", "spines"}:
            found.append(node.attr)
    return found


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(SOURCE)))
def test_pictures_are_made_in_this_room_only(path: Path):
    assert not drawn_elsewhere(path.read_text())


def test_a_picture_made_elsewhere_is_seen():
    assert drawn_elsewhere("from matplotlib.figure import Figure") == ["matplotlib.figure"]
    assert drawn_elsewhere("ax.plot(x, color='#c44536')") == ["#c44536"]
    assert drawn_elsewhere("require('matplotlib.figure', 'figures').Figure(layout='constrained')") == ["Figure"]
    assert not drawn_elsewhere("if TYPE_CHECKING:\n    from matplotlib.figure import Figure")
