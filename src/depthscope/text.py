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
_VOCABULARY = 8192
_UNKNOWN = "[UNK]"
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


def cut(text: Text, tokenizer: Any, tokens: int, samples: int, *, spread: bool = False) -> list[list[int]]:
    """`samples` pieces of `tokens` ids each, from the beginning on or spread over the text; refuses one too short.

    Pieces of one article are about one thing: what they share is then not told from what all texts share.
    """
    if hasattr(tokenizer, "encode_batch"):
        ids = tokenizer.encode(text.content).ids
        rows = [ids[i : i + tokens] for i in range(0, len(ids), tokens)]
    else:  # of transformers: every piece gets the special tokens that the model was trained with
        rows = tokenizer(text.content, truncation=True, max_length=tokens, return_overflowing_tokens=True)["input_ids"]
    complete = [list(row) for row in rows if len(row) == tokens]
    if len(complete) < samples:
        raise ValueError(
            f"expected at least {samples} × {tokens} tokens in {text.source!r}, got {sum(map(len, rows))}; "
            "give a longer text, or fewer --samples or --tokens"
        )
    return [complete[i * len(complete) // samples] for i in range(samples)] if spread else complete[:samples]


def train_tokenizer(text: Text, vocabulary: int) -> Any:
    """A WordPiece tokenizer for this text with ids below `vocabulary`, the same in every run.

    The trainer numbers letters in the order in which it meets them, which changes from run to run, and
    breaks ties by number; given to it as special tokens, they are numbered beforehand. The tokenizer that
    is returned knows them as ordinary pieces.
    """
    tokenizers: Any = require("tokenizers", "huggingface")
    letters = _commonest_letters(text.content, (min(vocabulary, _VOCABULARY) - len(_RESERVED) - 1) // 2)
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
    trained.train_from_iterator([text.content], trainer)
    pieces = {piece: number for piece, number in trained.get_vocab().items() if number < vocabulary}
    return _word_piece(tokenizers, pieces)


def _word_piece(tokenizers: Any, pieces: dict[str, int] | None) -> Any:
    known = {} if pieces is None else {"vocab": pieces}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token=_UNKNOWN, **known))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _commonest_letters(content: str, most: int) -> list[str]:
    counted = Counter("".join(content.split()))
    return sorted(sorted(counted, key=lambda letter: (-counted[letter], letter))[: max(most, 0)])
