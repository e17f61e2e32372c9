"""The README's commands and what it says they print: found in the text, run, compared."""

import re
import shlex
from dataclasses import dataclass

LEFT_OUT = "…"  # a line of its own: here the README leaves something out
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
_DECIMAL = re.compile(r"[+-]?\d+\.\d+(?:e[+-]?\d+)?")


@dataclass(frozen=True)
class Shown:
    """A command of the README, and the ```text block that follows it."""

    arguments: tuple[str, ...]
    text: str | None

    def __str__(self) -> str:
        return shlex.join(("depthscope", *self.arguments))


def commands_in(readme: str) -> list[Shown]:
    """Every line `depthscope …` of the ```bash blocks, in order.

    A ```text block shows what the last command of the ```bash block right before it prints.
    """
    found: list[Shown] = []
    blocks = _FENCE.findall(readme)
    for number, (language, code) in enumerate(blocks):
        if language != "bash":
            continue
        lines = [shlex.split(line, comments=True) for line in code.replace("\\\n", " ").splitlines()]
        calls = [tuple(words[1:]) for words in lines if words[:1] == ["depthscope"]]
        follows = blocks[number + 1] if number + 1 < len(blocks) else ("", "")
        text = follows[1] if follows[0] == "text" else None
        if text is not None and (not lines or lines[-1][:1] != ["depthscope"]):
            raise ValueError(f"a ```text block follows commands of which the last is not depthscope's:\n{code}")
        last = len(calls) - 1
        found += [Shown(call, text if index == last else None) for index, call in enumerate(calls)]
    return found


def difference(shown: str, printed: str) -> str | None:
    """Where what the README shows is not what was printed; None if it is.

    Compared word by word, so that lines may be wrapped anywhere. A line that is "…" stands for any number of words;
    without it nothing may be missing, neither at the ends nor in between. Words and whole numbers are equal;
    a number with decimals may differ by one unit of its last digit, which is what the order of additions on
    another processor can change.
    """
    words = printed.split()
    parts = [part.split() for part in re.split(rf"^\s*{LEFT_OUT}\s*$", shown, flags=re.MULTILINE)]
    at = 0
    for number, part in enumerate(parts):
        first, last = number == 0, number == len(parts) - 1
        if not part:
            continue
        starts = [0] if first else range(at, len(words) - len(part) + 1)
        if last:
            starts = [start for start in starts if start + len(part) == len(words)]
        place = next((start for start in starts if _alike(part, words[start : start + len(part)])), None)
        if place is None:
            return _nearest(part, words, at)
        at = place + len(part)
    if len(parts) == 1 and not parts[0] and words:
        return "nothing is shown, but something was printed"
    return None


def _alike(part: list[str], words: list[str]) -> bool:
    return len(part) == len(words) and all(map(_same_word, part, words))


def _same_word(one: str, other: str) -> bool:
    if one == other:
        return True
    numbers = _DECIMAL.findall(one), _DECIMAL.findall(other)
    if len(numbers[0]) != len(numbers[1]) or _DECIMAL.sub("#", one) != _DECIMAL.sub("#", other):
        return False
    return all(map(_within_one_unit, *numbers))


def _within_one_unit(one: str, other: str) -> bool:
    (digits, _, exponent), (digits_2, _, exponent_2) = one.partition("e"), other.partition("e")
    places = len(digits.partition(".")[2])
    if exponent != exponent_2 or places != len(digits_2.partition(".")[2]):
        return False
    return abs(round(float(digits) * 10**places) - round(float(digits_2) * 10**places)) <= 1


def _nearest(part: list[str], words: list[str], at: int) -> str:
    """The place in the printed words that agrees longest with a part, and where both go apart."""

    def agreement(start: int) -> int:
        pairs = zip(part, words[start:], strict=False)  # the shorter one ends the comparison
        return next((i for i, (a, b) in enumerate(pairs) if not _same_word(a, b)), min(len(part), len(words) - start))

    start = max(range(at, len(words) + 1), key=agreement)
    same = agreement(start)
    shown, printed = " ".join(part[same : same + 12]), " ".join(words[start + same : start + same + 12])
    return f"after {' '.join(part[max(0, same - 8) : same])!r} README has {shown!r}, printed was {printed!r}"
