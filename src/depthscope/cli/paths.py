"""`depthscope paths MODEL`: what attention paths of each length make of a Transformer's output."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthscope.cli.documents import print_document
from depthscope.cli.options import PathsOptions, as_command
from depthscope.cli.reporting import add_report, call
from depthscope.cli.running import finite, prepared, require_writable, say_where, scope_on
from depthscope.files import write_whole
from depthscope.interruption import notes as of_interruption

if TYPE_CHECKING:
    from depthscope.attention_paths import PathShares


@as_command
def paths(options: PathsOptions) -> None:
    """Split a Transformer's output by the length of the attention paths that led to it (Dong et al. 2021)."""
    if options.out is not None:
        require_writable(options.out)
    with redirect_stdout(sys.stderr) if options.json else nullcontext():  # a model that prints must not end up in it
        shares = _split(options)
    if options.json:
        print_document("paths", as_json(shares))
    else:
        from depthscope.cli.paths_display import show

        show(shares)
    if options.out is not None:  # shown first: a save that fails must not cost what was computed
        _save(shares, options.out)
        asked = {"by_head": options.by_head, "loss": options.with_loss, **options.hints}
        add_report(options.out, "paths", call("paths", "model, inputs", asked, {"by_head": False, "loss": False}))
        say_where(options.out, options.json)


def as_json(shares: PathShares) -> dict[str, Any]:
    """What `--json` prints: means over samples by length, −1 for the constant part; what is undefined is null."""
    found = {
        "model": shares.metadata["model"],
        "blocks": shares.depth,
        "paths": {str(length): count for length, count in shares.counts.items()},
        "lengths": shares.summary().reset_index().to_dict("records"),
        "metadata": shares.metadata,
    }
    if not shares.heads.empty:
        keys = ["block", "head", "length"]
        means = shares.heads.groupby(keys)["projection_share"].mean().reset_index()
        found["heads"] = means.to_dict("records")
    if not shares.losses.empty:
        found["losses"] = shares.losses.to_dict("records")
    return finite(found)


def _split(options: PathsOptions) -> PathShares:
    with prepared(options) as (loaded, inputs, progress):
        scope = scope_on(loaded, inputs, options)
        if len(parts := scope.anatomy.parts) > 1:
            named = ", ".join(parts)
            raise ValueError(f"this model has several parts ({named}): say which one, as in --part {parts[-1]}")
        depth = scope.depth_of_model
        pieces = depth + (3 * depth + 3 if options.with_loss else 0)
        shares = scope.paths(
            by_head=options.by_head,
            loss=options.with_loss,
            progress=progress("following paths", pieces * inputs.count if inputs.count else None),
        )
        notes = [*shares.metadata.get("notes", []), *loaded.notes, *inputs.notes, *of_interruption()]
        if options.tokens is None and options.samples is None and "text" in inputs.metadata:
            notes.append(
                f"a sample of {shares.metadata['samples']} × {shares.metadata['tokens']} tokens, so that it is quick: "
                "more with --tokens and --samples"
            )
        shares.metadata.update({"model": options.model, "seed": options.seed, **inputs.metadata}, notes=notes)
    return shares


def _save(shares: PathShares, folder: Path) -> None:
    """The tables first: a picture that fails must not cost them."""
    shares.save(folder)
    write_whole(folder / "paths.csv", lambda path: shares.summary().to_csv(path))
    write_whole(folder / "paths.png", lambda path: shares.plot().savefig(path, dpi=160))
