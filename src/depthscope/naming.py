"""Names that users type or files bring: an unknown one is refused with the nearest; what is no letter is spelled."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import groupby

_NO_LETTERS = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, marks that turn the direction of writing, line separators
_NEAR = 0.65  # of 1: "bret" is "bert", and "mamba" is not "llama"
_LAYOUT = {"\n", "\t", "\N{ZERO WIDTH JOINER}", "\N{ZERO WIDTH NON-JOINER}", "\N{SOFT HYPHEN}"}


def visible(text: str) -> str:
    """The text with what a terminal would obey, such as the escape character, spelled as Python does: \\x1b."""
    if text.isprintable():
        return text
    return "".join(
        letter.encode("unicode_escape").decode("ascii")
        if unicodedata.category(letter) in _NO_LETTERS and letter not in _LAYOUT
        else letter
        for letter in text
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "did you mean 'bert'? ", or nothing if no known name is near: spelled alike, one a part of the other (fig1
    of yu2024-fig1, bert of bert-base), or of its initials (lr of learning_rate)."""
    written, small = {item.lower(): item for item in known}, name.lower()
    words = [word for word in re.split("[-_ ]+", small) if word]
    near = (
        get_close_matches(small, written, n=1, cutoff=_NEAR)
        or [item for item in written if small in item.split("-") or item in words][:3]
        or [item for item in written if item == "".join(word[0] for word in words)]
    )
    return f"did you mean {' or '.join(repr(written[item]) for item in near)}? " if near else ""


def unknown_name(
    kind: str,
    name: str,
    known: Iterable[str],
    expected: str = "one of",
    *,
    owner: str = "",
    besides: Iterable[str] = (),
) -> ValueError:
    """The error for a name that does not exist: what came, what may be meant, what exists.

    `owner` is whose names these are, where others have other ones. `besides` are names that may be meant too, and that
    `expected` tells of.
    """
    names = list(known)
    what = f"{owner} has no {kind} {name!r}" if owner else f"unknown {kind} {name!r}"
    meant = did_you_mean(name, [*names, *besides])
    return ValueError(f"{what}: {meant}expected {expected} {', '.join(names)}")


def as_names(given: object, what: str) -> list[str]:
    """One name, or a list of names, as a list: "output" → ["output"]. Anything else is refused."""
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise ValueError(f"expected {what} as a name or a list of names, got {given!r}")
    names = [given] if isinstance(given, str) else list(given)
    if strange := [name for name in names if not isinstance(name, str)]:
        raise ValueError(f"expected {what} as a name or a list of names, got {strange[0]!r} among them")
    return names


def lowered(sentence: str) -> str:
    """With a small first letter, to follow a colon."""
    return sentence[:1].lower() + sentence[1:]


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """1, 2, 3, 5 as (1, 3), (5, 5)."""
    runs = (list(run) for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]))
    return [(run[0][1], run[-1][1]) for run in runs]


def ranges(numbers: Iterable[int]) -> str:
    """1, 2, 3, 5 as "1–3, 5"."""
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs_of(numbers))


def blocks_of(numbers: Iterable[int]) -> str:
    """1, 2, 3, 5 as "blocks 1–3, 5"."""
    found = list(numbers)
    return f"block{'s' if len(found) > 1 else ''} {ranges(found)}"


def sequences_of(numbers: Iterable[int], most: int = 6) -> str:
    """0, 1, 2, 5 as "sequences 0–2, 5"; of many runs the first ones, and how many sequences more there are."""
    found = list(numbers)
    shown = runs_of(found)[:most]
    more = len(found) - sum(last - first + 1 for first, last in shown)
    named = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in shown) + (f" and {more} more" if more else "")
    return f"sequence{'s' if len(found) > 1 else ''} {named}"


def counted(number: int, noun: str) -> str:
    """ "1 variant", "3 variants"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
