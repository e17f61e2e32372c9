"""See how deep your Transformer really is, learn why it stops, and make it go deeper.

Importing this package imports nothing heavy: the public names and the rooms (`depthscope.measures`, …)
load on first use.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

__version__ = version("depthscope")

_ROOMS = ("anatomy", "diagnosis", "measures", "models", "probing", "remedies", "studies", "theory")
_PUBLIC = {
    "Diagnosis": "diagnosis",
    "Profile": "probing",
    "diagnose": "diagnosis",
    "probe": "probing",
    "skip_loss": "probing",
}

__all__ = ["Diagnosis", "Profile", "__version__", "diagnose", "probe", "skip_loss"]

if TYPE_CHECKING:
    from depthscope.diagnosis import Diagnosis, diagnose
    from depthscope.probing import Profile, probe, skip_loss


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"depthscope.{name}")
    if name in _PUBLIC:
        return getattr(import_module(f"depthscope.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'depthscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
