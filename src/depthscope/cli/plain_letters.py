"""Letters that a terminal or a file cannot show, in letters that it can: τ becomes tau, a bar of a curve a sign."""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata

from depthscope.naming import visible

LEGIBLE = "depthscope.legible"  # the name by which codecs know it
_SPELLED = dict(zip("▁▂▃▄▅▆▇█", "_-~=+*%#", strict=True)) | {
    "λ": "lambda",
    "→": "->",
    "×": "x",
    "±": "+-",
    "−": "-",
    "–": "-",
    "—": "-",
    "·": ".",
    "≥": ">=",
    "≤": "<=",
    "≈": "~",
    "√": "sqrt ",
    "²": "^2",
    "½": "1/2",
    "⅓": "1/3",
    "‖": "|",
    "“": '"',
    "”": '"',
    "’": "'",
    "′": "'",
    "⟨": "<",
    "⟩": ">",
    "∂": "d",
    "∞": "inf",
    "§": "sec. ",
    "°": " deg",
    "\N{COMBINING CIRCUMFLEX ACCENT}": "^",
}


def legible(text: str, encoding: str) -> str:
    """The text in letters that the encoding has, and nothing that a terminal would obey; as it is if that is so."""
    return visible(text).encode(encoding, LEGIBLE).decode(encoding)


def write_legibly() -> None:
    """From here on nothing that is printed ends in an error, whatever stdout and stderr can show."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=LEGIBLE)


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


codecs.register_error(LEGIBLE, _spell)
