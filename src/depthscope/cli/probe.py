"""`depthscope probe MODEL`: a profile of any Transformer, block by block, in one command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from depthscope.cli.depth import save_use, use_of
from depthscope.cli.documents import print_document
from depthscope.cli.options import (
    ProbeOptions,
    as_command,
    chosen_measures,
    chosen_stations,
    excluded_tokens,
    left_out_parts,
)
from depthscope.cli.reporting import add_report, call
from depthscope.cli.running import Doing, finite, prepared, require_writable, say_where, scope_on
from depthscope.exit_codes import ExitCode
from depthscope.files import write_folder
from depthscope.interruption import attempt, was_stopped
from depthscope.interruption import notes as of_interruption
from depthscope.sealed import record_writer

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from depthscope.cli.inputs import Inputs
    from depthscope.conditions import Condition
    from depthscope.diagnosis import Diagnosis
    from depthscope.probing import Profile
    from depthscope.scope import Scope
    from depthscope.usage import DepthUse
    from depthscope.value_spectra import Spectra

_OF_USE = ("table", "summary", "metadata")  # its sentences are among those of the diagnosis


@as_command
def probe(options: ProbeOptions) -> None:
    """Measure a Transformer block by block: how alike its tokens become, where, and what is left."""
    from depthscope.cli.condition import failures

    conditions = _conditions(options)
    chosen_stations(options)
    excluded_tokens(options)  # refused here, before a model is built
    if options.skip_run != 1 and not options.skip_loss:
        raise ValueError(f"--skip-run {options.skip_run} goes with --skip-loss; give both or neither")
    if options.depth_use and options.skip_loss and options.skip_run == 1:
        raise ValueError("--depth-use skips single blocks as well: leave --skip-loss out, or give --skip-run 2 or more")
    if options.without is not None and options.depth_use:
        raise ValueError("--depth-use is of the whole model; leave it or --without out")
    if options.without is not None and options.skip_loss:
        raise ValueError("--skip-loss is of the whole model; leave it or --without out")
    left_out_parts(options)
    if options.out is not None:
        require_writable(options.out)
    with redirect_stdout(sys.stderr) if options.json else nullcontext():  # a model that prints must not end up in it
        profile, skipped, used, diagnosis = _measure(options)
    if options.json:
        print_document("probe", as_json(profile, diagnosis, skipped, used))
    else:
        _show(profile, skipped, used, diagnosis, full=options.full)
    if options.out is not None:  # shown first: a save that fails must not cost what was computed
        _save(profile, skipped, diagnosis, options.out)
        if used is not None:
            save_use(used, options.out)
        add_report(options.out, "probe", _in_python(options))
        say_where(options.out, options.json)
    if failed := failures(profile, conditions):
        print("depthscope:", "; ".join(failed), file=sys.stderr)
        raise typer.Exit(ExitCode.GATE)


def _show(
    profile: Profile, skipped: pd.DataFrame | None, used: DepthUse | None, diagnosis: Diagnosis, *, full: bool
) -> None:
    from depthscope.cli.display import show, show_profile
    from depthscope.diagnosis.summary import of_profile

    show(of_profile(profile, diagnosis, used, skipped), full=full, rest="every measure of every block")
    if full:
        show_profile(profile, diagnosis, skipped, used)


def as_json(
    profile: Profile, diagnosis: Diagnosis, skipped: pd.DataFrame | None = None, used: DepthUse | None = None
) -> dict[str, Any]:
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
    if len(profile.parts) > 1:  # what enters the later ones is in no curve
        found["entrances"] = {
            part: {name: profile.curve(name, part=part)[0] for name in profile.names()} for part in profile.parts
        }
    if skipped is not None:
        found["skip_loss"] = skipped.to_dict("records")
    if used is not None:
        found["depth_use"] = {name: value for name, value in used.to_dict().items() if name in _OF_USE}
    return finite(found)


def _in_python(options: ProbeOptions) -> str:
    """The call that measures the same of a model and inputs that are at hand."""
    asked = {
        "measures": chosen_measures(options),
        "stations": chosen_stations(options),
        "exclude_tokens": excluded_tokens(options),
        "gradients": options.gradients,
        "without": left_out_parts(options),
        "window": options.window,
        **options.hints,
    }
    probed = call("probe", "model, inputs", asked, {"gradients": False, "without": (), "window": None})
    if not options.depth_use:
        return probed
    return f"depthscope.diagnose({probed}, depth={call('depth_use', 'model, inputs', options.hints, {})})"


def _conditions(options: ProbeOptions) -> list[Condition]:
    from depthscope.cli.condition import parse_fail_on
    from depthscope.measures import GRADIENTS, choose_measures

    measured = choose_measures(chosen_measures(options)) + (GRADIENTS if options.gradients else ())
    return [parse_fail_on(text, measured) for text in options.fail_on or []]


def _measure(options: ProbeOptions) -> tuple[Profile, pd.DataFrame | None, DepthUse | None, Diagnosis]:
    """Loads the model, makes its input, probes and judges; where a remedy is called for, it is measured."""
    from depthscope.diagnosis import diagnose
    from depthscope.diagnosis.fixing import best
    from depthscope.remedies import Recommendation

    with prepared(options) as (loaded, inputs, progress):
        model, scope = loaded.model, scope_on(loaded, inputs, options)
        profile, used, skipped = _probed(scope, inputs, options, progress), None, None
        if options.depth_use:
            used = attempt("--depth-use", lambda: use_of(scope, loaded, inputs, options, progress))
        if options.skip_loss:
            skipped = attempt("--skip-loss", lambda: _skipped(scope, options, profile.depth, progress))
        asked = {"model": options.model, "seed": options.seed, **inputs.metadata}
        notes = [*profile.metadata.get("notes", []), *loaded.notes, *inputs.notes, *_saved_remedies(model)]
        profile.metadata.update(asked, notes=notes)

        def measure() -> Recommendation:
            return best(scope, profile, progress("measuring the remedy", None))

        weights = _spectra(model, profile, options)

        def judged(chosen: Callable[[], Recommendation] | None = None) -> Diagnosis:
            return diagnose(profile, skipped, spectra=weights, depth=used, measure=chosen)

        found = None if options.estimate or was_stopped() else attempt("a measured remedy", lambda: judged(measure))
        found = found or judged()
        notes += of_interruption()
        return profile, skipped, used, found


def _spectra(model: nn.Module, profile: Profile, options: ProbeOptions) -> Spectra | None:
    """Of trained weights, head by head; random ones lean to no side. None where the blocks show no projections."""
    from depthscope import value_spectra

    if profile.metadata.get("weights", {}).get("look") == "initialised":
        return None
    try:
        found = attempt(
            "the spectra of the weights",
            lambda: value_spectra.spectra(model, whole=False, blocks=options.blocks, part=options.part),
        )
    except ValueError:
        return None
    return None if was_stopped() else found  # some blocks tell nothing of all


def _saved_remedies(model: nn.Module) -> list[str]:
    """A model that was saved with remedies is loaded without them."""
    from depthscope.remedies import applied
    from depthscope.remedies.expression import expression
    from depthscope.remedies.record import recorded

    missing = [expression(item.remedy) for item in recorded(model)] if not applied(model) else []
    named = ", ".join(missing)
    return [f"saved with {named}, measured without: depthscope.remedies.restore(model) puts it back"] if missing else []


def _probed(scope: Scope, inputs: Inputs, options: ProbeOptions, progress: Doing) -> Profile:
    return scope.probe(
        measures=chosen_measures(options),
        stations=chosen_stations(options),
        exclude_tokens=excluded_tokens(options),
        gradients=options.gradients,
        without=left_out_parts(options),
        window=options.window,
        progress=progress("probing", scope.depth_of_model * inputs.count if inputs.count else None),
    )


def _skipped(scope: Scope, options: ProbeOptions, depth: int, progress: Doing) -> pd.DataFrame:
    return scope.skip_loss(run=options.skip_run, progress=progress("skipping blocks", depth - options.skip_run + 1))


def _save(profile: Profile, skipped: pd.DataFrame | None, diagnosis: Diagnosis, folder: Path) -> None:
    """All files or, on a full disk, none; a picture that cannot be drawn does not cost the profile."""
    from depthscope.diagnosis import reference_for
    from depthscope.probing.saved import MADE_OF_A_PROFILE, writers

    made: dict[str, Callable[[Path], object]] = {
        "profile.png": lambda path: profile.plot(reference=reference_for(profile)).savefig(path, dpi=160),
        "diagnosis.json": record_writer("diagnosis", 1, diagnosis.to_dict()),
    }
    if skipped is not None:
        made["skip_loss.csv"] = lambda path: skipped.to_csv(path, index=False)
    try:
        every = writers(profile.frame, profile.sinks, profile.metadata, made)
        write_folder(folder, every, obsolete=MADE_OF_A_PROFILE)
    except OSError:
        raise
    except Exception:
        profile.save(folder)
        raise
