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

if TYPE_CHECKING:  # a type checker takes the names that are imported as themselves
    __version__: str
    from depthscope.anatomy import list_families as list_families
    from depthscope.anatomy import register_family as register_family
    from depthscope.attention_paths import PathShares as PathShares
    from depthscope.attention_paths import paths as paths
    from depthscope.diagnosis import Diagnosis as Diagnosis
    from depthscope.diagnosis import Fixed as Fixed
    from depthscope.diagnosis import diagnose as diagnose
    from depthscope.diagnosis import fix as fix
    from depthscope.measures import list_measures as list_measures
    from depthscope.probing import Captured as Captured
    from depthscope.probing import Profile as Profile
    from depthscope.probing import ablate as ablate
    from depthscope.probing import capture as capture
    from depthscope.probing import probe as probe
    from depthscope.probing import profile_of as profile_of
    from depthscope.probing import skip_loss as skip_loss
    from depthscope.remedies import DeEscalate as DeEscalate
    from depthscope.remedies import LayerScale as LayerScale
    from depthscope.remedies import Recommendation as Recommendation
    from depthscope.remedies import ResidualWeight as ResidualWeight
    from depthscope.remedies import apply as apply
    from depthscope.remedies import list_remedies as list_remedies
    from depthscope.remedies import recommend as recommend
    from depthscope.remedies import remove as remove
    from depthscope.remedies import restore as restore
    from depthscope.report import write
    from depthscope.scope import Scope as Scope
    from depthscope.usage import DepthUse as DepthUse
    from depthscope.usage import depth_use as depth_use
    from depthscope.value_spectra import Spectra as Spectra
    from depthscope.value_spectra import spectra as spectra
    from depthscope.watching import DepthCallback as DepthCallback
    from depthscope.watching import watch as watch

    write_report = write
else:
    __all__ = sorted([*_ROOM_OF, "__version__", "write_report"])


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
    return sorted([*_ROOM_OF, *_NAMES, "__version__", "write_report", "hooks", "inputs", "models", "report", "theory"])
