"""Hidden states without a model: the numbers of a probe, from lists, safetensors and npz; hostile files are refused."""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import depthscope
from depthscope import profile_of
from depthscope.cli.app import app
from depthscope.models import BlockConfig, Encoder
from samples import seeded

TOKENS = torch.randn(2, 9, 16, generator=seeded(0))
MODEL = Encoder(4, BlockConfig(16, 4), generator=seeded(1))
IDS = torch.arange(18).view(2, 9)


def states() -> list[torch.Tensor]:
    found = depthscope.capture(MODEL, TOKENS)
    return [TOKENS, *(found["output", number] for number in range(1, 5))]


def written(folder: Path, kind: str) -> Path:
    """One file per sequence, as vLLM writes them."""
    folder.mkdir()
    for row in range(2):
        layers = [layer[row] for layer in states()]
        stacked = torch.stack(layers, dim=1).contiguous()  # [tokens, layers, width]
        if kind == "safetensors":
            save_file({"hidden_states": stacked, "token_ids": IDS[row].clone()}, folder / f"{row}.safetensors")
        else:
            np.savez(folder / f"{row}.npz", hidden_states=stacked.numpy(), token_ids=IDS[row].numpy())
    return folder


@pytest.mark.parametrize("kind", ["list", "arrays", "array", "safetensors", "npz"])
def test_the_numbers_are_those_of_a_probe(kind: str, tmp_path: Path):
    rows = slice(0, 1) if kind == "array" else slice(None)
    expected = depthscope.probe(MODEL, TOKENS[rows], measures="light")
    given: object = states()
    if kind == "arrays":
        given = [layer.numpy() for layer in states()]
    elif kind == "array":
        given = {"hidden_states": torch.stack([layer[0] for layer in states()], dim=1), "token_ids": IDS[0]}
    elif kind != "list":
        given = written(tmp_path / "states", kind)
    profile = profile_of(given, measures="light")
    assert (profile.depth, profile.metadata["samples"], profile.metadata["width"]) == (
        4,
        1 if kind == "array" else 2,
        16,
    )
    assert profile.names() == expected.names()
    for name in expected.names():
        np.testing.assert_allclose(profile.curve(name), expected.curve(name), rtol=1e-6, atol=1e-7)


def test_padding_is_left_out_and_outliers_are_found():
    mask = torch.ones(2, 9)
    mask[1, 5:] = 0
    padded = [layer.clone() for layer in states()]
    for layer in padded:
        layer[1, 5:] = torch.nan
        layer[0, 3] *= 100
    profile = profile_of(padded, mask=mask)
    assert not profile.metadata["not_finite"]
    assert set(profile.sinks["token"]) == {3}


def test_what_only_a_model_shows_is_named_and_refused_alone():
    profile = profile_of(states(), measures=["token_similarity", "attention_entropy"])
    assert any("no attention_entropy" in note for note in profile.metadata["notes"])
    with pytest.raises(ValueError, match="states show tokens alone"):
        profile_of(states(), measures="attention_entropy")


def test_one_layer_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = written(tmp_path / "states", "safetensors")
    read: list[int] = []
    from depthscope.probing import states as module

    kept = module._tokens
    monkeypatch.setattr(module, "_tokens", lambda values, what: (read.append(values.numel()), kept(values, what))[1])
    profile_of(folder)
    assert set(read) == {9 * 16}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.npz", "objects", "allow_pickle=False"),
        ("a.npz", "says too much", "cannot be read as states"),
        ("a.npz", b"PK no zip", "cannot be read as states"),
        ("a.safetensors", b"\xff" * 64, "cannot be read as states"),
        ("a.safetensors", "other names", r"expected hidden_states \[tokens, layers, width\]"),
        ("a.safetensors", "two axes", r"expected hidden_states \[tokens, layers, width\], got \(9, 16\)"),
        ("a.txt", b"", "got none"),
    ],
)
def test_other_files_are_refused_in_one_line(name: str, content: object, said: str, tmp_path: Path):
    path = tmp_path / name
    if content == "objects":
        np.savez(path, hidden_states=np.array([object()], dtype=object), allow_pickle=True)
    elif content == "says too much":
        header = {"descr": "<f4", "fortran_order": False, "shape": (10**6, 10**3, 10**3)}
        with zipfile.ZipFile(path, "w") as archive, archive.open("hidden_states.npy", "w") as file:
            np.lib.format.write_array_header_1_0(file, header)
    elif content == "other names":
        save_file({"weight": torch.ones(2)}, path)
    elif content == "two axes":
        save_file({"hidden_states": torch.ones(9, 16)}, path)
    else:
        assert isinstance(content, bytes)
        path.write_bytes(content)
    with pytest.raises(ValueError, match=said) as caught:
        profile_of(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_pipe_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "a.safetensors")
    with pytest.raises(OSError, match="a pipe"):
        profile_of(tmp_path)


def test_layers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="two layers or more"):
        profile_of([TOKENS])
    with pytest.raises(ValueError, match="layers of one shape"):
        profile_of([TOKENS, TOKENS[:, :5]])
    with pytest.raises(ValueError, match="floating-point"):
        profile_of([IDS.numpy(), IDS.numpy()])
    with pytest.raises(ValueError, match=r"expected mask of shape \(2, 9\)"):
        profile_of(states(), mask=torch.ones(2, 8))


def test_the_command_shows_a_verdict_and_refuses_what_needs_a_model(tmp_path: Path):
    folder = written(tmp_path / "states", "safetensors")
    found = CliRunner().invoke(app, ["probe", f"states:{folder}"])
    assert found.exit_code == 0, found.output
    assert "4 blocks of width 16" in found.output
    assert "token similarity" in found.output
    for arguments, said in ((["probe", "--gradients"], "--gradients needs a model"), (["depth"], "probe` alone")):
        refused = CliRunner().invoke(app, [*arguments, f"states:{folder}"])
        assert refused.exit_code != 0
        assert said in f"{refused.output} {refused.exception}"
