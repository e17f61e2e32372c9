"""What a watch writes down: scalars, lines of JSON, the table, the heat map."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import depthscope
from depthscope.models import BlockConfig, Encoder
from depthscope.probing.readings import Reading
from depthscope.watching import load_records
from depthscope.watching.pictures import heat_map
from depthscope.watching.records import Record, append, check_appendable, curves_of, frame_of_records, means_of
from warm import run_warm
from zoo import TOKENS

NAN = math.nan


def record(similarity: list[float], cosine: list[float] | None = None, step: int = 0) -> Record:
    curves = {"token_similarity": similarity} | ({"cosine_similarity": cosine} if cosine else {})
    return Record(step, {"output": curves})


def encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder(3, BlockConfig(16, 4))


def test_scalars_of_a_collapse():
    scalars = record([0.1, 0.5, 0.92, 0.95, 0.94], [0.1, 0.4, 0.8, 0.9, 0.93]).scalars()
    assert scalars == {
        "depth/t_sim_last": 0.94,
        "depth/t_sim_max": 0.95,
        "depth/t_cos_last": 0.93,
        "depth/t_cos_max": 0.93,
        "depth/t_sim_passes_0.9": 2,
        "depth/effective_depth": 2,  # blocks 3 and 4 read tokens that are alike
    }


def test_scalars_where_nothing_collapses():
    scalars = record([0.1, 0.2, 0.3]).scalars()
    assert math.isnan(scalars["depth/t_sim_passes_0.9"])
    assert scalars["depth/effective_depth"] == 2


def test_a_sink_does_not_hide_a_collapse_from_the_effective_depth():
    assert record([0.0, 0.0, 0.0, 0.0], [0.5, 0.95, 0.99, 1.0]).scalars()["depth/effective_depth"] == 1


def test_a_similarity_that_comes_back_counts_every_block():
    scalars = record([0.95, 0.2, 0.95, 0.3, 0.2]).scalars()
    assert scalars["depth/t_sim_passes_0.9"] == 0
    assert scalars["depth/effective_depth"] == 2  # blocks 2 and 4


def test_nan_is_not_diverse():
    scalars = record([0.1, NAN, NAN]).scalars()
    assert math.isnan(scalars["depth/t_sim_last"])
    assert math.isnan(scalars["depth/t_sim_max"])
    assert scalars["depth/effective_depth"] == 1


def test_other_stations_and_measures_have_their_names():
    model = encoder()
    with depthscope.watch(model, measures=["token_diversity", "frobenius_norm"], stations="after_attention") as watch:
        model(TOKENS)
    assert set(watch.scalars()) == {"depth/after_attention/t_div_last", "depth/after_attention/frobenius_norm_last"}


def test_curves_are_means_over_the_sequences_that_have_a_value():
    rows = [
        Reading(0, "output", -1, "token_similarity", 0, [0.2, 0.4]),
        Reading(2, "output", -1, "token_similarity", 0, [0.5, NAN]),
        Reading(2, "output", -1, "escalation_rate", 0, [math.inf, 1.0]),
    ]
    curves = curves_of(means_of(rows))
    assert curves["output"]["token_similarity"] == pytest.approx([0.3, NAN, 0.5], nan_ok=True)
    assert curves["output"]["escalation_rate"] == pytest.approx([NAN, NAN, math.inf], nan_ok=True)
    content = json.loads(Record(7, curves).line())
    assert content["curves"]["output"] == {
        "token_similarity": [pytest.approx(0.3), None, 0.5],
        "escalation_rate": [None] * 3,
    }


def test_the_file_is_the_table(tmp_path: Path):
    path = tmp_path / "depth.jsonl"
    model = encoder()
    with depthscope.watch(model, every=2, stations="trunk", path=path) as watch:
        for _ in range(3):
            model(TOKENS)
            assert len(path.read_text().splitlines()) == len(watch.records["step"].unique())  # written at once
    pd.testing.assert_frame_equal(load_records(path), watch.records)


def test_a_later_run_appends_and_a_repeated_step_counts_once(tmp_path: Path):
    path = tmp_path / "depth.jsonl"
    for step, value in ((0, 0.1), (50, 0.2), (50, 0.3), (100, 0.4)):
        check_appendable(path)
        append(path, record([value, value], step=step))
    assert load_records(path).query("block == 1")[["step", "value"]].to_numpy().tolist() == [
        [0, 0.1],
        [50, 0.3],
        [100, 0.4],
    ]


@pytest.mark.parametrize("cut", [1, 20])
def test_a_line_that_a_crash_cut_off_is_dropped(tmp_path: Path, cut: int):
    path = tmp_path / "depth.jsonl"
    append(path, record([0.1, 0.2]))
    whole = path.read_bytes()
    path.write_bytes(whole + record([0.3, 0.4], step=50).line().encode()[:-cut])
    assert load_records(path)["step"].unique().tolist() == [0]
    model = encoder()
    with depthscope.watch(model, path=path) as watch:
        watch.step(100)
        model(TOKENS)
    assert path.read_bytes().startswith(whole)
    assert load_records(path)["step"].unique().tolist() == [0, 100]


@pytest.mark.parametrize(
    "text", ["my notes", "my notes\nmore", '{"loss": 1.0}\n', "[1]\n", '{"step": 1, "curves": [2]}\n']
)
def test_somebody_else_s_file_is_refused_and_untouched(tmp_path: Path, text: str):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no records of a watch"):
        depthscope.watch(encoder(), path=path).open()
    assert path.read_text() == text
    with pytest.raises(ValueError, match="there is no file"):
        load_records(tmp_path / "nothing.jsonl")


FULL_DISK = """
import resource, signal, warnings
from pathlib import Path
from depthscope.watching.records import Record, append
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path("depth.jsonl")
line = Record(0, {"output": {"token_similarity": [0.5] * 9}})
append(path, line)
size = path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, size + 10))
try:
    append(path, line)
