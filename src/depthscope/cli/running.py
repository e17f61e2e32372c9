"""What every command that looks at a model shares: how it begins, shows progress, prints, saves and ends."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from depthscope import files
from depthscope.cli import completion
from depthscope.cli.help import ALL, show_all
from depthscope.cli.options import ModelOptions, WeightOptions
from depthscope.exit_codes import ExitCode, code_of
from depthscope.extras import MissingExtra, require
from depthscope.interruption import notes as of_interruption
from depthscope.interruption import stoppable
from depthscope.naming import visible
from depthscope.progress import Steps, Tick, bar

if TYPE_CHECKING:
    from depthscope.cli.inputs import Inputs
    from depthscope.cli.models import LoadedModel
    from depthscope.scope import Scope

_QUIET = 10  # seconds without a word
ShowProgress = Callable[[str, int | None], Tick]  # what is being done, and in how many pieces


@dataclass(frozen=True)
class Finished:
    """What a command has found, and what becomes of it."""

    document: Callable[[], Mapping[str, Any]]  # what --json prints
    show: Callable[[], object]
    save: Callable[[Path], object]
    python: str  # the line that does the same
    failed: Callable[[], Iterable[str]] = tuple  # gates that are closed


def as_command(body: Callable[[Any], Finished]) -> Callable[..., None]:
    """A function for typer whose parameters are the fields of the options that `body` takes.

    What was found is shown before it is saved: a save that fails must not cost what was computed. Ctrl-C or SIGTERM
    ends it when it has shown and saved what was finished by then.
    """
    options = get_type_hints(body)["options"]

    def command(**values: Any) -> None:
        completion.refuse_a_typo(values["model"])
        values.pop(ALL, None)
        with ending_in_order():
            _run(body, options(**values))

    hints = get_type_hints(options, include_extras=True)
    parameters = [
        parameter.replace(annotation=hints[name]) for name, parameter in inspect.signature(options).parameters.items()
    ]
    help_all = typer.Option(
        "--help-all", callback=show_all, is_eager=True, expose_value=False, help="Show every option and exit."
    )
    hints[ALL] = Annotated[bool, help_all]
    parameters.append(inspect.Parameter(ALL, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=hints[ALL]))
    command.__name__, command.__doc__ = body.__name__, body.__doc__
    command.__annotations__ = hints
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _run(body: Callable[[Any], Finished], options: WeightOptions) -> None:
    from depthscope.cli.documents import print_document
    from depthscope.cli.reporting import add_report

    if options.out is not None:
        require_writable(options.out)
    with redirect_stdout(sys.stderr) if options.json else nullcontext():  # a model that prints must not end up in it
        found = body(options)
    if options.json:
        print_document(body.__name__, found.document())
    else:
        found.show()
    if options.out is not None:
        found.save(options.out)
        add_report(options.out, body.__name__, found.python)
        say_where(options.out, options.json)
    if failed := list(found.failed()):
        print("depthscope:", "; ".join(failed), file=sys.stderr)
        raise typer.Exit(ExitCode.GATE)


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Around a whole command: Ctrl-C and SIGTERM end its running piece of work, and then the program."""
    with stoppable() as work:
        try:
            yield
        except KeyboardInterrupt as interrupt:  # nothing was finished, or once more
            work.stopped = interrupt
        except typer.Exit:
            if work.stopped is None:
                raise
    if work.stopped is not None:
        without = f", without {', '.join(work.missing)}; what was finished is there" if work.missing else ""
        print(f"depthscope: interrupted{without}", file=sys.stderr)
        sys.exit(code_of(work.stopped))


@dataclass(frozen=True)
class Prepared:
    """A model and its input."""

    loaded: LoadedModel
    inputs: Inputs
    options: ModelOptions
    progress: ShowProgress

    @cached_property
    def scope(self) -> Scope:
        """One handle for all that a command measures: nothing is found out twice."""
        from depthscope.scope import Scope

        return Scope(self.loaded.model, self.inputs.batches, tokenizer=self.inputs.tokenizer, **self.options.hints)

    @property
    def about(self) -> dict[str, Any]:
        """What the metadata of a result say of the model and its input."""
        return {"model": self.options.model, "seed": self.options.seed, **self.inputs.metadata}

    def pieces(self, per_batch: int) -> int | None:
        """Of work that is done for every batch; None if only the factory knows how many there are."""
        return per_batch * self.inputs.count if self.inputs.count else None

    def describe(self, metadata: dict[str, Any], *more: str) -> None:
        """Adds it to the metadata of a result, with the notes of its reader."""
        notes = [*metadata.get("notes", []), *self.loaded.notes, *self.inputs.notes, *more, *of_interruption()]
        metadata.update(self.about, notes=notes)


@contextmanager
def prepared(options: ModelOptions) -> Iterator[Prepared]:
    """The model and its input, and a bar while they are used; a mistake in the user's own model ends in one line."""
    from depthscope.cli.inputs import make_inputs
    from depthscope.cli.models import load_model, user_code_failed

    with show_progress(not options.json) as progress:
        progress("loading", None)
        try:
            loaded = load_model(options)
            yield Prepared(loaded, make_inputs(loaded, options), options, progress)
        except (ValueError, OSError, MissingExtra):
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if "allocate" in str(error) or "out of memory" in str(error):
                raise ValueError(f"out of memory: give fewer --tokens or a smaller --batch ({error})") from None
            if ":" not in options.model:
                raise  # our own family: a defect, not a mistake
            raise user_code_failed(f"running {options.model}", error) from error


@contextmanager
def show_progress(shown: bool) -> Iterator[ShowProgress]:
    """Gives a function (description, total) → what to call after each piece of work."""
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
