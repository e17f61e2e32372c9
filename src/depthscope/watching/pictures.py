"""The one picture of a watch: blocks upwards, steps to the right, a measure as colour. For trackers that take pictures,
too."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pandas as pd

from depthscope.drawing import draw_heat_map
from depthscope.extras import MissingExtra
from depthscope.measures import ALIKE

if TYPE_CHECKING:
    from depthscope.watching.watcher import Watch

NAME = "depth/heat_map"
Send = Callable[[Any, int], None]  # a figure, at a step


def heat_map(records: pd.DataFrame, measure: str = "token_similarity", station: str = "output") -> Any:
    """A matplotlib figure, block × step. Grey: no value.

    Similarities have the same colours in every picture, from 0 (or less) to 1, and a line at .9.
    """
    rows = records[(records["measure"] == measure) & (records["station"] == station)]
    if rows.empty:
        there = ", ".join(sorted({f"{m} at {s}" for m, s in zip(records["measure"], records["station"], strict=True)}))
        raise ValueError(f"no {measure!r} at station {station!r} to draw; there: {there or 'nothing'}")
    table = rows.pivot_table(index="block", columns="step", values="value", aggfunc="last", dropna=False)
    similarity = measure.endswith("similarity")
    where = "" if station == "output" else f", {station.replace('_', ' ')}"
    return draw_heat_map(
        table.to_numpy(dtype=float),
        table.index.to_numpy(dtype=float),
        table.columns.to_numpy(dtype=float),
        title=measure.replace("_", " ") + where,
        limits=(0.0, 1.0) if similarity else None,
        level=ALIKE if similarity else None,
    )


class Painter:
    """Draws what was watched so far after 2, 4, 8, … looks and at the end, always under one name: as the picture grows,
    the one before it is outdated, and a long training is drawn a dozen times.

    `trackers()` are whatever the trainer logs to; those that take no picture are passed over. A tracker that fails, or
    a missing matplotlib, is a warning and no end of a training.
    """

    def __init__(self, watch: Watch, trackers: Callable[[], Iterable[object]]):
        self._watch, self._trackers = watch, trackers
        self._sends: list[Send] = []
        self._looks = 0
        self._drawn = 0  # looks that are in the last picture

    def look(self) -> None:
        """A step was watched, and its numbers are there."""
        self._looks += 1
        self._sends = []
        with _warned():
            self._sends = [send for tracker in self._trackers() if (send := sender(tracker)) is not None]
        if self._looks > 1 and self._looks & (self._looks - 1) == 0:
            self.draw()

    def draw(self) -> None:
        """The picture, unless the last one shows all. Some trackers are closed when a training ends, and it goes to
        those that were there at the last look."""
        step = self._watch.last_step
        if self._drawn == self._looks or not self._sends or step is None:
            return
        self._drawn = self._looks
        with _warned():
            figure = picture_of(self._watch.records)
            for send in self._sends:
                with _warned():  # the other trackers get it all the same
                    send(figure, step)


@contextmanager
def _warned() -> Iterator[None]:
    """What goes wrong with a picture is a warning: not worth a training run."""
    try:
        yield
    except MissingExtra as error:
        warnings.warn(f"no picture of the depth is logged: {error}", stacklevel=4)
    except Exception as error:  # other people's code
        warnings.warn(f"the picture of the depth was not logged: {type(error).__name__}: {error}", stacklevel=4)


def picture_of(records: pd.DataFrame) -> Any:
    """The heat map of the similarity of tokens, or else of what was watched first."""
    blocks = records[records["block"] > 0]
    there = list(dict.fromkeys(zip(blocks["measure"], blocks["station"], strict=True)))
    return heat_map(records, *next((pair for pair in there if pair[0] == "token_similarity"), there[0]))


def sender(tracker: object) -> Send | None:
    """How a tracker takes a figure; None if it takes none, or we do not know how.

    | tracker                                                                | what takes it                  |
    | ---------------------------------------------------------------------- | ------------------------------ |
    | TensorBoard: the writer itself, Hugging Face's callback (`tb_writer`), | `SummaryWriter.add_figure`     |
    | Lightning's logger (`experiment`), Accelerate's tracker (`writer`)     |                                |
    | Weights & Biases, Lightning's logger                                   | `log_image`                    |
    | Weights & Biases, Hugging Face's callback (`_wandb`)                   | `wandb.log` of a `wandb.Image` |
    | Weights & Biases, Accelerate's tracker                                 | `log_images`                   |
    """
    for writer in (tracker, *(getattr(tracker, name, None) for name in ("tb_writer", "experiment", "writer"))):
        if callable(getattr(writer, "add_figure", None)):
            return _to_tensorboard(writer)
    log_image, wandb = getattr(tracker, "log_image", None), getattr(tracker, "_wandb", None)
    if callable(log_image):
        return lambda figure, step: log_image(NAME, [figure], step=step)
    if getattr(tracker, "name", None) == "wandb" and callable(log_images := getattr(tracker, "log_images", None)):
        return lambda figure, step: log_images({NAME: [figure]}, step=step)
    if wandb is not None:
        return lambda figure, step: wandb.log({NAME: wandb.Image(figure), "train/global_step": step})
    return None


def _to_tensorboard(writer: Any) -> Send:
    def send(figure: Any, step: int) -> None:
        was_closed = getattr(writer, "all_writers", ()) is None  # it opens itself again, and nobody else would close it
        writer.add_figure(NAME, figure, step)
        writer.close() if was_closed else writer.flush()

    return send