except OSError:
    print("refused", path.stat().st_size == size)
"""


def test_a_full_disk_leaves_the_file_whole(tmp_path: Path):
    run = run_warm("-c", FULL_DISK, env=os.environ, cwd=tmp_path)
    assert run.stdout == "refused True\n", run.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_does_not_stop_training():
    model = encoder()
    not_written = pytest.warns(UserWarning, match="step 0 was watched but not written to /dev/full")
    with depthscope.watch(model, every=1, path="/dev/full") as watch, not_written:
        model(TOKENS).sum().backward()
    assert watch.last_step == 0


def table(steps: list[int], depth: int = 4) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return frame_of_records([record(rng.uniform(0, 1, depth + 1).tolist(), step=step) for step in steps])


def test_the_heat_map_shows_the_table():
    records = table([0, 50, 100, 300])
    figure = heat_map(records)
    axes, _colour_bar = figure.axes
    (mesh,) = [item for item in axes.collections if type(item).__name__ == "QuadMesh"]
    expected = records.pivot(index="block", columns="step", values="value").to_numpy()
    np.testing.assert_array_equal(np.asarray(mesh.get_array()), expected)
    assert mesh.get_clim() == (0, 1)
    assert mesh.get_coordinates()[0, :, 0].tolist() == [-25, 25, 75, 200, 400]
    assert mesh.get_coordinates()[:, 0, 1].tolist() == [-0.5, 0.5, 1.5, 2.5, 3.5, 4.5]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("training step", "block")
    assert axes.get_title("left") == "token similarity"


def test_the_heat_map_of_one_step_and_of_missing_values(tmp_path: Path):
    records = table([0])
    records.loc[2, "value"] = NAN
    figure = heat_map(records)
    figure.savefig(tmp_path / "map.png")
    assert np.ma.count_masked(figure.axes[0].collections[0].get_array()) == 1
    records["value"] = NAN
    heat_map(records).savefig(tmp_path / "empty.png")


def test_the_heat_map_says_what_there_is():
    with pytest.raises(ValueError, match="no 'delta' at station 'output' to draw; there: token_similarity at output"):
        heat_map(table([0]), "delta")
    with pytest.raises(ValueError, match="there: nothing"):
        depthscope.watch(encoder()).heat_map()
