"""`depthscope paths MODEL`: what attention paths of each length make of a Transformer's output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthscope.cli.options import PathsOptions
from depthscope.cli.reporting import call
from depthscope.cli.running import Finished, as_command, prepared
from depthscope.files import write_whole

if TYPE_CHECKING:
    from depthscope.attention_paths import PathShares


@as_command
def paths(options: PathsOptions) -> Finished:
    """Split a Transformer's output by the length of the attention paths that led to it (Dong et al. 2021)."""
    shares = _split(options)
    return Finished(
        document=lambda: as_json(shares),
        show=lambda: _show(shares, full=options.full),
        save=lambda folder: _save(shares, folder),
        python=call("paths", "model, inputs", options.hints, {}),
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


def _split(options: PathsOptions) -> PathShares:
    with prepared(options) as ready:
        scope = ready.scope
        if len(parts := scope.anatomy.parts) > 1:
            named = ", ".join(parts)
            raise ValueError(f"this model has several parts ({named}): say which one, as in --part {parts[-1]}")
        pieces = ready.pieces(scope.depth_of_model)
        shares = scope.paths(progress=ready.progress("following paths", pieces))
        quick = options.tokens is None and options.samples is None and "text" in ready.inputs.metadata
        size = f"{shares.metadata['samples']} × {shares.metadata['tokens']} tokens"
        more = [f"a sample of {size}, so that it is quick: more with --tokens and --samples"] if quick else []
        ready.describe(shares.metadata, *more)
    return shares


def _show(shares: PathShares, *, full: bool) -> None:
    from depthscope.cli.display import show
    from depthscope.cli.paths_display import show_lengths
    from depthscope.diagnosis.summary import of_paths

    show(of_paths(shares), full=full, rest="every length")
    if full:
        show_lengths(shares)


def _save(shares: PathShares, folder: Path) -> None:
    """The tables first: a picture that fails must not cost them."""
    shares.save(folder)
    write_whole(folder / "paths.csv", lambda path: shares.summary().to_csv(path))
    write_whole(folder / "paths.png", lambda path: shares.plot().savefig(path, dpi=160))
