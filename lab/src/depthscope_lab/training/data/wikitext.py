"""WikiText-103 and WikiText-2 (Merity et al. 2017), or Python's manual in their manner, as memory-mapped tokens.

A source is a folder with the original token files (`wiki.train.tokens`, …, or `train.txt`, …, as
Transformer-XL's authors call them), the name of a Hugging Face dataset, or a folder that `save_to_disk` wrote.
Its numbers are kept in a cache under the hash of the text, so a text is read once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from depthscope.files import read_json, write_whole_folder
from depthscope.text import read_text
from depthscope_lab.extras import require
from depthscope_lab.training.data.token_stream import UNKNOWN, Vocabulary, count_words

WIKITEXT103 = "Salesforce/wikitext:wikitext-103-v1"
WIKITEXT103_WORDS, WIKITEXT103_TOKENS = 267_735, 103_227_021  # of the training text
SPLITS = ("train", "valid", "test")

_LAYOUT = "1"  # of the cache; another number makes old caches unseen
_FILES = ("wiki.{}.tokens", "{}.txt")
_HUB_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
# Tokens with one <eos> per line. WikiText-2 and WikiText-103 have the same validation and test texts.
_WIKITEXT_HELD_OUT = {"valid": 217_646, "test": 245_569}
_WIKITEXT_TRAIN = {"WikiText-2": 2_088_628, "WikiText-103": WIKITEXT103_TOKENS}
_RARE = 3  # WikiText-103 writes <unk> for words that occur less often


@dataclass(frozen=True)
class Corpus:
    """Three streams of token numbers (int32) and the words they stand for."""

    name: str
    vocabulary: Vocabulary
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    fingerprint: str

    def describe(self) -> dict[str, Any]:
        """As JSON: a run is continued only on the same."""
        counts = {f"{split} tokens": len(getattr(self, split)) for split in SPLITS}
        return {"name": self.name, "vocabulary": len(self.vocabulary), **counts, "fingerprint": self.fingerprint}


@dataclass(frozen=True)
class _Source:
    """Three texts: their lines, what messages call them, and a hash of all."""

    name: str
    digest: str
    lines: dict[str, Callable[[], Iterator[str]]]
    called: dict[str, str]


def load_wikitext(source: str | Path, cache: Path | None = None) -> Corpus:
    """The corpus of a folder or of a Hugging Face dataset ("Salesforce/wikitext:wikitext-103-v1").

    `cache`: by default `depthscope` in the user's cache folder.
    """
    path = Path(source)
    if (isinstance(source, Path) or source.startswith((".", "/", "~"))) and not path.is_dir():
        raise ValueError(f"expected a folder with {_FILES[0].format('train')}, …, got no folder at {source}")
    saved = (path / "dataset_dict.json").is_file()  # what `save_to_disk` wrote
    found = _token_files(path) if path.is_dir() and not saved else _dataset(str(source), saved)
    caches = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "depthscope"
    folder = caches / f"wikitext-{found.digest[:32]}"
    if not folder.is_dir():
        _build(found, folder)
    return _read(found.name, folder)


def load_manual() -> Corpus:
    """Python's own manual, which every Python has and which differs between versions; 1/10 each to validate and test.

    Words and marks are separate tokens; those that occur less than three times in the training part are `<unk>`.
    """
    text = read_text(None)
    lines = [" ".join(re.findall(r"\w+|[^\w\s]", line)) for line in text.content.splitlines()]
    tenth = len(lines) // 10
    parts = {"train": lines[: -2 * tenth], "valid": lines[-2 * tenth : -tenth], "test": lines[-tenth:]}
    counted = Counter(word for line in parts["train"] for word in line.split())
    for split, part in parts.items():
        parts[split] = [" ".join(w if counted[w] >= _RARE else UNKNOWN for w in line.split()) for line in part]
    vocabulary = Vocabulary.of(count_words(parts["train"]))
    streams = {
        split: np.concatenate([np.asarray(line, dtype=np.int32) for line in vocabulary.encode(part, text.source)])
        for split, part in parts.items()
    }
    return Corpus("Python's manual", vocabulary, **streams, fingerprint=text.sha256[:16])


def _token_files(folder: Path) -> _Source:
    """A folder with one file per split."""
    paths, digest = {}, hashlib.sha256(_LAYOUT.encode())
    for split in SPLITS:
        names = [pattern.format(split) for pattern in _FILES]
        found = [folder / name for name in names if (folder / name).is_file()]
        if not found:
            have = ", ".join(sorted(path.name for path in folder.iterdir())[:6]) or "nothing"
            raise ValueError(
                f"expected {' or '.join(names)} in {folder}, got {have}; fetch WikiText's token files anew"
            )
        paths[split] = found[0]
        with found[0].open("rb") as file:
            digest.update(f"{split} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    lines: dict[str, Callable[[], Iterator[str]]] = {split: partial(_lines_of, path) for split, path in paths.items()}
    return _Source(folder.name, digest.hexdigest(), lines, {split: str(path) for split, path in paths.items()})


def _lines_of(path: Path) -> Iterator[str]:
    line, number = "", 0
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                number += 1
                yield line
    except UnicodeDecodeError:
        raise ValueError(f"expected UTF-8 in {path}, got other bytes after line {number}; fetch it anew") from None
    if not line.endswith("\n"):
        what = "an empty file" if number == 0 else f"line {number} without an end"
        raise ValueError(f"expected whole lines in {path}, got {what}; it seems to be truncated, fetch it anew")


def _dataset(name: str, saved: bool) -> _Source:
    """A Hugging Face dataset with one row per line."""
    datasets: Any = require("datasets")
    path, _, config = name.partition(":")
    try:
        found = datasets.load_from_disk(path) if saved else datasets.load_dataset(path, config or None)
        splits = {split: found[hub].with_format(None) for split, hub in _HUB_SPLITS.items()}
    except Exception as error:  # its own, and those of every file system and network below it
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"could not load the dataset {name!r}: {reason}; with WikiText on disk, give the folder that has "
            f"{', '.join(_FILES[0].format(split) for split in SPLITS)}"
        ) from None
    called = {split: f"the split {hub!r} of {name!r}" for split, hub in _HUB_SPLITS.items()}
    digest = hashlib.sha256(_LAYOUT.encode())
    for split, rows in splits.items():
        if "text" not in rows.column_names:
            raise ValueError(f"expected a column text in {called[split]}, got {', '.join(rows.column_names)}")
        digest.update(split.encode())
        for line in _rows_of(rows):
            digest.update(line.encode() + b"\n")
    return _Source(name, digest.hexdigest(), {split: partial(_rows_of, rows) for split, rows in splits.items()}, called)


def _rows_of(rows: Any) -> Iterator[str]:
    for batch in rows.iter(batch_size=10_000):
        yield from batch["text"]


def _build(source: _Source, folder: Path) -> None:
    """Counts, encodes, writes; the folder appears complete or not at all.

    Held-out texts of WikiText come with one of its two training texts: anything else is cut off somewhere.
    """
    counted = {split: count_words(source.lines[split]()) for split in SPLITS}
    vocabulary = Vocabulary.of(counted["train"])
    lengths = {split: words.total() for split, words in counted.items()}
    held_out = {split: lengths[split] for split in _WIKITEXT_HELD_OUT}
    if held_out == _WIKITEXT_HELD_OUT and lengths["train"] not in _WIKITEXT_TRAIN.values():
        known = " or ".join(f"{count} ({name})" for name, count in _WIKITEXT_TRAIN.items())
        raise ValueError(
            f"expected {known} tokens in {source.called['train']}, since valid and test are WikiText's, "
            f"got {lengths['train']}; it seems to be truncated, fetch it anew"
        )

    def write(scratch: Path) -> None:
        for split, length in lengths.items():
            stream = np.lib.format.open_memmap(scratch / f"{split}.npy", "w+", np.int32, (length,))
            at = 0
            for numbers in vocabulary.encode(source.lines[split](), source.called[split]):
                stream[at : at + len(numbers)] = numbers
                at += len(numbers)
            stream.flush()
        (scratch / "vocabulary.json").write_text(json.dumps(vocabulary.words, ensure_ascii=False), encoding="utf-8")

    write_whole_folder(folder, write)


def _read(name: str, folder: Path) -> Corpus:
    try:
        words = read_json(folder / "vocabulary.json")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError("a vocabulary.json that is no list of words")
        streams = {s: np.load(folder / f"{s}.npy", mmap_mode="r", allow_pickle=False) for s in SPLITS}
    except (OSError, ValueError) as error:
        raise ValueError(f"expected a complete cache in {folder}, got {error}; remove the folder") from None
    return Corpus(name, Vocabulary(tuple(words)), **streams, fingerprint=folder.name.rpartition("-")[2][:16])
