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
    "DepthCallback": "probing",
    "DepthUse": "usage",
    "Diagnosis": "diagnosis",
    "Fixed": "diagnosis",
    "PathShares": "decomposition",
    "Profile": "probing",
    "Spectra": "probing",
    "apply": "remedies",
    "depth_use": "usage",
    "diagnose": "diagnosis",
    "fix": "diagnosis",
    "paths": "decomposition",
    "register_family": "anatomy",
    "probe": "probing",
    "remove": "remedies",
    "skip_loss": "probing",
    "spectra": "probing",
    "watch": "probing",
    "without": "passes",
}

__all__ = [
    "DepthCallback",
    "DepthUse",
    "Diagnosis",
    "Fixed",
    "PathShares",
    "Profile",
    "Spectra",
    "__version__",
    "apply",
    "depth_use",
    "diagnose",
    "fix",
    "paths",
    "probe",
    "register_family",
    "remove",
    "skip_loss",
    "spectra",
    "watch",
    "without",
]

if TYPE_CHECKING:
    __version__: str
    from depthscope.anatomy import register_family
    from depthscope.decomposition import PathShares, paths
    from depthscope.diagnosis import Diagnosis, Fixed, diagnose, fix
    from depthscope.passes import without
    from depthscope.probing import DepthCallback, Profile, Spectra, probe, skip_loss, spectra, watch
    from depthscope.remedies import apply, remove
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
