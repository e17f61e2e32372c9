"""What `--json` prints: one object in ASCII with the version of its schema; no nan, no infinity.

The schemas are beside this file, in `schemas/`: one per command, and `shared.json` with what several of them have.
`SCHEMA_VERSION` rises when a field goes away or changes its meaning; a new field does not raise it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from depthscope.naming import unknown_name

SCHEMA_VERSION = 2
_SHARED = "shared"


def document(command: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """What a command found, as it is printed or saved; what is not finite is None."""
    whole: dict[str, Any] = finite({"schema_version": SCHEMA_VERSION, "command": command, **found})
    return whole


def finite(value: Any) -> Any:
    """JSON knows neither nan nor infinity."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_document(command: str, found: Mapping[str, Any]) -> None:
    """Prints it in one line; whatever else a command says is not on stdout."""
    print(json.dumps(document(command, found), allow_nan=False), flush=True)


def commands_with_schemas() -> list[str]:
    """The commands that have `--json`."""
    names = (place.name.removesuffix(".json") for place in files(__package__).joinpath("schemas").iterdir())
    return sorted(name for name in names if name != _SHARED)


def schema_of(command: str) -> dict[str, Any]:
    """The JSON Schema (2020-12) of what a command prints with `--json`; it needs no other file."""
    known = commands_with_schemas()
    if command not in known:
        raise unknown_name("schema", command, known)
    own, shared = _read(command), _read(_SHARED)["$defs"]
    return {**own, "$defs": _needed(own, own.get("$defs", {}) | shared)}


def _needed(schema: Any, definitions: Mapping[str, Any]) -> dict[str, Any]:
    """The definitions that a schema refers to, and those that these refer to."""
    found: dict[str, Any] = {}
    open_ends = [schema]
    while open_ends:
        text = json.dumps(open_ends.pop())
        for name, definition in definitions.items():
            if name not in found and f'"#/$defs/{name}"' in text:
                found[name] = definition
                open_ends.append(definition)
    return dict(sorted(found.items()))


def _read(name: str) -> dict[str, Any]:
    text = files(__package__).joinpath("schemas", f"{name}.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema
