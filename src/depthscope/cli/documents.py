"""What `--json` prints: one object in ASCII with the version of its schema; no nan, no infinity.

The schemas are beside this file, in `schemas/`: one per command, and `shared.json` with what several of them have.
`SCHEMA_VERSION` rises when a field goes away or changes its meaning; a new field does not raise it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.resources import files
from typing import Annotated, Any

import typer

from depthscope.cli import completion
from depthscope.naming import unknown_name

SCHEMA_VERSION = 2


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
    names = {place.name.removesuffix(".json") for place in files(__package__).joinpath("schemas").iterdir()}
    return sorted(names - {"shared"})


def schema_of(command: str) -> dict[str, Any]:
    """The JSON Schema (2020-12) of what a command prints with `--json`; it needs no other file."""
    if command not in (known := commands_with_schemas()):
        raise unknown_name("schema", command, known)
    own, shared = (
        json.loads(files(__package__).joinpath("schemas", f"{name}.json").read_text(encoding="utf-8"))
        for name in (command, "shared")
    )
    definitions = own.get("$defs", {}) | shared["$defs"]
    needed: dict[str, Any] = {}
    unread = [own]
    while unread:  # what it refers to, and what that refers to
        text = json.dumps(unread.pop())
        new = {name: made for name, made in definitions.items() if name not in needed and f'"#/$defs/{name}"' in text}
        needed |= new
        unread += new.values()
    return {**own, "$defs": dict(sorted(needed.items()))}


def schema(
    command: Annotated[
        str | None,
        typer.Argument(
            metavar="COMMAND",
            help="Without one, the commands are listed.",
            autocompletion=lambda incomplete: completion.beginning(commands_with_schemas(), incomplete),
        ),
    ] = None,
) -> None:
    """Print the JSON Schema of what a command prints with --json."""
    print("\n".join(commands_with_schemas()) if command is None else json.dumps(schema_of(command), indent=2))
