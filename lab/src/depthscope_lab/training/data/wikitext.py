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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
_LINES_AT_ONCE = 10_000
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


def load_wikitext(source: str | Path, cache: Path | None = None) -> Corpus:
    """The corpus of a folder or of a Hugging Face dataset ("Salesforce/wikitext:wikitext-103-v1").

    `cache`: by default `depthscope` in the user's cache folder.
    """
    found = _Files(Path(source)) if _is_token_folder(source) else _Hub(str(source))
    folder = (cache or _default_cache()) / f"wikitext-{found.digest()[:32]}"
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
    streams = {split: _joined(vocabulary.encode(part, text.source)) for split, part in parts.items()}
    return Corpus("Python's manual", vocabulary, **streams, fingerprint=text.sha256[:16])


class _Files:
    """A folder with one file per split."""

    def __init__(self, folder: Path):
        self.name = folder.name
        self.paths = {split: _file(folder, split) for split in SPLITS}

    def digest(self) -> str:
        digest = hashlib.sha256(_LAYOUT.encode())
        for split, path in self.paths.items():
            with path.open("rb") as file:
                digest.update(f"{split} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        return digest.hexdigest()

    def lines(self, split: str) -> Iterator[str]:
        path = self.paths[split]
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

    def called(self, split: str) -> str:
        return str(self.paths[split])


class _Hub:
    """A Hugging Face dataset with one row per line."""

    def __init__(self, name: str):
        datasets: Any = require("datasets")
        self.name = name
        path, _, config = name.partition(":")
        try:
            if (Path(path) / "dataset_dict.json").is_file():  # what `save_to_disk` wrote
                found = datasets.load_from_disk(path)
            else:
                found = datasets.load_dataset(path, config or None)
            self.splits = {split: found[hub].with_format(None) for split, hub in _HUB_SPLITS.items()}
        except Exception as error:  # its own, and those of every file system and network below it
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(
                f"could not load the dataset {name!r}: {reason}; with WikiText on disk, give the folder that has "
                f"{', '.join(_FILES[0].format(split) for split in SPLITS)}"
            ) from None
        for split, rows in self.splits.items():
            if "text" not in rows.column_names:
                raise ValueError(f"expected a column text in {self.called(split)}, got {', '.join(rows.column_names)}")

    def digest(self) -> str:
        digest = hashlib.sha256(_LAYOUT.encode())
        for split in SPLITS:
            digest.update(split.encode())
            for line in self.lines(split):
                digest.update(line.encode() + b"\n")
        return digest.hexdigest()

    def lines(self, split: str) -> Iterator[str]:
        for batch in self.splits[split].iter(batch_size=_LINES_AT_ONCE):
            yield from batch["text"]

    def called(self, split: str) -> str:
        return f"the split {_HUB_SPLITS[split]!r} of {self.name!r}"


def _is_token_folder(source: str | Path) -> bool:
    path = Path(source)
    if (isinstance(source, Path) or source.startswith((".", "/", "~"))) and not path.is_dir():
        raise ValueError(f"expected a folder with {_FILES[0].format('train')}, …, got no folder at {source}")
    return path.is_dir() and not (path / "dataset_dict.json").is_file()


def _file(folder: Path, split: str) -> Path:
    names = [pattern.format(split) for pattern in _FILES]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    have = ", ".join(sorted(path.name for path in folder.iterdir())[:6]) or "nothing"
    raise ValueError(f"expected {' or '.join(names)} in {folder}, got {have}; fetch WikiText's token files anew")


def _build(source: _Files | _Hub, folder: Path) -> None:
    """Counts, encodes, writes; the folder appears complete or not at all."""
    counted = {split: count_words(source.lines(split)) for split in SPLITS}
    vocabulary = Vocabulary.of(counted["train"])
    lengths = {split: words.total() for split, words in counted.items()}
    _check_lengths(source, lengths)

    def write(scratch: Path) -> None:
        for split, length in lengths.items():
            stream = np.lib.format.open_memmap(scratch / f"{split}.npy", "w+", np.int32, (length,))
            at = 0
            for numbers in vocabulary.encode(source.lines(split), source.called(split)):
                stream[at : at + len(numbers)] = numbers
                at += len(numbers)
            stream.flush()
        (scratch / "vocabulary.json").write_text(json.dumps(vocabulary.words, ensure_ascii=False), encoding="utf-8")

    write_whole_folder(folder, write)


def _check_lengths(source: _Files | _Hub, lengths: dict[str, int]) -> None:
    """Held-out texts of WikiText come with one of its two training texts: anything else is cut off somewhere."""
    held_out = {split: lengths[split] for split in _WIKITEXT_HELD_OUT}
    if held_out == _WIKITEXT_HELD_OUT and lengths["train"] not in _WIKITEXT_TRAIN.values():
        known = " or ".join(f"{count} ({name})" for name, count in _WIKITEXT_TRAIN.items())
        raise ValueError(
            f"expected {known} tokens in {source.called('train')}, since valid and test are WikiText's, "
            f"got {lengths['train']}; it seems to be truncated, fetch it anew"
        )


def _read(name: str, folder: Path) -> Corpus:
    try:
        words = read_json(folder / "vocabulary.json")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError("a vocabulary.json that is no list of words")
        streams = {s: np.load(folder / f"{s}.npy", mmap_mode="r", allow_pickle=False) for s in SPLITS}
    except (OSError, ValueError) as error:
        raise ValueError(f"expected a complete cache in {folder}, got {error}; remove the folder") from None
    return Corpus(name, Vocabulary(tuple(words)), **streams, fingerprint=folder.name.rpartition("-")[2][:16])


def _joined(encoded: Iterable[list[int]]) -> np.ndarray:
    return np.concatenate([np.asarray(numbers, dtype=np.int32) for numbers in encoded])


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "depthscope"
