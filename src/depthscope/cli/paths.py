"""`depthscope paths MODEL`: what attention paths of each length make of a Transformer's output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from depthscope.cli.command import Finished, as_command, call, keep, prepared
from depthscope.cli.options import PathsOptions

if TYPE_CHECKING:
    from depthscope.attention_paths import PathShares


@as_command
def paths(options: PathsOptions) -> Finished:
    """Split a Transformer's output by the length of the attention paths that led to it (Dong et al. 2021)."""
    from depthscope.diagnosis.summary import of_paths

    with prepared(options) as ready:
        scope = ready.scope
        if len(parts := scope.anatomy.parts) > 1:
            named = ", ".join(parts)
            raise ValueError(f"this model has several parts ({named}): say which one, as in --part {parts[-1]}")
        pieces = ready.pieces(scope.depth_of_model)
        shares = scope.paths(progress=ready.progress("following paths", pieces))
        usual = options.tokens is None and options.samples is None and "text" in ready.inputs.metadata
        size = f"{shares.metadata['samples']} × {shares.metadata['tokens']} tokens"
        more = [f"a sample of {size}, so that it is fast: more with --tokens and --samples"] if usual else []
        ready.describe(shares.metadata, *more)
    return Finished(
        document=as_json(shares),
        summary=of_paths(shares),
        save=lambda folder: keep(shares, folder, "paths"),
        python=call("paths", "model, inputs", options.hints),
        tables={"every length": shares.summary()},
    )


def as_json(shares: PathShares) -> dict[str, Any]:
    """What `--json` prints: means over samples by length, −1 for the constant part."""
    return {
        "model": shares.metadata["model"],
        "blocks": shares.depth,
        "paths": {str(length): count for length, count in shares.counts.items()},
        "lengths": shares.summary().reset_index().to_dict("records"),
        "metadata": shares.metadata,
    }
