"""Remedies as the Python that puts them in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from depthscope.remedies.remedy import Remedy


def expression(remedy: Remedy) -> str:
    """`DeEscalate(tau=0.4, at="output")`: the options that are not at their default, and those without one."""
    everybody = {field.name for field in fields(Remedy)}
    own_first = sorted(fields(remedy), key=lambda field: field.name in everybody)
    options = [
        f"{field.name}={_literal(getattr(remedy, field.name))}"
        for field in own_first
        if field.default is MISSING or getattr(remedy, field.name) != field.default or field.name in remedy.always_shown
    ]
    return f"{type(remedy).__name__}({', '.join(options)})"


def call(remedies: tuple[Remedy, ...], options: Mapping[str, Any], width: int | None = None) -> str:
    """The line that puts remedies into a model; `options` are what else `apply` must be told.

    A line longer than `width` is broken, one argument a line.
    """
    arguments = ["model", *map(expression, remedies), *(f"{name}={_literal(value)}" for name, value in options.items())]
    line = f"depthscope.apply({', '.join(arguments)})"
    if width is None or len(line) <= width:
        return line
    return "\n".join(["depthscope.apply(", *(f"    {argument}," for argument in arguments), ")"])


def lines(remedies: tuple[Remedy, ...], options: Mapping[str, Any]) -> str:
    """The imports, and the line that puts remedies into a model: it runs as it stands."""
    sources: dict[str, set[str]] = {}
    for kind in (kind for remedy in remedies for kind in _types_in(remedy)):
        room = "depthscope.remedies" if kind.__module__.startswith("depthscope.") else kind.__module__
        sources.setdefault(room, set()).add(kind.__name__)
    imports = [f"from {room} import {', '.join(sorted(names))}" for room, names in sources.items()]
    return "\n".join(["import depthscope", *imports, "", call(remedies, options)])


def _types_in(value: Any) -> Iterator[type]:
    """The classes of a remedy and of what its options hold."""
    yield type(value)
    for field in fields(value):
        if is_dataclass(item := getattr(value, field.name)):
            yield from _types_in(item)


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
