"""What `--json` prints, held against its schema: strictly, so that a field without a description fails."""

import json
from typing import Any

from jsonschema import Draft202012Validator

from depthscope.cli.documents import SCHEMA_VERSION, schema_of


def strict(schema: Any) -> Any:
    """The same schema, where an object has the fields that are described, and no others unless it says so."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {} if "properties" not in schema else {"additionalProperties": False}
    return closed | {name: strict(item) for name, item in schema.items()}


def checked(command: str, printed: str) -> dict[str, Any]:
    """The object that a command printed: one line of ASCII, without nan, as its schema says."""
    assert printed.isascii()
    assert printed.count("\n") == 1

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found = json.loads(printed, parse_constant=refuse)
    assert (found["schema_version"], found["command"]) == (SCHEMA_VERSION, command)
    Draft202012Validator(strict(schema_of(command))).validate(found)
    return found
