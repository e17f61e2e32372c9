"""Profiles, trainings and studies in, a self-contained HTML page out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_NAMES = {
    "charts": "CHARTS",
    "drawings": "Chart Drawing Material",
    "formats": "Claim read_metrics",
    "page": "write",
    "reading": "read",
    "subjects": "Subject",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

if TYPE_CHECKING:  # a type checker takes the names that are imported as themselves
    from depthscope.report.charts import CHARTS as CHARTS
    from depthscope.report.drawings import Chart as Chart
    from depthscope.report.drawings import Drawing as Drawing
    from depthscope.report.drawings import Material as Material
    from depthscope.report.formats import Claim as Claim
    from depthscope.report.formats import read_metrics as read_metrics
    from depthscope.report.page import write as write
    from depthscope.report.reading import read as read
    from depthscope.report.subjects import Subject as Subject
else:
    __all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Loaded on first use: Altair is an extra."""
    if name in _HOMES:
        return getattr(import_module(f"depthscope.report.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'depthscope.report' has no attribute {name!r}")
