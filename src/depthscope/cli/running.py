"""What the commands that run a model share: loading it, a bar while it runs, files that are whole, JSON."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthscope.cli.options import ModelOptions
from depthscope.extras import MissingExtra, require

if TYPE_CHECKING:
    from depthscope.cli.inputs import Inputs
    from depthscope.cli.models import LoadedModel

Progress = Callable[[str, int | None], Callable[[], object]]


@contextmanager
def prepared(options: ModelOptions) -> Iterator[tuple[LoadedModel, Inputs, Progress]]:
    """The model and its input, and a bar while they are used; a mistake in the user's own model ends in one line."""
    from depthscope.cli.inputs import make_inputs
    from depthscope.cli.models import load_model, user_code_failed

    with show_progress(sys.stderr.isatty() and not options.json) as progress:
        progress("loading", None)
        try:
            loaded = load_model(options)
            yield loaded, make_inputs(loaded, options), progress
        except (ValueError, OSError, MissingExtra):
            raise
        except Exception as error:
            if "allocate" in str(error) or "out of memory" in str(error):
                raise ValueError(f"out of memory: give fewer --tokens or a smaller --batch ({error})") from None
            if ":" not in options.model:
                raise  # our own family: a defect, not a mistake
            raise user_code_failed(f"running {options.model}", error) from error


@contextmanager
def show_progress(shown: bool) -> Iterator[Progress]:
    """Gives a function (description, total) → advance. The bar is on stderr and goes away when all is done."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True, disable=not shown) as bar:

        def start(description: str, total: int | None) -> Callable[[], object]:
            for task in bar.task_ids:
                bar.remove_task(task)
            task = bar.add_task(description, total=total)
            return lambda: bar.advance(task)

        yield start


def require_writable(folder: Path) -> None:
    """Minutes of computing are not spent on results that cannot be kept."""
    require("matplotlib.figure", "figures")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"expected a folder that can be written for --out, got {str(folder)!r}: {error}") from None


def write(target: Path, write: Callable[[Path], object]) -> None:
    """A file is there whole or not at all."""
    scratch = target.with_name(f".{target.stem}-{os.getpid()}{target.suffix}")
    try:
        write(scratch)
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)


def finite(value: Any) -> Any:
    """JSON knows neither nan nor infinity."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
