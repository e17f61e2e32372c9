"""`depthscope depth MODEL`: how much of its depth a Transformer uses, block by block."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthscope.cli.documents import print_document
from depthscope.cli.options import DepthOptions, as_command
from depthscope.cli.reporting import add_report, call
from depthscope.cli.running import Doing, finite, prepared, require_writable, say_where, scope_on
from depthscope.files import write_whole
from depthscope.interruption import notes as of_interruption
from depthscope.progress import Tick

if TYPE_CHECKING:
    from depthscope.cli.inputs import Inputs
    from depthscope.cli.models import LoadedModel
    from depthscope.cli.options import ModelOptions
    from depthscope.scope import Scope
    from depthscope.usage import DepthUse


@as_command
def depth(options: DepthOptions) -> None:
    """Show how much of its depth a Transformer uses: which blocks matter, where it has decided, what could go."""
    if options.quick and options.linear:
        raise ValueError("--quick is one pass alone; leave it or --linear out")
    if options.out is not None:
        require_writable(options.out)
    with redirect_stdout(sys.stderr) if options.json else nullcontext():  # a model that prints must not end up in it
        found = _measure(options)
    if options.json:
        print_document("depth", as_json(found))
    else:
        _show(found, full=options.full)
    if options.out is not None:  # shown first: a save that fails must not cost what was computed
        save_use(found, options.out)
        asked = {**_asked(options), **options.hints}
        plain = {"lens": True, "skips": True, "ridge": 0.0}
        add_report(options.out, "depth", call("depth_use", "model, inputs", asked, plain))
        say_where(options.out, options.json)


def _show(found: DepthUse, *, full: bool) -> None:
    from depthscope.cli.depth_display import show_use
    from depthscope.cli.display import show, show_findings
    from depthscope.diagnosis.summary import of_use

    show(of_use(found), full=full, rest="every number of every block")
    if full:
        show_findings(found.findings)
        show_use(found)


def as_json(found: DepthUse) -> dict[str, Any]:
    """What `--json` prints: a record per block, the numbers of blocks that matter, the verdict; nan is null."""
    document: dict[str, Any] = finite(found.to_dict())
    return document


def _asked(options: DepthOptions) -> dict[str, Any]:
    return {
        "lens": not options.quick,
        "skips": options.skips and not options.quick,
        "linear": False if options.quick else options.linear,
        "ridge": options.ridge,
    }


def _measure(options: DepthOptions) -> DepthUse:
    with prepared(options) as (loaded, inputs, progress):
        return use_of(scope_on(loaded, inputs, options), loaded, inputs, options, progress, **_asked(options))


def use_of(
    scope: Scope, loaded: LoadedModel, inputs: Inputs, options: ModelOptions, progress: Doing, **asked: Any
) -> DepthUse:
    """The use of depth of a model that was loaded, with what was asked for it in its record."""
    found = scope.depth(
        progress=_Costs(progress, quick=asked.get("skips") is False and asked.get("linear") is False),
        **asked,
    )
    notes = [*found.metadata.get("notes", []), *loaded.notes, *inputs.notes, *of_interruption()]
    found.metadata.update({"model": options.model, "seed": options.seed, **inputs.metadata}, notes=notes)
    return found


class _Costs:
    """Says on stderr, before passes begin, how many there are, and, once one was made, about how long they take."""

    def __init__(self, doing: Doing, quick: bool):
        self.doing, self.quick = doing, quick
        self.each: float | None = None  # seconds of a pass, the first of those that were made last

    def __call__(self, what: str, passes: int | None) -> Tick:
        if not self.quick and passes is not None and self.each is not None:
            about = _seconds(self.each * passes)
            print(f"depthscope: {what}: {passes} pass{'es' if passes > 1 else ''}, about {about}", file=sys.stderr)
        tick, started, made = self.doing(what, passes), time.perf_counter(), 0

        def done() -> None:
            nonlocal made
            made += 1
            if made == 1:  # what comes between later ones, such as the lens, is no pass
                self.each = time.perf_counter() - started
            tick()

        return done


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def save_use(found: DepthUse, folder: Path) -> None:
    """The tables first: a picture that fails must not cost them."""
    found.save(folder)
    write_whole(folder / "depth.csv", lambda path: found.frame.to_csv(path, index=False))
    write_whole(folder / "depth.png", lambda path: found.plot().savefig(path, dpi=160))
