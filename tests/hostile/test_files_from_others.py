"""Files that others made: pipes, devices, weights of another model, names that a terminal or matplotlib would obey."""

import io
import json
import math
import os
import resource
import struct
import subprocess
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import depthscope
from depthscope import files, memory
from depthscope.cli.app import main
from depthscope.cli.console import Screen
from depthscope.drawing import Curve, draw_by_block
from depthscope.naming import visible
from depthscope.probing import Profile
from depthscope.probing.readings import Reading, Sink
from depthscope.report import write
from depthscope.text import Text, cut, read_text, train_tokenizer
from depthscope.value_spectra.from_disk import files_in_index
from warm import run_warm

SHAPE = {"vocab_size": 500, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
SMALL = ("--tokens", "8", "--samples", "2")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    def call(*arguments: str, code: int) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["depthscope", *arguments])
        with pytest.raises(SystemExit) as exit:
            main()
        printed = capfd.readouterr()
        assert exit.value.code == code, printed.err
        return printed.out, printed.err

    return call


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text("one two three four five six seven eight nine ten " * 40)
    return path


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    BertModel(BertConfig(num_hidden_layers=3, **SHAPE)).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def change(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize("layers", [10**6, 10**12, 1e9])
def test_a_configuration_of_a_million_layers_is_refused_at_once(layers: float, bert: Path, run):
    change(bert, num_hidden_layers=layers)
    began = time.process_time()
    _, err = run("probe", f"hf:{bert}", code=2)
    assert str(int(layers)) in err
    assert "parameters" not in err  # none were counted
    assert time.process_time() - began < 10


def test_only_what_counts_layers_is_a_number_of_layers(bert: Path, text: Path, run):
    probe = ("probe", f"hf:{bert}", "--text", str(text), "--tokens", "16")
    change(bert, layer_norm_eps=math.nan)
    assert json.loads(run(*probe, "--json", code=0)[0])["diagnosis"]["verdict"] == "cannot tell"
    change(bert, layer_norm_eps=1e-12, hidden_size_per_layer_input=10**9)
    run(*probe, code=0)
    change(bert, num_hidden_layers=math.nan)
    assert f"expected a number of layers as num_hidden_layers of '{bert}', got nan" in run(*probe, code=2)[1]


def test_pipes_and_devices_are_no_input(tmp_path: Path, bert: Path, run):
    os.mkfifo(pipe := tmp_path / "pipe")
    assert "a pipe or a device" in run("probe", "bert", "--text", str(pipe), code=2)[1]
    os.mkfifo(bert / "tokenizer.json")
    assert "a pipe or a device" in run("probe", f"hf:{bert}", code=2)[1]
    (folder := tmp_path / "images").mkdir()
    os.mkfifo(folder / "a.png")
    small = ("--depth", "1", "--width", "64", "--samples", "1")
    assert "got 0;" in run("probe", "vit", *small, "--images", str(folder), code=2)[1]


ELSEWHERE = ("/dev/null", "../other/model.safetensors", "..", "", "a/b", "a\\b", "a\0b", 7, "pipe", "passwd")


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_index_names_files_of_its_own_folder(name: object, tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "passwd").symlink_to("/etc/passwd")
    (index := tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": name}}))
    with pytest.raises((ValueError, OSError), match=r"expected (names of files beside it|a file)"):
        files_in_index(index)


def test_the_links_of_the_hubs_cache_are_its_own(tmp_path: Path):
    """A snapshot's names are links to ../../blobs/SUM."""
    (snapshot := tmp_path / "models--a--b" / "snapshots" / "0123").mkdir(parents=True)
    (blobs := tmp_path / "models--a--b" / "blobs").mkdir()
    for name, text in (("one", ""), ("index.json", '{"weight_map": {"x": "one", "y": "two", "z": "not yet"}}')):
        (blobs / f"sum of {name}").write_text(text)
        (snapshot / name).symlink_to(f"../../blobs/sum of {name}")
    (snapshot / "two").symlink_to("one")
    assert files_in_index(snapshot / "index.json") == [snapshot / name for name in ("one", "two", "not yet")]


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_weights_elsewhere_are_not_opened(kind: str, bert: Path, run):
    (bert / "model.safetensors").rename(bert / "weights")
    (bert / f"{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"a.weight": "/dev/null"}}))
    for command in ("probe", "spectra"):
        said = f"expected names of files beside it in '{bert / kind}.index.json', got '/dev/null'"
        assert said in run(command, f"hf:{bert}", code=2)[1]


def png(width: int, height: int, text: bytes = b"", rows: int | None = None) -> bytes:
    """Black, of any size; a text of any length costs next to nothing in the file. It may end after some rows."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(9)
    pixels = b"".join(packer.compress(bytes(1 + 3 * width)) for _ in range(rows or height)) + packer.flush()
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    remark = chunk(b"zTXt", b"k\0\0" + zlib.compress(text)) if text else b""
    return b"\x89PNG\r\n\x1a\n" + header + remark + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def saved_as(format: str) -> bytes:
    Image.new("RGB", (9, 9)).save(made := io.BytesIO(), format=format)
    return made.getvalue()


HOSTILE_IMAGES: dict[str, Callable[[], bytes]] = {
    **{name: partial(saved_as, name) for name in ("EPS", "GIF", "TIFF", "WEBP", "BMP", "ICO", "PDF")},
    "empty": bytes,
    "zeros": lambda: bytes(100),
    "half of one": lambda: (whole := png(64, 64))[: len(whole) // 2],
    "900 million pixels": lambda: png(30_000, 30_000, rows=1500)[:100_000],  # its header is enough
    "100 million pixels": lambda: png(10_000, 10_000),
    "a text of 200 MB": lambda: png(9, 9, text=b"a" * 200_000_000),
}


@pytest.mark.parametrize("kind", HOSTILE_IMAGES)
def test_no_program_is_started_for_an_image_and_none_is_read_at_length(
    kind: str, tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "a.png").write_bytes(HOSTILE_IMAGES[kind]())
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a program was started"))
    small = ("--depth", "1", "--width", "64", "--samples", "1")
    began = time.process_time()
    err = run("probe", "vit", *small, "--images", str(tmp_path), code=2)[1]
    assert err.count("\n") == 1
    assert f"expected a PNG or JPEG image in '{tmp_path / 'a.png'}'" in err
    assert time.process_time() - began < 20


def test_of_a_long_text_only_what_is_needed_is_tokenised(tmp_path: Path):
    words = read_text(None).content
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=train_tokenizer(Text(words, "manual"), 2000))
    (path := tmp_path / "long.txt").write_text(words * (16_000_000 // len(words) + 1))
    began = time.process_time()
    tracemalloc.start()
    pieces = cut(read_text(path), tokenizer, tokens=16, samples=4, spread=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [len(piece) for piece in pieces] == [16] * 4
    assert len(set(map(tuple, pieces))) > 1
    assert peak < 400e6
    assert time.process_time() - began < 30


def test_a_text_that_is_one_word_is_refused_soon(tmp_path: Path, run):
    """The trainer of a tokenizer takes the square of a word's length."""
    (path := tmp_path / "word.txt").write_text("a" * 1_000_000)
    began = time.process_time()
    assert str(path) in run("probe", "bert", "--depth=1", "--width=64", *SMALL, "--text", str(path), code=2)[1]
    assert time.process_time() - began < 30


def test_long_words_change_no_tokenizer_but_their_own():
    words = read_text(None).content[:20_000]
    known = train_tokenizer(Text(words, "manual"), 1000).get_vocab()
    assert train_tokenizer(Text(f"{words} {'e' * 101}", "manual"), 1000).get_vocab() == known


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (folder := tmp_path / "docker/x").mkdir(parents=True)
    (folder / "memory.max").write_text("1000000\n")
    (folder / "memory.current").write_text("600000\n")
    (folder / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    (folder.parent / "memory.max").write_text("max\n")
    (own := tmp_path / "own").write_text("0::/docker/x\n")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "_OWN_CGROUPS", own)
    assert memory.available_memory() == 500_000


def test_weights_of_another_model_get_no_verdict(bert: Path, run):
    from safetensors.torch import load_file, save_file

    weights = load_file(bert / "model.safetensors")
    save_file(
        {f"other.{name}x": value for name, value in weights.items()}, bert / "model.safetensors", {"format": "pt"}
    )
    _, err = run("probe", f"hf:{bert}", *SMALL, code=2)
    assert "got none of them" in err


def test_a_weight_that_is_no_number_is_no_health(bert: Path, text: Path, run):
    model = BertModel.from_pretrained(bert)
    model.encoder.layer[1].attention.self.query.weight.data[:] = float("nan")
    model.save_pretrained(bert)
    out, _ = run("probe", f"hf:{bert}", *SMALL, "--text", str(text), "--json", code=0)
    diagnosis = json.loads(out)["diagnosis"]
    assert diagnosis["verdict"] == "broken"
    assert "encoder.layer.1.attention.self.query.weight" in diagnosis["headline"]


def test_names_are_text_to_the_terminal(capsys: pytest.CaptureFixture[str]):
    name = "[red]a[/red] \x1b[31mb\x07 \x9b2J \u202ec"
    screen = Screen()
    screen.print(name)
    screen.say(name)
    shown = capsys.readouterr().out
    assert shown.count(r"[red]a[/red] \x1b[31mb\x07 \x9b2J \u202ec") == 2
    assert visible("τ → é\n\t日本 👩‍👩‍👧") == "τ → é\n\t日本 👩‍👩‍👧"


def test_names_in_a_saved_profile_are_text_wherever_they_are_shown(tmp_path: Path):
    name = "a\x1b[31m\x07\0\u202eb\ud800"
    rows = [Reading(block, "output", -1, "token_similarity", 0, [0.9]) for block in (0, 1)]
    sink = Sink(1, 0, 0, 9.0, "\udc80=1")
    Profile.of_readings(rows, {"model": name, "blocks": 1, "notes": [name]}, [sink]).save(tmp_path)
    profile = Profile.load(tmp_path)
    assert profile.metadata["model"] == name
    page = write(tmp_path, tmp_path).read_text(encoding="utf-8")
    data = page[page.index('<script type="application/json"') :]
    shown = (str(profile), repr(profile), str(depthscope.diagnose(profile)), page[: len(page) - len(data)])
    for text in (*shown, data[: data.index("</script>")]):
        assert not {"\x1b", "\x07", "\0", "\u202e"} & set(text)
        assert "\\u001b" not in text.replace("\\\\u001b", "")
    assert all(r"a\x1b[31m\x07\x00\u202eb\ud800" in text for text in (shown[0], shown[1], shown[3]))
    assert profile.sinks["text"].tolist() == [r"\udc80=1"]


@pytest.mark.parametrize("name", ["a$b_{", "$x$", r"\$a$b_{$", "$$", "bell\x07"])
def test_names_are_text_to_matplotlib(name: str, tmp_path: Path):
    figure = draw_by_block({name: [Curve([0, 1], [0.0, 1.0], "red", name)]}, title=name)
    figure.savefig(tmp_path / "x.png")
    assert figure._suptitle.get_text().count("$") == name.count("$")


def test_a_folder_with_a_name_like_mathematics_loses_no_work(tmp_path: Path, bert: Path, text: Path, run):
    hostile = bert.rename(tmp_path / "a$b_{\x1b[31m$")
    out, _ = run("probe", f"hf:{hostile}", *SMALL, "--text", str(text), "--out", str(tmp_path / "out"), code=0)
    assert "\x1b[31m" not in out
    assert r"a$b_{\x1b[31m$" in out
    assert (tmp_path / "out" / "profile.png").stat().st_size


@pytest.mark.parametrize(("command", "shown"), [("probe", "No collapse"), ("fix", "No collapse")])
def test_a_full_disk_costs_no_printout(command: str, shown: str, tmp_path: Path):
    small = ["encoder", "--depth", "2", "--width", "16", "--heads", "2", *SMALL]
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1000, 1000))
    arguments = ("-m", "depthscope", command, *small, "--out", str(tmp_path / "out"))
    result = run_warm(*arguments, env=os.environ, first=full)
    assert shown in result.stdout
    assert result.returncode == 2, result.stderr
    assert result.stderr.splitlines()[-1].startswith(f"depthscope: could not write {tmp_path / 'out'}")
    assert "[Errno" not in result.stderr.splitlines()[-1]


def test_a_home_in_text_and_images_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        str(tmp_path / "no.txt") in run("probe", "bert", "--depth", "1", "--width", "64", "--text=~/no.txt", code=2)[1]
    )
    assert str(tmp_path / "no") in run("probe", "vit", "--depth", "1", "--width", "64", "--images=~/no", code=2)[1]


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_fix_replaces_an_older_one_as_a_whole_or_not_at_all(tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch):
    model = ("fix", "encoder", "--depth=2", "--width=16", "--heads=2", *SMALL, "--tau=0.5", "--out", str(tmp_path))
    run(*model, code=0)
    (tmp_path / "before" / "mine.txt").write_text("of the user")
    older = everything_in(tmp_path)
    assert {"fix.json", "before/profile.json", "after/sinks.parquet", "before/mine.txt"} <= older.keys()
    refuse = files._refuse_obstacle

    def full(failing: str, target: Path, *, is_folder: bool):
        if target == tmp_path / failing:
            raise OSError(f"could not write {target}: No space left on device")
        return refuse(target, is_folder=is_folder)

    for failing in ("fix.json", "after/profile.json", "before/profile.parquet"):
        with monkeypatch.context() as patched:
            patched.setattr(files, "_refuse_obstacle", partial(full, failing))
            out, err = run(*model, "--seed=1", code=2)
        assert "No collapse" in out  # what was computed is shown all the same
        assert str(tmp_path / failing) in err
        assert everything_in(tmp_path) == older, failing
    run(*model, "--seed=1", code=0)
    newer = everything_in(tmp_path)
    assert newer.keys() == older.keys()
    same = {name for name in newer if newer[name] == older[name]}
    assert same <= {"before/mine.txt", "before/sinks.parquet", "after/sinks.parquet"}  # no outliers: empty tables
