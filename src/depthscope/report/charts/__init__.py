"""The charts of a page, in the order in which they stand there. Each is one function, and one line here.

Another package adds a chart by an entry point in the group `depthscope.charts` that names such a function, or by
`CHARTS.register(function)`.
"""

from __future__ import annotations

from depthscope.registry import Registry
from depthscope.report.charts.curves import (
    diversity,
    energy,
    gradient_roles,
    gradients,
    ranks,
    rogue_features,
    similarity,
    skipped_blocks,
    stations,
)
from depthscope.report.charts.depth_use import blocks_that_matter, built_upon
from depthscope.report.charts.differences import difference
from depthscope.report.charts.heads import heads
from depthscope.report.charts.path_shares import path_heads, path_lengths, paths_by_block
from depthscope.report.charts.sinks import sinks
from depthscope.report.charts.steps import rates, steps
from depthscope.report.charts.trainings import compared, training, watched
from depthscope.report.charts.weights import eigenvalues, negative_share
from depthscope.report.drawings import Chart

__all__ = ["CHARTS"]


def _check(chart: Chart) -> None:
    if not callable(chart):
        raise ValueError(f"expected a function from Material to a Drawing or None, got {chart!r}")


CHARTS: Registry[Chart] = Registry(
    "chart",
    "depthscope.charts",
    [
        similarity,
        stations,
        diversity,
        difference,
        ranks,
        energy,
        skipped_blocks,
        blocks_that_matter,
        built_upon,
        steps,
        rates,
        heads,
        gradients,
        gradient_roles,
        path_lengths,
        paths_by_block,
        path_heads,
        eigenvalues,
        negative_share,
        sinks,
        rogue_features,
        compared,
        training,
        watched,
    ],
    name_of=None,
    check=_check,
)
