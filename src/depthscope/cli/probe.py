"""`depthscope probe MODEL`: a profile of any Transformer, block by block, in one command."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from depthscope.cli.options import ProbeOptions, as_command, chosen_measures, chosen_stations, excluded_tokens
from depthscope.extras import MissingExtra, require

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from depthscope.cli.condition import Condition
    from depthscope.cli.inputs import Inputs
    from depthscope.diagnosis import Diagnosis
    from depthscope.probing import Profile

Progress = Callable[[str, int | None], Callable[[], object]]
_GRADIENTS = ("output_gradient", "weight_gradient")


@as_command
def probe(options: ProbeOptions) -> None:
    """Measure a Transformer block by block: how alike its tokens become, where, and what is left."""
    from depthscope.cli.condition import EXIT_CODE, failures
    from depthscope.diagnosis import diagnose

    conditions = _conditions(options)
    excluded_tokens(options)  # refused here, before a model is built
    if options.skip_run != 1 and not options.skip_loss:
        raise ValueError("--skip-run goes with --skip-loss; give both or neither")
    if options.out is not None:
        _require_writable(options.out)
    with redirect_stdout(sys.stderr) if options.json else nullcontext():  # a model that prints must not end up in it
        profile, skipped = _measure(options)
    diagnosis = diagnose(profile, skipped)
    if options.out is not None:
        _save(profile, skipped, options.out)
    if options.json:
        print(json.dumps(as_json(profile, diagnosis, skipped), ensure_ascii=False, allow_nan=False))
    else:
        from depthscope.cli.display import show

        show(profile, diagnosis, skipped)
        if options.out is not None:
            print(f"wrote {options.out}")
    if failed := failures(profile, conditions):
        print("depthscope:", "; ".join(failed), file=sys.stderr)
        raise typer.Exit(EXIT_CODE)


def as_json(profile: Profile, diagnosis: Diagnosis, skipped: pd.DataFrame | None = None) -> dict[str, Any]:
    """What `--json` prints: the verdict, and the curves at `output`, mean over samples; what is undefined is null."""
    metadata = profile.metadata
    found = {
        "model": metadata["model"],
        "blocks": profile.depth,
        "tokens": metadata["tokens"],
        "diagnosis": diagnosis.to_dict(),
        "profile": {name: profile.curve(name) for name in profile.names()},
        "attention": {name: profile.curve(name, "attention") for name in profile.names("attention")},
        "metadata": metadata,
    }
    if skipped is not None:
        found["skip_loss"] = skipped.to_dict("records")
    return _finite(found)


def _finite(value: Any) -> Any:
    """JSON knows neither nan nor infinity."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _conditions(options: ProbeOptions) -> list[Condition]:
    from depthscope.cli.condition import parse_condition
    from depthscope.probing.catalogue import choose

    measured = choose(chosen_measures(options)) + (_GRADIENTS if options.gradients else ())
    return [parse_condition(text, measured) for text in options.fail_on or []]


def _require_writable(folder: Path) -> None:
    """Minutes of computing are not spent on results that cannot be kept."""
    require("matplotlib.figure", "figures")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"expected a folder that can be written for --out, got {str(folder)!r}: {error}") from None


def _measure(options: ProbeOptions) -> tuple[Profile, pd.DataFrame | None]:
    """Loads the model, makes its input, probes; a mistake in the user's own model ends in one line."""
    from depthscope.cli.inputs import make_inputs
    from depthscope.cli.models import load_model, user_code_failed

    with _progress(sys.stderr.isatty() and not options.json) as progress:
        progress("loading", None)
        try:
            loaded = load_model(options)
            inputs = make_inputs(loaded, options)
            profile, skipped = _run(loaded.model, inputs, options, progress)
        except (ValueError, OSError, MissingExtra):
            raise
        except Exception as error:
            if "allocate" in str(error) or "out of memory" in str(error):
                raise ValueError(f"out of memory: give fewer --tokens or a smaller --batch ({error})") from None
            if ":" not in options.model:
                raise  # our own family: a defect, not a mistake
            raise user_code_failed(f"running {options.model}", error) from error
    asked = {"model": options.model, "seed": options.seed, **inputs.metadata}
    notes = [*profile.metadata.get("notes", []), *loaded.notes, *inputs.notes]
    profile.metadata.update(asked, notes=notes)
    return profile, skipped


def _run(
    model: nn.Module, inputs: Inputs, options: ProbeOptions, progress: Progress
) -> tuple[Profile, pd.DataFrame | None]:
    from depthscope import probing
    from depthscope.anatomy import anatomy_of

    config: Any = getattr(model, "config", None)
    found = len(anatomy_of(model, options.blocks).blocks)
    depth = max(found, getattr(config, "num_hidden_layers", 0))  # blocks that share weights are found once
    profile = probing.probe(
        model,
        inputs.batches,
        measures=chosen_measures(options),
        stations=chosen_stations(options),
        blocks=options.blocks,
        exclude_tokens=excluded_tokens(options),
        gradients=options.gradients,
        progress=progress("probing", None if inputs.count is None else depth * inputs.count),
    )
    if not options.skip_loss:
        return profile, None
    bar = progress("skipping blocks", profile.depth - options.skip_run + 1)
    skipped = probing.skip_loss(model, inputs.batches, run=options.skip_run, blocks=options.blocks, progress=bar)
    return profile, skipped


@contextmanager
def _progress(shown: bool) -> Iterator[Progress]:
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


def _save(profile: Profile, skipped: pd.DataFrame | None, folder: Path) -> None:
    """The profile first: a picture that fails must not cost it."""
    from depthscope.diagnosis import reference_for

    profile.save(folder)
    if skipped is not None:
        _write(folder / "skip_loss.csv", lambda path: skipped.to_csv(path, index=False))
    _write(folder / "profile.png", lambda path: profile.plot(reference=reference_for(profile)).savefig(path, dpi=160))


def _write(target: Path, write: Callable[[Path], object]) -> None:
    """A file is there whole or not at all."""
    scratch = target.with_name(f".{target.stem}-{os.getpid()}{target.suffix}")
    try:
        write(scratch)
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)
