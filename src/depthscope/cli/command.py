"""The one form of every command that looks at a model: options in, a result out; it is shown, printed, saved, gated."""

from __future__ import annotations

import inspect
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from depthscope import files
from depthscope.cli import completion
from depthscope.cli.help import ALL, HELP_ALL
from depthscope.cli.options import ModelOptions, WeightOptions
from depthscope.exit_codes import ExitCode, code_of
from depthscope.extras import MissingExtra, require
from depthscope.interruption import notes as of_interruption
from depthscope.interruption import stoppable
from depthscope.naming import visible
from depthscope.progress import Steps, Tick, bar
from depthscope.sealed import COMMANDS, read_commands, record_writer

if TYPE_CHECKING:
    import pandas as pd

    from depthscope.cli.inputs import Inputs
    from depthscope.cli.models import LoadedModel
    from depthscope.diagnosis.summary import Summary
    from depthscope.scope import Scope
    from depthscope.usage import Finding

_SILENCE = 10  # seconds without a word
ShowProgress = Callable[[str, int | None], Tick]  # what is being done, and in how many pieces


@dataclass(frozen=True)
class Finished:
    """What a command has found, in every form in which it is wanted."""

    document: Mapping[str, Any]  # what --json prints
    summary: Summary  # what a person sees
    save: Callable[[Path], object]  # what --out keeps
    python: str  # the line that does the same
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)  # what --full adds, by what it shows
    findings: Sequence[Finding] = ()  # all of them, likewise
    failed: Callable[[], Iterable[str]] = tuple  # gates that are closed


def as_command(body: Callable[[Any], Finished]) -> Callable[..., None]:
    """A function for typer whose parameters are the fields of the options that `body` takes.

    What was found is shown before it is saved: a save that fails must not cost what was computed. Ctrl-C or SIGTERM
    ends it when it has shown and saved what was finished by then.
    """
    options = get_type_hints(body)["options"]
    kinds = get_type_hints(options)
    hints = {item.name: Annotated[kinds[item.name], item.metadata["option"]] for item in fields(options)}
    parameters = [
        parameter.replace(annotation=hints[name]) for name, parameter in inspect.signature(options).parameters.items()
    ]
    hints[ALL] = Annotated[bool, HELP_ALL]
    parameters.append(inspect.Parameter(ALL, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=hints[ALL]))

    def command(**values: Any) -> None:
        completion.refuse_a_typo(values["model"])
        values.pop(ALL, None)
        with ending_in_order():
            _run(body, options(**values))

    command.__name__, command.__doc__, command.__annotations__ = body.__name__, body.__doc__, hints
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _run(body: Callable[[Any], Finished], options: WeightOptions) -> None:
    if options.out is not None:
        require_writable(options.out)
    with redirect_stdout(sys.stderr) if options.json else nullcontext():  # a model that prints must not end up in it
        found = body(options)
    if options.json:
        from depthscope.cli.documents import print_document

        print_document(body.__name__, found.document)
    else:
        from depthscope.cli.display import show

        show(found.summary, full=options.full, tables=found.tables, findings=found.findings)
    if options.out is not None:
        found.save(options.out)
        add_report(options.out, body.__name__, found.python)
        if not options.json:
            print(f"wrote {visible(str(options.out))}")
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


# --- the model and its input ------------------------------------------------------------------------------


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
                if shown and not sys.stderr.isatty() and time.monotonic() - said[0] > _SILENCE:
                    said[0] = time.monotonic()
                    print(f"{description}: {done:.0f}{'' if total is None else f' of {total}'}", file=sys.stderr)

            return Steps(show)

        yield start


# --- what --out adds: how the files were made, and the page that shows them -----------------------------------


def require_writable(folder: Path) -> None:
    """Minutes of computing are not spent on results that cannot be drawn or kept."""
    require("matplotlib.figure", "figures")
    files.require_writable(folder)


def add_report(folder: Path, command: str, python: str = "") -> None:
    """Writes `commands.json` and `report.html` into a folder whose other files are complete.

    Without the extra, or beside something damaged that an earlier command left there, there is no page, and one line
    on stderr says why.
    """
    note_command(folder, command, python)
    from depthscope.report import write

    try:
        write(folder / "report.html", folder, say=say_damaged)
    except (MissingExtra, ValueError) as error:
        print(f"depthscope: no report.html: {visible(str(error))}", file=sys.stderr)


def say_damaged(text: str) -> None:
    """A file that the page names and does not show."""
    print(f"depthscope: not shown: {visible(text)}", file=sys.stderr)


def note_command(folder: Path, command: str, python: str = "") -> None:
    """Adds to `commands.json` what was typed, and the line of Python that does the same; one entry per command."""
    kept: dict[str, Any] = {}
    try:
        kept = read_commands(folder)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        print(f"depthscope: {visible(str(error))}; it is written anew", file=sys.stderr)
    ours = Path(sys.argv[0]).name in ("depthscope", "depthscope.exe", "__main__.py")
    made = {"typed": shlex.join(["depthscope", *sys.argv[1:]]) if ours else "", "in Python": python}
    known = {**kept, command: {name: text for name, text in made.items() if text}}
    files.write_whole(folder / COMMANDS, record_writer("commands", 1, known))


def call(function: str, inputs: str, options: Mapping[str, Any]) -> str:
    """`depthscope.probe(model, inputs, measures='all')`: what differs from the defaults is written."""
    import depthscope

    plain = inspect.signature(getattr(depthscope, function)).parameters
    defaults = {name: plain[name].default for name in options if name in plain}
    chosen = [f"{name}={value!r}" for name, value in options.items() if value != defaults.get(name)]
    return f"depthscope.{function}({', '.join([inputs, *chosen])})"


def keep(found: Any, folder: Path, name: str) -> None:
    """A result and its picture. The numbers first: a picture that fails must not cost them."""
    found.save(folder)
    files.write_whole(folder / f"{name}.png", lambda path: found.plot().savefig(path, dpi=160))
