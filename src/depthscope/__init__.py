"""See how deep your Transformer really is, learn why it stops, and make it go deeper.

Importing this package imports nothing heavy: the public names and the rooms (`depthscope.measures`, …)
load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_ROOMS = (
    "anatomy",
    "attention_paths",
    "diagnosis",
    "discovery",
    "drawing",
    "hooks",
    "inputs",
    "measures",
    "models",
    "probing",
    "remedies",
    "report",
    "theory",
    "usage",
    "value_spectra",
    "watching",
)
_PUBLIC = {
    "Captured": "probing",
    "DeEscalate": "remedies",
    "DepthCallback": "watching",
    "DepthUse": "usage",
    "Diagnosis": "diagnosis",
    "Fixed": "diagnosis",
    "LayerScale": "remedies",
    "PathShares": "attention_paths",
    "Profile": "probing",
    "Recommendation": "remedies",
    "ResidualWeight": "remedies",
    "Scope": "scope",
    "Spectra": "value_spectra",
    "ablate": "probing",
    "apply": "remedies",
    "capture": "probing",
    "depth_use": "usage",
    "diagnose": "diagnosis",
    "fix": "diagnosis",
    "list_families": "anatomy",
    "list_measures": "measures",
    "list_remedies": "remedies",
    "paths": "attention_paths",
    "register_family": "anatomy",
    "probe": "probing",
    "profile_of": "probing",
    "recommend": "remedies",
    "remove": "remedies",
    "restore": "remedies",
    "skip_loss": "probing",
    "spectra": "value_spectra",
    "watch": "watching",
    "write_report": "report.write",  # `depthscope.report` is the room
}

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
    if name in _ROOMS:
        return import_module(f"depthscope.{name}")
    if name in _PUBLIC:
        room, _, inside = _PUBLIC[name].partition(".")
        return getattr(import_module(f"depthscope.{room}"), inside or name)
    raise AttributeError(f"module 'depthscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
