"""Saved files that something has damaged: what is read is what was written, or one line says that it is not."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from markupsafe import escape
from matplotlib.figure import Figure

import zoo
from depthscope import diagnose, probe
from depthscope.cli.command import note_command
from depthscope.files import content_sum, write_json
from depthscope.locks import OWNER, _holder
from depthscope.probing import Profile
from depthscope.report import read_metrics, write
from depthscope.watching import load_records
from depthscope_lab.papers.study import FILES, Earlier, Study, earlier, judge, run
from depthscope_lab.training import vit_digits
from depthscope_lab.training.checkpoint import read_newest
from depthscope_lab.training.comparison import Cell, Launch, Result, keep_result, read_result
from depthscope_lab.training.data.wikitext import _read
from tiny_training import Recorder, assert_bitwise_equal, run_in, saved, tiny_config

Damage = Callable[[random.Random, str], str | bytes]
ROUNDS = 6  # of every kind of damage, at other places
SPOILT: list[Any] = [None, True, 7, -1, 1.5, "7", "", [], {}, [[]], {"a": None}]


@dataclass(frozen=True)
class Config:
    seed: int = 0
    levels: tuple[float, ...] = (0.5, 1.0)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a JSON document, the outermost excepted."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(inner, (*path, key))


def elsewhere(chance: random.Random, text: str, change: Callable[[Any, Any], object]) -> str:
    """Calls `change(holder, key)` for something in the document, or in one line of a file of lines."""
    lines = text.splitlines() if text.count("\n{") and not text.startswith("{\n") else [text]
    number = chance.randrange(len(lines))
    document = json.loads(lines[number])
    *path, key = chance.choice(list(places(document)))
    holder = document
    for step in path:
        holder = holder[step]
    change(holder, key)
    lines[number] = json.dumps(document)
    return "\n".join(lines) + "\n"


def replaced(spoil: Callable[[random.Random], Any]) -> Damage:
    return lambda chance, text: elsewhere(chance, text, lambda holder, key: holder.__setitem__(key, spoil(chance)))


def marked(written: str) -> Damage:
    """Something becomes what `json.dumps` would not write."""
    mark = "a mark of this test"
    return lambda chance, text: replaced(lambda _: mark)(chance, text).replace(f'"{mark}"', written)


def with_another_digit(chance: random.Random, text: str) -> str:
    place = chance.choice([index for index, letter in enumerate(text) if letter.isdecimal()])
    return text[:place] + chance.choice([digit for digit in "123456789" if digit != text[place]]) + text[place + 1 :]


def with_a_key_twice(chance: random.Random, text: str) -> str:
    """The second one holds for Python, and says something else."""
    place = text.rindex("}")
    name = chance.choice(list(json.loads(text.splitlines()[-1] if "\n{" in text else text)) or ["step"])
    return f"{text[:place]}, {json.dumps(name)}: {json.dumps(chance.choice(SPOILT))}}}{text[place + 1 :]}"


def with_a_format_of_tomorrow(_chance: random.Random, text: str) -> str:
    if '"format":' in text:
        return text.replace('"format": ', '"format": 9')
    return text.replace("{", '{"format": 99, ', 1)


def with_a_stray_byte(chance: random.Random, text: str) -> bytes:
    place = chance.randrange(len(text))
    return text[:place].encode() + b"\xff" + text[place:].encode()


DAMAGES: dict[str, Damage] = {
    "another digit": with_another_digit,
    "a missing key": lambda chance, text: elsewhere(chance, text, lambda holder, key: holder.pop(key)),
    "another type": replaced(lambda chance: chance.choice(SPOILT)),
    "null": replaced(lambda _: None),
    "nan": marked("NaN"),
    "infinity": marked("1e999"),
    "a number of 5000 digits": marked("9" * 5000),
    "a key twice": lambda chance, text: with_a_key_twice(chance, text) if text.startswith("{") else text + text,
    "cut off": lambda chance, text: text[: chance.randrange(len(text) - 2)],
    "utf-16": lambda _, text: text.encode("utf-16"),
    "no utf-8": with_a_stray_byte,
    "nested deeply": lambda chance, text: marked("[" * 10_000 + "]" * 10_000)(chance, text),
    "nested just so": lambda chance, text: marked("[" * 900 + "]" * 900)(chance, text),
    "another format": with_a_format_of_tomorrow,
}
damaged = pytest.mark.parametrize("kind", DAMAGES)


def spoil(path: Path, kind: str) -> Iterator[str]:
    """Damages a file again and again; afterwards it is as it was."""
    whole = path.read_text()
    chance = random.Random(kind)
    for _ in range(ROUNDS):
        given = DAMAGES[kind](chance, whole)
        path.write_bytes(given if isinstance(given, bytes) else given.encode())
        yield given if isinstance(given, str) else repr(given)
    path.write_text(whole)


def one_line(error: BaseException | str) -> bool:
    return bool(str(error)) and "\n" not in str(error)


def result_of(act: Callable[[], Any]) -> Any:
    """What it gives, or the ValueError that it refuses with; anything else is a traceback to the user."""
    try:
        return act()
    except ValueError as error:
        return error


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run up to step 6 of 8, with checkpoints of steps 4 and 6; beside it, whole, what it comes to."""
    folder = tmp_path_factory.mktemp("trained")
    run_in(folder / "whole", tiny_config(steps=8), watch_every=2, checkpoint_every=2)
    with pytest.raises(InterruptedError):
        run_in(folder / "run", tiny_config(steps=8), display=Recorder(_stop), watch_every=2, checkpoint_every=2)
    return folder


