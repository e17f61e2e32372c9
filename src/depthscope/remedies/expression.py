"""Remedies as the Python that puts them in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
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
    """The import, and the line that puts remedies into a model."""
    sources: dict[str, set[str]] = {}
    for remedy in remedies:
        module = type(remedy).__module__
        room = "depthscope.remedies" if module.startswith("depthscope.") else module
        sources.setdefault(room, set()).add(type(remedy).__name__)
    imports = [f"from {room} import {', '.join(sorted(names))}" for room, names in sources.items()]
    return "\n".join(imports) + f"\n\n{call(remedies, options)}"


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
