"""`depthscope schema COMMAND`: the JSON Schema of what a command prints with `--json`."""

from __future__ import annotations

from typing import Annotated

import typer

from depthscope.cli import completion


def schema(
    command: Annotated[
        str | None,
        typer.Argument(
            metavar="COMMAND", help="Without one, the commands are listed.", autocompletion=completion.schemas
        ),
    ] = None,
) -> None:
    """Print the JSON Schema of what a command prints with --json."""
    import json

    from depthscope.cli.documents import commands_with_schemas, schema_of

    if command is None:
        print("\n".join(commands_with_schemas()))
    else:
        print(json.dumps(schema_of(command), indent=2))
