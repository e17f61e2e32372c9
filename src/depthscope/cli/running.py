"""What the commands that run a model share: loading it, a bar while it runs, JSON."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthscope import files
from depthscope.cli.options import ModelOptions
from depthscope.extras import MissingExtra, require
from depthscope.naming import visible
from depthscope.progress import Steps, Tick, bar

if TYPE_CHECKING:
    from depthscope.cli.inputs import Inputs
    from depthscope.cli.models import LoadedModel
    from depthscope.scope import Scope

_QUIET = 10  # seconds without a word
Doing = Callable[[str, int | None], Tick]  # told what is being done, and in how many pieces


@contextmanager
def prepared(options: ModelOptions) -> Iterator[tuple[LoadedModel, Inputs, Doing]]:
    """The model and its input, and a bar while they are used; a mistake in the user's own model ends in one line."""
    from depthscope.cli.inputs import make_inputs
    from depthscope.cli.models import load_model, user_code_failed

    with show_progress(not options.json) as progress:
        progress("loading", None)
        try:
            loaded = load_model(options)
            yield loaded, make_inputs(loaded, options), progress
        except (ValueError, OSError, MissingExtra):
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if "allocate" in str(error) or "out of memory" in str(error):
                raise ValueError(f"out of memory: give fewer --tokens or a smaller --batch ({error})") from None
            if ":" not in options.model:
                raise  # our own family: a defect, not a mistake
            raise user_code_failed(f"running {options.model}", error) from error


def scope_on(loaded: LoadedModel, inputs: Inputs, options: ModelOptions) -> Scope:
    """One handle for all that a command measures of a model: nothing is found out twice."""
    from depthscope.scope import Scope

    return Scope(loaded.model, inputs.batches, tokenizer=inputs.tokenizer, **options.hints)


@contextmanager
def show_progress(shown: bool) -> Iterator[Doing]:
    """Gives a function (description, total) → what to call after each piece of work.

    A terminal shows a bar. Elsewhere (a log, a notebook's shell) there is a line on stderr every `_QUIET` seconds.
    """
    with bar(shown=shown) as display:

        def start(description: str, total: int | None) -> Tick:
            for task in display.task_ids:
                display.remove_task(task)
            task = display.add_task(description, total=total)
            said = [time.monotonic()]

            def show(done: float) -> None:
                display.update(task, completed=done)
                if shown and not sys.stderr.isatty() and time.monotonic() - said[0] > _QUIET:
                    said[0] = time.monotonic()
                    print(f"{description}: {done:.0f}{'' if total is None else f' of {total}'}", file=sys.stderr)

            return Steps(show)

        yield start


def require_writable(folder: Path) -> None:
    """Minutes of computing are not spent on results that cannot be drawn or kept."""
    require("matplotlib.figure", "figures")
    files.require_writable(folder)


def say_where(folder: Path, json: bool) -> None:
    """The last line, once all is written; stdout belongs to JSON, if that was asked for."""
    if not json:
        print(f"wrote {visible(str(folder))}")


def finite(value: Any) -> Any:
    """JSON knows neither nan nor infinity."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
