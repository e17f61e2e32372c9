"""Text for language models without a download: the user's file or Python's own manual, cut into sequences of ids."""

from __future__ import annotations

import codecs
import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthscope.extras import require

_BYTES_READ = 16_000_000  # enough for 10 000 sequences of 128 tokens; a larger file is read to here
_ENOUGH = 1_000_000  # characters: what is longer is not tokenised as a whole, which takes a minute and gigabytes
_PER_TOKEN = 16  # characters, more than any usual text has
_VOCABULARY = 8192
_SPECIAL = 8  # tokens that a tokenizer may add to a piece of text
_UNKNOWN = "[UNK]"
_LONGEST_WORD = 100  # characters: WordPiece spells a longer one as unknown, and the trainer's time is its square
# Models give ids below 8 a meaning of their own (padding, start, end); no word of a text may have one of them.
_RESERVED = [f"[reserved {i}]" for i in range(7)]


@dataclass(frozen=True)
class Text:
    """What is read, and where it is from."""

    content: str
    source: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()


def read_text(path: Path | None) -> Text:
    """The file's text (its first 16 MB), or Python's manual, which differs between versions of Python."""
    if path is None:
        from pydoc_data.topics import topics

        return Text("\n".join(topics[name] for name in sorted(topics)), "pydoc_data.topics")
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a pipe or a device"
        raise ValueError(f"expected a file of text, got {str(path)!r}, which is {what}")
    with path.open("rb") as file:
        content = file.read(_BYTES_READ)
        complete = not file.read(1)
    try:  # a character cut at 16 MB is no mistake of the file
        return Text(codecs.getincrementaldecoder("utf-8")().decode(content, final=complete), str(path))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"expected UTF-8 in {str(path)!r}, got byte 0x{content[error.start]:02x} at position {error.start}; "
            "save the file as UTF-8"
        ) from None


def require_length(text: Text, tokens: int, samples: int) -> None:
    """Refuses at once what no tokenizer can cut: but for the special ones, no token is shorter than a character."""
    if samples * (tokens - _SPECIAL) > len(text.content):
        raise _too_short(text, tokens, samples, f"{len(text.content)} characters")


def cut(text: Text, tokenizer: Any, tokens: int, samples: int, *, spread: bool = False) -> list[list[int]]:
    """`samples` pieces of `tokens` ids each, from the beginning on or spread over the text; refuses one too short.

    Pieces of one article are about one thing: what they share is then not distinguished from what all texts share.
    """
    rows = _rows(_windows(text.content, tokens, samples, spread=spread), tokenizer, tokens)
    if sum(len(row) == tokens for row in rows) < samples:  # long words, or much empty space
        rows = _rows([text.content], tokenizer, tokens)
    complete = [list(row) for row in rows if len(row) == tokens]
    if len(complete) < samples:
        found = sum(map(len, rows))
        enough = "enough tokens, but too few whole sequences: more --tokens leave room beside special tokens"
        raise _too_short(text, tokens, samples, enough if found >= samples * tokens else str(found))
    return [complete[i * len(complete) // samples] for i in range(samples)] if spread else complete[:samples]


def _windows(content: str, tokens: int, samples: int, *, spread: bool) -> list[str]:
    """The parts of a long text that are tokenised: its beginning, or one per sample spread over it."""
    most = max(_ENOUGH, samples * tokens * _PER_TOKEN)
    if len(content) <= most or not spread:
        return [content[:most]]
    starts = (i * len(content) // samples for i in range(samples))
    return [content[start : start + most // samples] for start in starts]


def _rows(parts: list[str], tokenizer: Any, tokens: int) -> list[list[int]]:
    """Each part in pieces of `tokens` ids; its last piece may be shorter."""
    if hasattr(tokenizer, "encode_batch"):
        encoded = [tokenizer.encode(part).ids for part in parts]
        return [ids[i : i + tokens] for ids in encoded for i in range(0, len(ids), tokens)]
    # Of transformers: every piece gets the special tokens that the model was trained with.
    cut_up = {"truncation": True, "max_length": tokens, "return_overflowing_tokens": True}
    return [row for part in parts for row in tokenizer(part, **cut_up)["input_ids"]]


def _too_short(text: Text, tokens: int, samples: int, got: str) -> ValueError:
    return ValueError(
        f"expected at least {samples} × {tokens} tokens in {text.source!r}, got {got}; "
        "give a longer text, or fewer --samples or --tokens"
    )


def train_tokenizer(text: Text, vocabulary: int) -> Any:
    """A WordPiece tokenizer for this text with ids below `vocabulary`, the same in every run.

    It is made for the first million characters, without the words that WordPiece takes for unknown by their length.

    The trainer numbers letters in the order in which it meets them, which changes from run to run, and
    breaks ties by number; given to it as special tokens, they are numbered beforehand. The tokenizer that
    is returned knows them as ordinary pieces.
    """
    tokenizers: Any = require("tokenizers", "huggingface")
    content = text.content[:_ENOUGH]
    most = max((min(vocabulary, _VOCABULARY) - len(_RESERVED) - 1) // 2, 0)
    counted = Counter("".join(content.split()))
    letters = sorted(sorted(counted, key=lambda letter: (-counted[letter], letter))[:most])  # the commonest
    fixed = [*_RESERVED, _UNKNOWN, *letters, *(f"##{letter}" for letter in letters)]
    if len(fixed) > vocabulary:
        raise ValueError(f"expected a model with a vocabulary of at least {len(fixed)} ids, got {vocabulary}")
    trained = _word_piece(tokenizers, None)
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=min(vocabulary, _VOCABULARY),
        special_tokens=fixed,
        limit_alphabet=len(letters),
        initial_alphabet=letters,
        show_progress=False,
    )
    words = [content]
    if max(map(len, content.split()), default=0) > _LONGEST_WORD:  # a file without a space is one word
        words = [word for word, _ in trained.pre_tokenizer.pre_tokenize_str(content) if len(word) <= _LONGEST_WORD]
    trained.train_from_iterator(words, trainer)
    pieces = {piece: number for piece, number in trained.get_vocab().items() if number < vocabulary}
    return _word_piece(tokenizers, pieces)


def _word_piece(tokenizers: Any, pieces: dict[str, int] | None) -> Any:
    known = {} if pieces is None else {"vocab": pieces}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token=_UNKNOWN, **known))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return tokenizer
