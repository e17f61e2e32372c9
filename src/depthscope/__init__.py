"""See how deep your Transformer really is, learn why it stops, and make it go deeper.

Importing this package imports nothing heavy: the public names and the rooms (`depthscope.measures`, …)
load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_ROOMS = (
    "anatomy",
    "decomposition",
    "diagnosis",
    "drawing",
    "measures",
    "models",
    "passes",
    "probing",
    "remedies",
    "report",
    "theory",
    "usage",
)
_PUBLIC = {
    "Captured": "probing",
    "DeEscalate": "remedies",
    "DepthCallback": "probing",
    "DepthUse": "usage",
    "Diagnosis": "diagnosis",
    "Fixed": "diagnosis",
    "LayerScale": "remedies",
    "PathShares": "decomposition",
    "Profile": "probing",
    "Recommendation": "remedies",
    "ResidualWeight": "remedies",
    "Scope": "scope",
    "Spectra": "probing",
    "ablate": "probing",
    "apply": "remedies",
    "capture": "probing",
    "depth_use": "usage",
    "diagnose": "diagnosis",
    "fix": "diagnosis",
    "list_families": "anatomy",
    "list_measures": "measures",
    "list_remedies": "remedies",
    "paths": "decomposition",
    "register_family": "anatomy",
    "probe": "probing",
    "recommend": "remedies",
    "remove": "remedies",
    "restore": "remedies",
    "skip_loss": "probing",
    "spectra": "probing",
    "watch": "probing",
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
    "recommend",
    "register_family",
    "remove",
    "restore",
    "skip_loss",
    "spectra",
    "watch",
]

if TYPE_CHECKING:
    __version__: str
    from depthscope.anatomy import list_families, register_family
    from depthscope.decomposition import PathShares, paths
    from depthscope.diagnosis import Diagnosis, Fixed, diagnose, fix
    from depthscope.measures import list_measures
    from depthscope.probing import (
        Captured,
        DepthCallback,
        Profile,
        Spectra,
        ablate,
        capture,
        probe,
        skip_loss,
        spectra,
        watch,
    )
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
    from depthscope.scope import Scope
    from depthscope.usage import DepthUse, depth_use


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("depthscope")
    if name in _ROOMS:
        return import_module(f"depthscope.{name}")
    if name in _PUBLIC:
        return getattr(import_module(f"depthscope.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'depthscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
