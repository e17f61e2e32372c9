"""`depthscope depth MODEL`: how much of its depth a Transformer uses, block by block."""

from __future__ import annotations

from depthscope.cli.command import Finished, as_command, call, keep, prepared
from depthscope.cli.options import DepthOptions


@as_command
def depth(options: DepthOptions) -> Finished:
    """Show how much of its depth a Transformer uses: which blocks matter, where it has decided, what could go."""
    from depthscope.diagnosis.summary import of_use

    asked = {"lens": False, "skips": False} if options.quick else {}
    with prepared(options) as ready:
        passes = ready.pieces(1 if options.quick else 1 + ready.scope.depth_of_model)
        found = ready.scope.depth(progress=ready.progress("passes", passes), **asked)
        ready.describe(found.metadata)
    blocks = found.frame.set_index("block").dropna(axis="columns", how="all")
    return Finished(
        document=found.to_dict(),
        summary=of_use(found),
        save=lambda folder: keep(found, folder, "depth"),
        python=call("depth_use", "model, inputs", {**asked, **options.hints}),
        tables={"every number of every block": blocks, "blocks that matter, by what was looked at": found.summary()},
        findings=found.findings,
    )
