"""What a profile can do: curves, summaries, pictures, saving, comparing."""

import copy
import dataclasses
import json
import math
import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import depthscope
from depthscope.measures import token_similarity
from depthscope.models import BlockConfig, Encoder
from depthscope.probing import Profile, probe
from zoo import make


@pytest.fixture(scope="module")
def profile() -> Profile:
    return probe(*make("bert"), measures="spectral")


def test_public_names_are_functions_of_the_package():
    assert depthscope.probe is probe
    assert depthscope.Profile is Profile
    assert {"probe", "measures"} <= set(dir(depthscope))
    with pytest.raises(AttributeError, match="prob"):
        _ = depthscope.prob


def test_tables_are_made_when_they_are_first_read_and_once():
    fresh = probe(*make("bert"))
    assert not {"frame", "sinks"} & set(vars(fresh))
    copies = [copy.copy(fresh), copy.deepcopy(fresh), pickle.loads(pickle.dumps(fresh))]
    assert fresh.frame is fresh.frame
    assert list(fresh.sinks) == ["block", "sample", "token", "norm_ratio", "text"]
    for other in [*copies, dataclasses.replace(fresh, metadata={})]:
        pd.testing.assert_frame_equal(other.frame, fresh.frame)
        pd.testing.assert_frame_equal(other.sinks, fresh.sinks)
    with pytest.raises(AttributeError, match="'Profile' object has no attribute 'fram'"):
        _ = fresh.fram
    with pytest.raises(dataclasses.FrozenInstanceError):
        fresh.frame = None


def test_curves_run_over_blocks_0_to_l(profile: Profile):
    curve = profile.curve("token_similarity")
    assert len(curve) == profile.depth + 1 == 4
    rate = profile.curve("escalation_rate")
    assert math.isnan(rate[0])
    assert all(value > 0 for value in rate[1:])
    entropy = profile.curve("attention_entropy", "attention")
    assert math.isnan(entropy[0])
    assert 0 < entropy[1] <= math.log(7)
    with pytest.raises(ValueError, match="no 'delta' at station 'output'; there: token_similarity"):
        profile.curve("delta")


def test_summary_is_a_table_of_blocks_and_measures(profile: Profile):
    table = profile.summary()
    assert list(table.index) == [0, 1, 2, 3]
    assert list(table.columns) == profile.names()
    np.testing.assert_allclose(table["token_similarity"], profile.curve("token_similarity"))


def test_printed_it_is_a_table_that_fits_a_terminal(profile: Profile):
    lines = str(profile).splitlines()
    assert lines[0] == "BertModel: 3 blocks of width 16, post-norm, 2 x 7 tokens, float32 on cpu"
    assert lines[1].split() == ["measure", "block", "0", "block", "1", "block", "3"]
    shown = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    curve = profile.curve("token_similarity")
    assert shown["token_similarity"] == [f"{curve[block]:.3f}" for block in (0, 1, 3)]
    assert shown["escalation_rate"][0] == "-"  # nothing leads to block 0
    assert str(profile).isascii()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 12
    assert repr(profile) == f"<Profile of BertModel: 3 blocks, {profile.frame['measure'].nunique()} measures>"


def test_printed_it_says_how_many_notes_there_are_and_takes_long_names():
    profile = probe(*make("bert"), measures=["attention_entropy"])
    assert "attention_entropy" in str(profile)
    profile.metadata.update(model="a-name " * 20, notes=["one"])
    assert str(profile).endswith('1 note: profile.metadata["notes"]')
    assert max(map(len, str(profile).splitlines())) <= 80


def test_save_and_load(profile: Profile, tmp_path: Path):
    folder = profile.save(tmp_path / "a" / "b")
    assert sorted(path.name for path in folder.iterdir()) == ["profile.json", "profile.parquet", "sinks.parquet"]
    again = Profile.load(folder)
    pd.testing.assert_frame_equal(again.frame, profile.frame)
    pd.testing.assert_frame_equal(again.sinks, profile.sinks)
    assert again.metadata == profile.metadata
    metadata = json.loads((folder / "profile.json").read_text())
    assert metadata["model"] == "BertModel"
    assert metadata["versions"]["torch"] == torch.__version__


def test_a_profile_that_was_saved_before_tokens_had_texts_is_read(profile: Profile, tmp_path: Path):
    folder = profile.save(tmp_path)
    about = json.loads((folder / "profile.json").read_text())
    del about["files"], about["sha256"], about["kind"]  # there were no sums then either
    (folder / "profile.json").write_text(json.dumps(about))
    profile.sinks.drop(columns="text").to_parquet(folder / "sinks.parquet", index=False)
    assert list(Profile.load(folder).sinks.columns) == list(profile.sinks.columns)


def test_what_was_made_of_a_profile_that_is_replaced_goes_with_it(profile: Profile, tmp_path: Path):
    for name in ("profile.png", "skip_loss.csv", "mine.txt"):
        (tmp_path / name).write_text("of another profile")
    profile.save(tmp_path)
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"profile.parquet", "sinks.parquet", "profile.json", "mine.txt"}


def test_a_failed_save_leaves_the_old_profile_whole(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    profile.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full_disk(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", full_disk)
    with pytest.raises(OSError, match="No space left"):
        profile.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("text", "message"), [(None, "profile.json is missing"), ("{", "is damaged"), ("{}", "format 1")]
)
def test_loading_something_else_is_refused(profile: Profile, tmp_path: Path, text: str | None, message: str):
    profile.save(tmp_path)
    if text is None:
        (tmp_path / "profile.json").unlink()
    else:
        (tmp_path / "profile.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        Profile.load(tmp_path)


def test_against_another_profile(profile: Profile):
    other = probe(*make("albert"))
    table = profile.against(other)
    assert {"block", "measure", "this", "other", "difference"} == set(table.columns)
    row = table.query("block == 3 and measure == 'token_similarity'").iloc[0]
    assert row["this"] == pytest.approx(profile.curve("token_similarity")[3])
    assert row["other"] == pytest.approx(other.curve("token_similarity")[3])
    assert row["difference"] == pytest.approx(row["this"] - row["other"])
    assert (profile.against(profile)["difference"].dropna() == 0).all()


def test_plot_draws_the_headline_measures(profile: Profile, tmp_path: Path):
    figure = profile.plot()
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles == ["token similarity", "cosine similarity", "direction similarity", "effective rank"]
    (line,) = figure.axes[0].get_lines()
    np.testing.assert_allclose(line.get_ydata(), profile.curve("token_similarity"))
    figure.savefig(tmp_path / "p.png")
    assert len(profile.plot(["effective_rank"]).axes) == 1


def test_values_that_are_undefined_stay_undefined(tmp_path: Path):
    model, _ = make("encoder")
    one_token = probe(model, torch.ones(1, 1, 16))
    assert all(math.isnan(value) for value in one_token.curve("cosine_similarity"))
    assert one_token.curve("token_similarity") == [1, 1, 1, 1]
    loaded = Profile.load(one_token.save(tmp_path))
    assert all(math.isnan(value) for value in loaded.curve("cosine_similarity"))
    assert token_similarity(torch.ones(1, 1, 16)).item() == 1


@pytest.mark.parametrize("measures", ["light", "spectral", "all"])
@pytest.mark.parametrize("shape", [(0, 100, 16), (2, 0, 16)])
def test_a_batch_of_nothing_is_refused(measures: str, shape: tuple[int, ...]):
    encoder = Encoder(1, BlockConfig(16, 2))
    with pytest.raises(ValueError, match="expected at least one sequence of at least one token"):
        probe(encoder, torch.zeros(shape), measures=measures)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in encoder.modules())
