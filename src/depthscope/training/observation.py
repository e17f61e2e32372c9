"""What passes through the model show: depth during training, and where numbers cease to be finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.anatomy import anatomy_of
from depthscope.extras import MissingExtra, require
from depthscope.files import write_whole
from depthscope.passes import Listen, Machine, Visit
from depthscope.probing import watch
from depthscope.probing.watching import Watch
from depthscope.probing.watching.heat_map import heat_map
from depthscope.probing.watching.records import load_records
from depthscope.training.run import NonFiniteLoss
from depthscope.training.session import Session, keep_metrics
from depthscope.training.task import Carry, Task

BEHIND_FFN = "after_ffn"

AFTER_THE_BLOCKS, ALL_FINITE = 1_000_000, 1_000_001  # greater than any block's number: the first is the least


@contextmanager
def watching_depth(session: Session) -> Iterator[Watch | None]:
    """`depthscope.watch` around the loop, in the first process; gives None where nothing is watched.

    Behind the FFN and at the block's end: a remedy stands between them, and at τ = 1 leaves 0. The scalars go to
    metrics and trackers with the step that was watched, the curves to `depth.jsonl`, and in the end, if
    matplotlib is there, the picture of the first to `depth.png`.
    """
    run = session.run
    if run.watch_every is None or not session.engine.is_main:
        yield None
        return

    def keep(_step: int, scalars: dict[str, float]) -> None:
        similarity = scalars.get(f"depth/{BEHIND_FFN}/t_sim_last", scalars.get("depth/t_sim_last", math.nan))
        session.similarity = similarity
        keep_metrics(session, {"token_similarity": similarity, **scalars})

    entrance, stations = session.engine.entrance, (BEHIND_FFN, "output")
    nothing_to_see = session.position.step >= session.total
    try:
        if nothing_to_see:
            yield None
        else:
            with watch(entrance, run.watch_every, stations=stations, on_record=keep, path=run.depth) as found:
                yield found
    except NonFiniteLoss:
        _draw(session)
        raise
    _draw(session)


def _draw(session: Session) -> None:
    """The picture of what was watched, also by a run that was killed before it came to draw."""
    run = session.run
    if not run.depth.exists() or (run.picture.exists() and session.position.step >= session.total):
        return
    try:
        require("matplotlib.figure", "figures")
        records = load_records(run.depth)
        station = BEHIND_FFN if (records["station"] == BEHIND_FFN).any() else "output"
        picture = heat_map(records, station=station)
        write_whole(run.picture, lambda path: picture.savefig(path, dpi=120))
    except MissingExtra:
        return
    except (OSError, ValueError) as error:  # a picture is not worth a run
        session.display.say(f"{run.picture} was not drawn: {error}")


def first_nonfinite_block(task: Task, model: nn.Module, batch: Any, carry: Carry) -> int:
    """The first block whose output has a nan or an infinity: 1, 2, …

    0: what enters block 1 has one already. AFTER_THE_BLOCKS: only the loss has. ALL_FINITE: nothing has.
    """
    found: list[int] = []

    def look(visit: Visit, _station: str, tokens: Tensor, _source: Tensor) -> None:
        if found:
            return
        if visit.number == 1 and not bool(visit.entered.isfinite().all()):
            found.append(0)
        elif not bool(tokens.isfinite().all()):
            found.append(visit.number)

    with torch.no_grad(), Machine(model, anatomy_of(model), Listen({"output"}, look)):
        loss, _ = task.loss(model, batch, carry)
    if found:
        return found[0]
    return ALL_FINITE if bool(loss.isfinite()) else AFTER_THE_BLOCKS


def nonfinite_weight(model: nn.Module) -> str | None:
    """The first weight that has a nan or an infinity, by name."""
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            return name
    return None
