"""What the lab is installed with, imported where it is used: most commands need only a part of it."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from depthscope.extras import MissingExtra


def require(module: str) -> ModuleType:
    """Imports a dependency of the lab, or says how to get it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.split(".")[0] != error.name.split(".")[0]:
            raise  # the module is there, and one of its own imports is broken
        raise MissingExtra(f"this needs {error.name}, which the lab brings: pip install ./lab in a checkout") from None
