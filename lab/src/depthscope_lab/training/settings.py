"""Settings by name: `name=value` as text, read by the type of the field that it names. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from depthscope.naming import did_you_mean, unknown_name

_TRUTHS = {"true": True, "yes": True, "false": False, "no": False}


def read_settings(given: Sequence[str], types: Mapping[str, Any]) -> dict[str, Any]:
    """`["lr=3e-4", "drop_at=0.5,0.9"]` as values of these types (name → type). The last of one name holds."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise ValueError(f"expected --set name=value, got {text!r}")
        if name not in types:
            raise unknown_name("setting", name, types)
        found[name] = read_value(name, value.strip(), types[name])
    return found


def read_value(name: str, text: str, kind: Any) -> Any:
    """The value that a text stands for; a ValueError says what was expected."""
    options = [kind] if get_origin(kind) in (tuple, None) or not get_args(kind) else list(get_args(kind))
    if NoneType in options and text.lower() == "none":
        return None
    wanted = next(option for option in options if option is not NoneType)
    if get_origin(wanted) is tuple:
        return tuple(_number(name, part, get_args(wanted)[0], several=True) for part in text.split(",") if part.strip())
    if wanted is bool:
        if text.lower() not in _TRUTHS:
            raise ValueError(f"expected {name} to be true or false, got {text!r}")
        return _TRUTHS[text.lower()]
    return _number(name, text, wanted) if wanted in (int, float) else text


def check_type(name: str, value: Any, kind: Any) -> None:
    """Values come from a command line or from JSON as well as from code."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            hint = did_you_mean(str(value), get_args(kind))
            raise ValueError(f"{name}: {hint}expected one of {', '.join(get_args(kind))}, got {value!r}")
        return
    allowed = [get_origin(option) or option for option in (get_args(kind) if type(None) in get_args(kind) else [kind])]
    number = float in allowed and isinstance(value, int) and not isinstance(value, bool)
    if not number and (type(value) not in allowed):
        wanted = " or ".join(option.__name__ for option in allowed)
        raise ValueError(f"expected {name} to be {wanted}, got {value!r}")


def written(value: Any) -> str:
    """The text from which `read_value` makes this value."""
    if isinstance(value, list | tuple):
        return ",".join(map(written, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _number(name: str, text: str, kind: type, several: bool = False) -> Any:
    try:
        return kind(text)
    except ValueError:
        what = "whole number" if kind is int else "number"
        expected = f"{what}s separated by commas" if several else f"a {what}"
        raise ValueError(f"expected {name} to be {expected}, got {text!r}") from None
