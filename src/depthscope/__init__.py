"""See how deep your Transformer really is, learn why it stops, and make it go deeper.

Importing this package imports nothing heavy: the public names and the rooms (`depthscope.measures`, …)
load on first use.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

_NAMES = {  # by room, the public names that it has
    "anatomy": "list_families register_family",
    "attention_paths": "PathShares paths",
    "diagnosis": "Diagnosis Fixed diagnose fix",
    "measures": "list_measures",
    "probing": "Captured Profile ablate capture probe profile_of skip_loss",
    "remedies": "DeEscalate LayerScale Recommendation ResidualWeight apply list_remedies recommend remove restore",
    "scope": "Scope",
    "usage": "DepthUse depth_use",
    "value_spectra": "Spectra spectra",
    "watching": "DepthCallback watch",
}
_ROOM_OF = {name: room for room, names in _NAMES.items() for name in names.split()}

__all__ = [
    "Captured",
    "DeEscalate",
    "DepthCallback",
    "DepthUse",
    "Diagnosis",
    "Fixed",
    "LayerScale",
    "PathShares",
    "Profile",
    "Recommendation",
    "ResidualWeight",
    "Scope",
    "Spectra",
    "__version__",
    "ablate",
    "apply",
    "capture",
    "depth_use",
    "diagnose",
    "fix",
    "list_families",
    "list_measures",
    "list_remedies",
    "paths",
    "probe",
    "profile_of",
    "recommend",
    "register_family",
    "remove",
    "restore",
    "skip_loss",
    "spectra",
    "watch",
    "write_report",
]

if TYPE_CHECKING:
    __version__: str
    from depthscope.anatomy import list_families, register_family
    from depthscope.attention_paths import PathShares, paths
    from depthscope.diagnosis import Diagnosis, Fixed, diagnose, fix
    from depthscope.measures import list_measures
    from depthscope.probing import Captured, Profile, ablate, capture, probe, profile_of, skip_loss
    from depthscope.remedies import (
        DeEscalate,
        LayerScale,
        Recommendation,
        ResidualWeight,
        apply,
        list_remedies,
        recommend,
        remove,
        restore,
    )
    from depthscope.report import write as write_report
    from depthscope.scope import Scope
    from depthscope.usage import DepthUse, depth_use
    from depthscope.value_spectra import Spectra, spectra
    from depthscope.watching import DepthCallback, watch


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("depthscope")
    if name == "write_report":  # `depthscope.report` is the room
        return import_module("depthscope.report").write
    if name in _ROOM_OF:
        return getattr(import_module(f"depthscope.{_ROOM_OF[name]}"), name)
    if not name.startswith("_") and find_spec(f"depthscope.{name}") is not None:
        return import_module(f"depthscope.{name}")
    raise AttributeError(f"module 'depthscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_NAMES, "hooks", "inputs", "models", "report", "theory"])
