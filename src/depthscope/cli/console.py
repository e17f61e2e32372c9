"""Where people read: rich's console, in the letters that the terminal has. τ becomes tau, a bar of a curve a sign."""

from __future__ import annotations

import codecs
import io
import math
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from depthscope.naming import visible

_WIDEST = 100  # longer lines are hard to read
_BARS = "▁▂▃▄▅▆▇█"
_LEGIBLE = "depthscope.legible"  # the name by which codecs know it
_SPELLED = dict(zip(f"{_BARS}×−–—·≈‖“”’", '_-~=+*%#x---.~|""\'', strict=True))
_SPELLED |= {"→": "->", "±": "+-", "≥": ">=", "≤": "<=", "√": "sqrt ", "²": "^2", "½": "1/2", "∞": "inf", "λ": "lambda"}


def legible(text: str, encoding: str) -> str:
    """The text in letters that the encoding has, and nothing that a terminal would obey; as it is if that is so."""
    return visible(text).encode(encoding, _LEGIBLE).decode(encoding)


def write_legibly() -> None:
    """From here on nothing that is printed ends in an error, whatever stdout and stderr can show."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_LEGIBLE)


def _spell(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(_spelled, error.object[error.start : error.end])), error.end


def _spelled(letter: str) -> str:
    if letter in _SPELLED:
        return _SPELLED[letter]
    kind, _, name = unicodedata.name(letter, "").rpartition(" LETTER ")
    if kind.startswith("GREEK"):
        return name.lower() if kind == "GREEK SMALL" else name.capitalize()
    simpler = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()  # … is ..., ₂ is 2, é is e
    return simpler or letter.encode("ascii", "backslashreplace").decode()


codecs.register_error(_LEGIBLE, _spell)


def sparkline(values: Sequence[float], low: float = 0.0, high: float = 1.0, width: int = 60) -> str:
    """One character per value, from `low` (▁) to `high` (█); at most `width`, evenly picked. Undefined is '·'."""
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    shares = [(value - low) / (high - low) if high > low else 0 * value for value in values]
    return "".join("·" if math.isnan(share) else _BARS[min(max(int(share * 8), 0), 7)] for share in shares)


class Screen(Console):
    """Strings are spelled before they are laid out, since τ is shorter than tau. No name is taken for markup."""

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False):
        super().__init__(highlight=False, markup=False, stderr=stderr, soft_wrap=soft_wrap)

    def render_str(self, text: str, **options: Any) -> Text:  # type: ignore[override]
        """rich calls it for every string, also for those in tables."""
        return super().render_str(legible(text, self.encoding), **options)

    @property
    def reading_width(self) -> int:
        """Of prose and code."""
        return min(self.width, _WIDEST)

    def wrapped(self, text: str, indent: str = "", following: str | None = None) -> list[str]:
        """A paragraph as lines, broken between words; `indent` stands before its first line."""
        return textwrap.wrap(
            legible(text, self.encoding),
            self.reading_width,
            initial_indent=indent,
            subsequent_indent=" " * len(indent) if following is None else following,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def say(self, text: str, indent: str = "", styles: Mapping[str, str] | None = None) -> None:
        """Prints a paragraph; `styles` are of words in it."""
        for line in self.wrapped(text, indent):
            shown = Text(line)
            for words, style in (styles or {}).items():
                shown.highlight_words([words], style)
            self.print(shown)

    def show_rows(self, headings: Sequence[str | Column], rows: Iterable[Sequence[str]], **options: Any) -> None:
        """A table of words, which are wrapped in their columns."""
        table = Table(*headings, box=None, header_style="bold", pad_edge=False, **options)
        for row in rows:
            table.add_row(*row)
        self.print(table)
        self.print()