def _stop(step: int) -> None:
    if step == 7:
        raise InterruptedError


@damaged
def test_a_checkpoint_is_what_was_written_or_the_one_before_is_taken(kind: str, trained: Path):
    folder = trained / "run" / "checkpoints"
    written = read_newest(folder, print)
    assert written.step == 6
    for given in spoil(folder / "step-00000006" / "state.json", kind):
        hints: list[str] = []
        found = read_newest(folder, hints.append)
        assert (found.record == written.record) == (found.step == 6), given
        assert found.step == 6 or (found.step == 4 and all(map(one_line, hints)) and len(hints) == 1), given


@pytest.mark.parametrize("name", ["checkpoints/step-00000006/state.json", "metrics.jsonl", "depth.jsonl"])
@damaged
def test_resumed_it_comes_to_the_same_weights_and_no_number_differs_in_silence(
    kind: str, name: str, trained: Path, tmp_path: Path
):
    shutil.copytree(trained / "run", tmp_path / "run")
    next(spoil(tmp_path / "run" / name, kind))
    display = Recorder()
    options: Any = {"display": display, "resume": True, "watch_every": 2, "checkpoint_every": 2}
    ended = result_of(lambda: run_in(tmp_path / "run", tiny_config(steps=8), **options))
    if isinstance(ended, ValueError):
        assert one_line(ended)
        return
    assert_bitwise_equal(saved(tmp_path / "run"), saved(trained / "whole"))
    timed = {"images_per_second"}
    rows = [
        [{key: value for key, value in row.items() if key not in timed} for row in read_metrics(path / "metrics.jsonl")]
        for path in (tmp_path / "run", trained / "whole")
    ]
    hints = " ".join(display.messages)
    if name == "metrics.jsonl":
        assert rows[0] == rows[1] or "metrics.jsonl" in hints
    else:
        assert rows[0] == rows[1]
        same = _records(tmp_path / "run") == _records(trained / "whole")
        assert same or "depth.jsonl" in hints


def _records(folder: Path) -> Any:
    return result_of(lambda: load_records(folder / "depth.jsonl").to_csv())


@damaged
def test_a_profile_is_what_was_written_or_refused(kind: str, tmp_path: Path):
    probe(*zoo.make("bert")).save(tmp_path)
    written = Profile.load(tmp_path)
    for given in spoil(tmp_path / "profile.json", kind):
        found = result_of(lambda: Profile.load(tmp_path))
        if isinstance(found, ValueError):
            assert one_line(found), given
        else:
            assert found.metadata == written.metadata, given
            assert found.frame.equals(written.frame)


@pytest.mark.parametrize("failed", [None, "the loss is not finite at step 3"])
@damaged
def test_the_end_of_a_compared_run_is_what_was_written_or_found_out_again(
    kind: str, failed: str | None, tmp_path: Path
):
    cell, launch = Cell(vit_digits("post")), Launch(tmp_path)
    (folder := launch.run_folder(cell)).mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    keep_result(Result(cell, failed), launch)
    assert read_result(cell, launch) == Result(cell, failed)
    for given in spoil(folder / "outcome.json", kind):
        assert read_result(cell, launch) in (None, Result(cell, failed)), given


