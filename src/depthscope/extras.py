"""Optional dependencies: imported where they are used, with one line that says how to get them."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


class MissingExtra(ImportError):
    """A part of depthscope was asked for whose dependencies are not installed."""


def require(module: str, extra: str) -> ModuleType:
    """Imports an optional module, or says which extra brings it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.split(".")[0] != error.name.split(".")[0]:
            raise  # the module is there, and one of its own imports is broken
        raise MissingExtra(f"this needs {error.name}: pip install 'depthscope[{extra}]'") from None
