"""Token files, the vocabulary, the cache, the batch layout, and files that are not what they should be."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from depthscope_lab.training.data import wikitext
from depthscope_lab.training.data.token_stream import TokenRows, Vocabulary, count_words
from depthscope_lab.training.data.wikitext import load_manual, load_wikitext

TRAIN = " \n = Title = \n \n the cat sat on the <unk> . \n The cat ! \n"
VALID = " the cat . \n"
TEST = " a <unk> sat \n \n"


def write(folder: Path, names: str = "wiki.{}.tokens", **changes: str) -> Path:
    folder.mkdir(exist_ok=True)
    texts = {"train": TRAIN, "valid": VALID, "test": TEST} | changes
    for split, text in texts.items():
        (folder / names.format(split)).write_text(text, encoding="utf-8")
    return folder


def words(corpus: wikitext.Corpus, split: str) -> list[str]:
    return [corpus.vocabulary.words[number] for number in getattr(corpus, split)]


@pytest.mark.parametrize("names", ["wiki.{}.tokens", "{}.txt"])
def test_the_authors_vocabulary_and_streams(tmp_path: Path, names: str):
    """<eos> first, then by count, ties by first occurrence; one <eos> per line, blank ones too; case kept."""
    corpus = load_wikitext(write(tmp_path / "text", names), tmp_path / "cache")
    assert corpus.vocabulary.words == (
        "<eos>", "=", "the", "cat", "Title", "sat", "on", "<unk>", ".", "The", "!",
    )  # fmt: skip
    text = "<eos> = Title = <eos> <eos> the cat sat on the <unk> . <eos> The cat ! <eos>"
    assert " ".join(words(corpus, "train")) == text
    assert words(corpus, "valid") == ["the", "cat", ".", "<eos>"]
    assert words(corpus, "test") == ["<unk>", "<unk>", "sat", "<eos>", "<eos>"]  # "a" was never seen
    assert corpus.describe()["train tokens"] == 18
    assert corpus.describe()["vocabulary"] == 11


def test_the_cache_is_memory_mapped_and_used_again_and_not_for_another_text(tmp_path: Path, monkeypatch):
    folder, cache = write(tmp_path / "text"), tmp_path / "cache"
    first = load_wikitext(folder, cache)
    assert isinstance(first.train, np.memmap)
    assert [path.name for path in cache.iterdir()] == [f"wikitext-{first_digest(cache)}"]
    with monkeypatch.context() as patched:
        patched.setattr(wikitext, "_build", None)  # must not be called
        again = load_wikitext(folder, cache)
    assert_array_equal(again.train, first.train)
    assert again.describe() == first.describe()
    other = load_wikitext(write(folder, test=" the end \n"), cache)
    assert other.fingerprint != first.fingerprint
    assert len(list(cache.iterdir())) == 2


def first_digest(cache: Path) -> str:
    return next(cache.iterdir()).name.removeprefix("wikitext-")


def test_a_build_that_fails_leaves_no_cache(tmp_path: Path):
    folder = write(tmp_path / "text", train=" the cat . \n", test=" a dog \n")
    with pytest.raises(ValueError, match=r"wiki\.test\.tokens, got 'a' in line 1; write <unk>"):
        load_wikitext(folder, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_broken_cache_is_named(tmp_path: Path):
    folder = write(tmp_path / "text")
    load_wikitext(folder, tmp_path / "cache")
    kept = next((tmp_path / "cache").iterdir())
    (kept / "train.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(ValueError, match=r"complete cache in .*remove the folder"):
        load_wikitext(folder, tmp_path / "cache")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": TRAIN[:-4]}, r"wiki\.train\.tokens, got line 5 without an end; it seems to be truncated"),
        ({"valid": ""}, r"wiki\.valid\.tokens, got an empty file; it seems to be truncated"),
    ],
)
def test_truncated_files_are_named(tmp_path: Path, change: dict[str, str], message: str):
    with pytest.raises(ValueError, match=message):
        load_wikitext(write(tmp_path / "text", **change), tmp_path / "cache")


def test_a_training_text_cut_at_a_line_is_seen_if_the_held_out_ones_are_wikitexts(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(wikitext, "_WIKITEXT_HELD_OUT", {"valid": 4, "test": 5})
    monkeypatch.setattr(wikitext, "_WIKITEXT_TRAIN", {"WikiText-2": 18})
    load_wikitext(write(tmp_path / "whole"), tmp_path / "cache")
    with pytest.raises(ValueError, match=r"expected 18 \(WikiText-2\) tokens in .*wiki\.train\.tokens.*got 14"):
        load_wikitext(write(tmp_path / "cut", train=TRAIN.removesuffix(" The cat ! \n")), tmp_path / "cache")


def test_bytes_that_are_no_text_are_named(tmp_path: Path):
    folder = write(tmp_path / "text")
    (folder / "wiki.test.tokens").write_bytes(b" fine \n \xff\xfe \n")
    with pytest.raises(ValueError, match=r"expected UTF-8 in .*wiki\.test\.tokens"):
        load_wikitext(folder, tmp_path / "cache")


def test_missing_files_are_named(tmp_path: Path):
    folder = write(tmp_path / "text")
    (folder / "wiki.valid.tokens").unlink()
    with pytest.raises(
        ValueError, match=r"expected wiki\.valid\.tokens or valid\.txt in .*got wiki\.test\.tokens, wiki"
    ):
        load_wikitext(folder, tmp_path / "cache")


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path, kind: type):
    with pytest.raises(ValueError, match=r"expected a folder with wiki\.train\.tokens.*got no folder at .*missing"):
        load_wikitext(kind(tmp_path / "missing"), tmp_path / "cache")


def test_a_hugging_face_dataset_gives_the_same_streams(tmp_path: Path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = {"train": TRAIN, "validation": VALID, "test": TEST}
    saved = datasets.DatasetDict(
        {split: datasets.Dataset.from_dict({"text": text.splitlines(keepends=True)}) for split, text in rows.items()}
    )
    saved.save_to_disk(tmp_path / "saved")
    ours = load_wikitext(write(tmp_path / "text"), tmp_path / "cache")
    hub = load_wikitext(tmp_path / "saved", tmp_path / "cache")
    assert hub.vocabulary == ours.vocabulary
    for split in ("train", "valid", "test"):
        assert_array_equal(getattr(hub, split), getattr(ours, split))

    def unreachable(*_: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"could not load the dataset 'no/where': no network; .*wiki\.train\.tokens"):
        load_wikitext("no/where", tmp_path / "cache")


def test_the_manual_is_read_in_wikitexts_manner():
    corpus = load_manual()
    counts = np.bincount(corpus.train, minlength=len(corpus.vocabulary))
    in_order = counts[1:]
    assert (in_order[:-1] >= in_order[1:]).all()
    rare = [w for w, count in zip(corpus.vocabulary.words, counts, strict=True) if count < 3]
    assert rare == []
    assert "<unk>" in corpus.vocabulary.words
    assert max(corpus.valid.max(), corpus.test.max()) < len(corpus.vocabulary)
    assert len(corpus.train) > 50_000
    assert json.loads(json.dumps(corpus.describe())) == corpus.describe()


def test_rows_are_the_authors_ordered_iterator():
    """data[: s·rows].view(rows, −1).t(), segments of n, targets one later, a shorter last segment."""
    tokens = np.arange(47, dtype=np.int32)
    rows, data = TokenRows(tokens, 4), torch.arange(44).view(4, -1)
    assert rows.length == 11
    assert rows.segments(4) == 3
    starts = range(0, 10, 4)  # as range(0, len − 1, bptt)
    for number, i in enumerate(starts):
        n = min(4, 11 - 1 - i)
        inputs, targets = rows.segment(number, 4)
        assert torch.equal(inputs, data[:, i : i + n])
        assert torch.equal(targets, data[:, i + 1 : i + 1 + n])
        part, _ = rows.segment(number, 4, slice(1, 3))
        assert torch.equal(part, inputs[1:3])
    assert TokenRows(tokens, 4).segments(5) == 2  # ten predictions fit exactly


def test_rows_of_a_memory_map_are_not_copied(tmp_path: Path):
    np.save(tmp_path / "tokens.npy", np.arange(20, dtype=np.int32))
    mapped = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    assert np.shares_memory(TokenRows(mapped, 3).tokens, mapped)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenRows(np.arange(5), 3), "2 tokens per row, got 5 tokens for 3 rows"),
        (lambda: TokenRows(np.arange(5), 0), "for 0 rows"),
        (lambda: TokenRows(np.arange(9), 2).segments(0), "at least 1 token, got 0"),
        (lambda: TokenRows(np.arange(9), 2).segment(3, 1), "from 0 to 2, got 3"),
        (lambda: next(Vocabulary.of(count_words([" a \n"])).encode([" b "], "x")), "'b' in line 1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
