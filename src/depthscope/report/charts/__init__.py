"""The charts of a page, in the order in which they stand there. Each is one function, and one line here.

Another package adds a chart by an entry point in the group `depthscope.charts` that names such a function, or by
`CHARTS.register(function)`.
"""

from __future__ import annotations

from depthscope.registry import Registry
from depthscope.report.charts import of_models, of_profiles, trainings
from depthscope.report.drawings import Chart

__all__ = ["CHARTS"]


def _check(chart: Chart) -> None:
    if not callable(chart):
        raise ValueError(f"expected a function from Material to a Drawing or None, got {chart!r}")


CHARTS: Registry[Chart] = Registry(
    "chart",
    "depthscope.charts",
    [
        of_profiles.similarity,
        of_profiles.RANKS,
        of_profiles.ENERGY,
        of_models.blocks_that_matter,
        of_profiles.steps,
        of_models.heads,
        of_profiles.GRADIENTS,
        of_models.path_lengths,
        of_models.eigenvalues,
        trainings.compared,
        trainings.training,
        trainings.watched,
    ],
    name_of=None,
    check=_check,
)
