"""The charts of a page, in the order in which they stand there. Each is one function, and one line here.

Another package adds a chart by an entry point in the group `depthscope.charts` that names such a function, or by
`CHARTS.register(function)`.
"""

from __future__ import annotations

from depthscope.registry import Registry
from depthscope.report.charts import maps, over_blocks, trainings
from depthscope.report.drawings import Chart

__all__ = ["CHARTS"]


def _check(chart: Chart) -> None:
    if not callable(chart):
        raise ValueError(f"expected a function from Material to a Drawing or None, got {chart!r}")


CHARTS: Registry[Chart] = Registry(
    "chart",
    "depthscope.charts",
    [
        over_blocks.similarity,
        over_blocks.stations,
        over_blocks.DIVERSITY,
        over_blocks.difference,
        over_blocks.RANKS,
        over_blocks.ENERGY,
        over_blocks.skipped_blocks,
        maps.blocks_that_matter,
        maps.built_upon,
        over_blocks.steps,
        over_blocks.rates,
        maps.heads,
        over_blocks.GRADIENTS,
        over_blocks.GRADIENT_ROLES,
        maps.path_lengths,
        maps.paths_by_block,
        maps.eigenvalues,
        over_blocks.negative_share,
        maps.sinks,
        over_blocks.ROGUE_FEATURES,
        trainings.compared,
        trainings.training,
        trainings.watched,
    ],
    name_of=None,
    check=_check,
)
