"""`depthscope depth MODEL`: how much of its depth a Transformer uses, block by block."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthscope.cli.options import DepthOptions
from depthscope.cli.reporting import call
from depthscope.cli.running import Finished, Prepared, ShowProgress, as_command, prepared
from depthscope.files import write_whole
from depthscope.progress import Tick

if TYPE_CHECKING:
    from depthscope.usage import DepthUse

_PLAIN = {"lens": True, "skips": True, "ridge": 0.0}


@as_command
def depth(options: DepthOptions) -> Finished:
    """Show how much of its depth a Transformer uses: which blocks matter, where it has decided, what could go."""
    if options.quick and (other := "--skips" if options.skips else "--linear" if options.linear else None):
        raise ValueError(f"--quick is one pass alone; leave it or {other} out")
    asked: dict[str, Any] = {
        "lens": not options.quick,
        "skips": options.skips is not False and not options.quick,
        "linear": False if options.quick else options.linear,
        "ridge": options.ridge,
    }
    with prepared(options) as ready:
        found = use_of(ready, **asked)
    return Finished(
        document=found.to_dict,
        show=lambda: _show(found, full=options.full),
        save=lambda folder: save_use(found, folder),
        python=call("depth_use", "model, inputs", {**asked, **options.hints}, _PLAIN),
    )


def use_of(ready: Prepared, **asked: Any) -> DepthUse:
    """The use of depth of a model that was loaded, with what was asked for it in its record."""
    quick = asked.get("skips") is False and asked.get("linear") is False
    found = ready.scope.depth(progress=_Costs(ready.progress, quick=quick), **asked)
    ready.describe(found.metadata)
    return found


def _show(found: DepthUse, *, full: bool) -> None:
    from depthscope.cli.depth_display import show_use
    from depthscope.cli.display import show, show_findings
    from depthscope.diagnosis.summary import of_use

    summary = of_use(found)
    show(summary, full=full, rest="every number of every block")
    if full:
        said = [summary.headline, *(finding.sentence for finding in summary.findings)]
        show_findings(finding for finding in found.findings if finding.sentence not in said)
        show_use(found)


class _Costs:
    """Says on stderr, before passes begin, how many there are, and, once one was made, about how long they take."""

    def __init__(self, show: ShowProgress, quick: bool):
        self.show, self.quick = show, quick
        self.each: float | None = None  # seconds of a pass, the first of those that were made last

    def __call__(self, what: str, passes: int | None) -> Tick:
        if not self.quick and passes is not None and self.each is not None:
            about = _seconds(self.each * passes)
            print(f"depthscope: {what}: {passes} pass{'es' if passes > 1 else ''}, about {about}", file=sys.stderr)
        tick, started, made = self.show(what, passes), time.perf_counter(), 0

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
