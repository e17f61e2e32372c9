"""How a thing with options is written: `de-escalation(tau=0.5, at=ffn_input, mixing=Ema(decay=0.99))`.

The same words on the command line, in messages and as folder names. A value is a number, a word, true, false, none, a
bracket of several, or again a thing with options. Imports nothing heavy.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_FORM = re.compile(r"\s*([A-Za-z][\w.-]*)\s*(?:\((.*)\))?\s*", re.DOTALL)
_RESERVED = {"remedy", "kind", "told"}  # words of the records
_WORDS = {"true": True, "yes": True, "false": False, "no": False, "none": None}


@dataclass(frozen=True)
class Named:
    """A name and its options. Hashable: options are sorted pairs, and so are those of options that have some."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, name: str, /, **options: Any) -> Named:
        return cls(name, tuple(sorted(options.items())))

    def changed(self, /, **options: Any) -> Named:
        """The same with other options; those that are not given stay."""
        return Named.of(self.name, **dict(self.options) | options)

    def without(self, *options: str) -> Named:
        """The same without these options."""
        return Named.of(self.name, **{name: value for name, value in self.options if name not in options})

    def completed(self, defaults: Mapping[str, Any]) -> Named:
        """The same with options that it does not have yet."""
        return Named.of(self.name, **{**defaults, **dict(self.options)})

    def record(self, key: str) -> dict[str, Any]:
        """As JSON has it: `{key: name, option: value, …}`; a value with options has its name under "kind"."""
        return {key: self.name} | {name: _plain(value) for name, value in self.options}

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={_written(v)}' for k, v in self.options)})" if self.options else self.name


def parse(text: str) -> Named:
    """Reads `name` or `name(option=value, …)`; a ValueError says in one line what is wrong."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise ValueError(f"expected a name, or name(option=value, …), got {text!r}")
    name, inside = found.groups()
    try:
        call = ast.parse(f"_({inside or ''})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        call = None
    if not isinstance(call, ast.Call):
        raise ValueError(f"expected option=value, … between the brackets of {text!r}")
    return Named.of(name, **_options(call, text))


def split(text: str, separator: str) -> list[str]:
    """The parts between separators that stand outside all brackets, without spaces around them."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _options(call: ast.Call, text: str) -> dict[str, Any]:
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError(f"expected every option of {text!r} as name=value")
    names = [str(keyword.arg) for keyword in call.keywords]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"expected each option once, got {name} several times in {text!r}")
        if name in _RESERVED:
            raise ValueError(f"{name} is no option of a remedy, got {text!r}")
    return {name: _value(keyword.value, text) for name, keyword in zip(names, call.keywords, strict=True)}


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Name):
        return _WORDS.get(node.id.lower(), node.id)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return Named.of(node.func.id, **_options(node, text))
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_value(item, text) for item in node.elts)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        what = "something else"
        with suppress(RecursionError, MemoryError):
            what = repr(ast.unparse(node)[:60])
        raise ValueError(f"expected a number, a word or name(option=value), got {what} in {text[:120]!r}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Named):
        return value.record("kind")
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_written, value))}]"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
