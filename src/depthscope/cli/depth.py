"""`depthscope depth MODEL`: how much of its depth a Transformer uses, block by block."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthscope.cli.options import DepthOptions
from depthscope.cli.reporting import call
from depthscope.cli.running import Finished, Prepared, as_command, prepared
from depthscope.files import write_whole

if TYPE_CHECKING:
    from depthscope.usage import DepthUse

_PLAIN = {"lens": True, "skips": True}


@as_command
def depth(options: DepthOptions) -> Finished:
    """Show how much of its depth a Transformer uses: which blocks matter, where it has decided, what could go."""
    if options.quick and options.skips:
        raise ValueError("--quick is one pass alone; leave it or --skips out")
    asked: dict[str, Any] = {
        "lens": not options.quick,
        "skips": options.skips is not False and not options.quick,
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
    passes = ready.pieces(1 + ready.scope.depth_of_model * (asked.get("skips") is not False))
    found = ready.scope.depth(progress=ready.progress("passes", passes), **asked)
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


def save_use(found: DepthUse, folder: Path) -> None:
    """The tables first: a picture that fails must not cost them."""
    found.save(folder)
    write_whole(folder / "depth.csv", lambda path: found.frame.to_csv(path, index=False))
    write_whole(folder / "depth.png", lambda path: found.plot().savefig(path, dpi=160))
