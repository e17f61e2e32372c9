"""See how deep your Transformer really is, learn why it stops, and make it go deeper.

Importing this package imports nothing heavy: the rooms (`depthscope.measures`, …) load on first use.
"""

from importlib import import_module
from importlib.metadata import version
from typing import Any

__version__ = version("depthscope")

_ROOMS = ("measures", "models", "remedies")

__all__ = ["__version__"]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"depthscope.{name}")
    raise AttributeError(f"module 'depthscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