@pytest.mark.parametrize("name", ["config.json", "claims.json"])
@damaged
def test_an_earlier_study_is_what_was_written_or_computed_again(kind: str, name: str, tmp_path: Path):
    claims = [judge("there are rows", paper="§1", ours="4", tolerance="none", holds=True)]
    table = pd.DataFrame({"x": [1, 2]})
    study = Study("sample", Config(), Config(), lambda *_: table, lambda _: Figure(), lambda *_: claims)
    run(study, Config(), tmp_path)
    assert earlier(study, Config(), tmp_path) == Earlier(claims)
    assert name in FILES
    for given in spoil(tmp_path / "sample" / name, kind):
        found = earlier(study, Config(), tmp_path)
        assert found.claims == claims or (found.claims is None and one_line(found.refused)), given


@damaged
def test_records_of_a_watch_are_read_or_refused(kind: str, trained: Path, tmp_path: Path):
    path = Path(shutil.copy(trained / "whole" / "depth.jsonl", tmp_path))
    for given in spoil(path, kind):
        found = result_of(lambda: load_records(path))
        assert isinstance(found, pd.DataFrame) or one_line(found), given


def cut_at_a_line(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def as_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_a_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    "damage", [cut_at_a_line, lambda path: path.write_bytes(b""), Path.unlink, as_a_pipe, as_a_link]
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "depth.jsonl", "commands.json"])
def test_the_page_of_a_training_names_what_is_damaged_and_does_not_show_it(
    name: str, damage: Callable[[Path], object], trained: Path, tmp_path: Path
):
    folder = Path(shutil.copytree(trained / "whole", tmp_path / "run"))
    note_command(folder, "train", "train()")
    hints: list[str] = []
    assert name not in write(tmp_path / "page.html", folder, say=hints.append).read_text(encoding="utf-8")
    assert hints == []
    damage(folder / name)
    text = write(tmp_path / "page.html", folder, say=hints.append).read_text(encoding="utf-8")
    if name == "commands.json" and damage == Path.unlink:
        return  # a folder need not have one
    assert len(hints) == 1
    assert name in hints[0]
    assert one_line(hints[0])
    assert str(escape(hints[0])) in text
    assert ("Where it ended" in text) == (name != "metrics.jsonl")


@pytest.mark.parametrize("spoilt", [{"towers": "a"}, {"tokens": None}, {"towers": []}, {"blocks": 10**400}])
@pytest.mark.parametrize("judged", [True, False])
def test_what_an_earlier_version_gave_no_sum_is_shown_or_refused_in_one_line(
    judged: bool, spoilt: dict[str, Any], tmp_path: Path
):
    profile = probe(*zoo.make("bert"))
    profile.save(tmp_path)
    about = {name: value for name, value in profile.metadata.items() if name not in ("kind", "sha256", "files")}
    (tmp_path / "profile.json").write_text(json.dumps({"format": 1, **about, **spoilt}))
    if judged:
        write_json(tmp_path / "diagnosis.json", diagnose(profile).to_dict())
    shown = result_of(lambda: write(tmp_path / "page.html", tmp_path))
    assert isinstance(shown, Path) or one_line(shown)


def test_another_table_in_the_place_of_sinks_is_refused(tmp_path: Path):
    probe(*zoo.make("bert")).save(tmp_path)
    about = json.loads((tmp_path / "profile.json").read_text())
    old = {name: value for name, value in about.items() if name not in ("kind", "sha256", "files")}
    (tmp_path / "profile.json").write_text(json.dumps(old))
    shutil.copy(tmp_path / "profile.parquet", tmp_path / "sinks.parquet")
    with pytest.raises(ValueError, match="holds no profile of format 1"):
        Profile.load(tmp_path)


@damaged
def test_a_vocabulary_is_read_or_refused(kind: str, tmp_path: Path):
    (tmp_path / "vocabulary.json").write_text(json.dumps({"words": ["a", "b2"]}))
    for given in spoil(tmp_path / "vocabulary.json", kind):
        with pytest.raises(ValueError, match="expected a complete cache") as refused:
            _read("words", tmp_path)
        assert one_line(refused.value), given


@damaged
def test_of_a_damaged_owner_another_process_is_named(kind: str, tmp_path: Path):
    (tmp_path / OWNER).write_text('{"pid": 1234, "host": "a", "since": "b"}\n')
    for given in spoil(tmp_path / OWNER, kind):
        assert one_line(_holder(tmp_path / OWNER)), given


def test_a_sum_is_of_what_is_said_not_of_how(tmp_path: Path):
    value = {"b": [1, 2.5, None], "a": "é"}
    write_json(tmp_path / "one.json", value)
    assert content_sum(json.loads((tmp_path / "one.json").read_text())) == content_sum(dict(reversed(value.items())))
    assert content_sum(value) != content_sum(value | {"a": "e"})
