"""What can be known of the options of `watch` without a model."""

from __future__ import annotations

import os
from collections.abc import Sequence

from depthscope.measures import MEASURES, choose_measures
from depthscope.passes import check_told
from depthscope.probing.roles import OF_GRADIENTS
from depthscope.probing.watching.gate import Rules, make_gate
from depthscope.stations import choose_stations


def check_options(
    every: object,
    *,
    measures: str | Sequence[str] = "token_similarity",
    stations: str | Sequence[str] = "output",
    on_record: object = None,
    path: object = None,
    gradients: object = False,
    stop_if: Rules | None = None,
    warn_if: Rules | None = None,
    on_alarm: object = None,
    **told: object,
) -> None:
    """Refuses wrong options of `watch` that can be known as such without the model; what `told` says needs it."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"expected every= to be a whole number of steps, 1 or more, got {every!r}")
    if of_attention := [name for name in choose_measures(measures) if MEASURES[name].of == "attention"]:
        raise ValueError(f"{', '.join(of_attention)}: attention matrices are not watched; use depthscope.probe")
    if not isinstance(gradients, bool):
        raise ValueError(f"expected gradients= to be True or False, got {gradients!r}")
    taken = (*choose_measures(measures), *(sorted(OF_GRADIENTS) if gradients else ()))
    make_gate(stop_if, warn_if, taken, choose_stations(stations))
    if on_alarm is not None and not callable(on_alarm):
        raise ValueError(f"expected on_alarm= to be a function of an alarm, got {on_alarm!r}")
    if on_record is not None and not callable(on_record):
        raise ValueError(f"expected on_record= to be a function of (step, scalars), got {on_record!r}")
    if path is not None and (not isinstance(path, str | os.PathLike) or not str(path) or "\0" in str(path)):
        raise ValueError(f"expected path= to be the path of a file, got {path!r}")
    check_told(told)
