"""Profiles, trainings and studies in, a self-contained HTML page out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "CHARTS": "charts",
    "Chart": "drawings",
    "Claim": "formats",
    "Drawing": "drawings",
    "Material": "drawings",
    "Subject": "subjects",
    "read": "reading",
    "read_metrics": "formats",
    "write": "page",
    "write_index": "page",
}

__all__ = [
    "CHARTS",
    "Chart",
    "Claim",
    "Drawing",
    "Material",
    "Subject",
    "read",
    "read_metrics",
    "write",
    "write_index",
]

if TYPE_CHECKING:
    from depthscope.report.charts import CHARTS
    from depthscope.report.drawings import Chart, Drawing, Material
    from depthscope.report.formats import Claim, read_metrics
    from depthscope.report.page import write, write_index
    from depthscope.report.reading import read
    from depthscope.report.subjects import Subject


def __getattr__(name: str) -> Any:
    """Loaded on first use: Altair is an extra."""
    if name in _HOMES:
        return getattr(import_module(f"depthscope.report.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'depthscope.report' has no attribute {name!r}")
