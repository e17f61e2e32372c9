"""What passes through the model show: depth during training, and where numbers cease to be finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.anatomy import anatomy_of
from depthscope.conditions import parse_condition
from depthscope.extras import MissingExtra, require
from depthscope.files import write_whole
from depthscope.hooks import Listen, Machine, Visit
from depthscope.measures import MEASURES
from depthscope.watching import Alarm, Watch, watch
from depthscope.watching.gate import make_gate
from depthscope.watching.pictures import heat_map, sender
from depthscope.watching.records import load_records
from depthscope_lab.training.checkpoint import newest_until
from depthscope_lab.training.run import NonFiniteLoss, Run
from depthscope_lab.training.session import Session, keep_metrics
from depthscope_lab.training.task import Carry, Task

AFTER_FFN = "after_ffn"
STATIONS = (AFTER_FFN, "output")  # a rule that names none is asked at the first of them that the model shows
WATCHED_MEASURES = ("token_similarity", "cosine_similarity")

AFTER_THE_BLOCKS, ALL_FINITE = 1_000_000, 1_000_001  # greater than any block's number: the first is the least


@contextmanager
def watching_depth(session: Session) -> Iterator[Watch | None]:
    """`depthscope.watch` around the loop, in the first process; gives None where nothing is watched.

    After the FFN and at the block's end: a remedy stands between them, and at τ = 1 leaves 0. The scalars go to
    metrics and trackers with the step that was watched, the curves to `depth.jsonl`, and in the end, if
    matplotlib is there, the picture of the first to `depth.png` and to TensorBoard. What a rule of the run asks for is
    watched too.
    """
    run = session.run
    if run.watch_every is None or not session.engine.is_main:
        yield None
        return

    def keep(_step: int, scalars: dict[str, float]) -> None:
        similarity = scalars.get(f"depth/{AFTER_FFN}/t_sim_last", scalars.get("depth/t_sim_last", math.nan))
        session.similarity = similarity
        keep_metrics(session, {"token_similarity": similarity, **scalars})

    def tell(alarm: Alarm) -> None:
        session.display.say(f"{'stopping' if alarm.stops else 'warning'}: {alarm}")
        if alarm.stops and session.alarm is None:
            session.alarm = str(alarm)

    try:
        if session.position.step >= session.total:  # nothing to see
            yield None
        else:
            measures, stations = _watched(run)
            options: dict[str, Any] = {"measures": measures, "stations": stations, "path": run.depth}
            found = watch(session.engine.entrance, run.watch_every, on_record=keep, on_alarm=tell, **options)
            found.gate = session.gate = make_gate(run.stop_if, run.warn_if, measures, stations, STATIONS)
            found.gate.restore(session.position.gate)
            found.find_checkpoint = partial(newest_until, run.checkpoints)
            with found:
                yield found
    except NonFiniteLoss:
        _draw(session)
        raise
    _draw(session)


def _watched(run: Run) -> tuple[list[str], list[str]]:
    """The measures and the stations that a run watches: the usual ones, and those that its rules name."""
    stations = [*STATIONS, *(rule.station for rule in run.rules if rule.station is not None)]
    measures = [*WATCHED_MEASURES, *(rule.measure for rule in run.rules)]
    return list(dict.fromkeys(measures)), list(dict.fromkeys(stations))


def require_rules(run: Run) -> None:
    """Refuses a rule that could not be decided: of a measure that is not known, or cannot be watched."""
    names = [name for name, measure in MEASURES.items() if measure.of != "attention"]
    for option, texts in (("--stop-if", run.stop_if), ("warn_if", run.warn_if)):
        for text in texts:
            parse_condition(text, names, option, in_a_row=True)
    make_gate(run.stop_if, run.warn_if, *_watched(run), STATIONS)


def _draw(session: Session) -> None:
    """The picture of what was watched, also by a run that was killed before it came to draw."""
    run, step = session.run, session.position.step
    if not run.draw or not run.depth.exists() or (run.picture.exists() and step >= session.total):
        return
    try:
        require("matplotlib.figure", "figures")
        records = load_records(run.depth)
        picture = heat_map(records, station=AFTER_FFN if (records["station"] == AFTER_FFN).any() else "output")
        write_whole(run.picture, lambda path: picture.savefig(path, dpi=120))
    except MissingExtra:
        return
    except (OSError, ValueError) as error:  # a picture is not worth a run
        session.display.say(f"{run.picture} was not drawn: {error}")
        return
    for tracker in session.engine.accelerator.trackers:
        try:
            if (send := sender(tracker)) is not None:
                send(picture, step)
        except Exception as error:  # other people's code: nor is sending it
            session.display.say(f"the picture of the depth was not logged: {type(error).__name__}: {error}")


def first_nonfinite_block(task: Task, model: nn.Module, batch: Any, carry: Carry) -> int:
    """The first block whose output has a nan or an infinity: 1, 2, …

    0: what enters block 1 has one already. AFTER_THE_BLOCKS: only the loss has. ALL_FINITE: nothing has.
    """
    found: list[int] = []

    def look(visit: Visit, _station: str, tokens: Tensor, _source: Tensor) -> None:
        if not found and visit.number == 1 and not bool(visit.entered.isfinite().all()):
            found.append(0)
        elif not found and not bool(tokens.isfinite().all()):
            found.append(visit.number)

    with torch.no_grad(), Machine(model, anatomy_of(model), Listen({"output"}, look)):
        loss, _ = task.loss(model, batch, carry)
    return found[0] if found else ALL_FINITE if bool(loss.isfinite()) else AFTER_THE_BLOCKS
