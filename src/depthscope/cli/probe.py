"""`depthscope probe MODEL`: a profile of any Transformer, block by block, in one command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthscope.cli.depth import save_use, use_of
from depthscope.cli.options import ProbeOptions
from depthscope.cli.reporting import call
from depthscope.cli.running import Finished, Prepared, as_command, prepared
from depthscope.files import write_folder
from depthscope.interruption import attempt, was_stopped
from depthscope.interruption import notes as of_interruption
from depthscope.sealed import record_writer

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from depthscope.conditions import Condition
    from depthscope.diagnosis import Diagnosis
    from depthscope.probing import Profile
    from depthscope.usage import DepthUse

_OF_USE = ("table", "summary", "metadata")  # its sentences are among those of the diagnosis
STATES = "states:"  # then a folder of hidden states, without a model
_OF_STATES = {"model", "out", "json", "full", "measures", "stations", "exclude_tokens", "causal"}  # what means
_OF_STATES |= {"samples", "estimate", "fail_on", "seed", "skip_run"}  # something there
_PLAIN = {"gradients": False, "without": ()}


@as_command
def probe(options: ProbeOptions) -> Finished:
    """Measure a Transformer block by block: how alike its tokens become, where, and what is left."""
    from depthscope.cli.fail_on import failures

    conditions = _conditions(options)
    if options.skip_run != 1 and not options.skip_loss:
        raise ValueError(f"--skip-run {options.skip_run} goes with --skip-loss; give both or neither")
    if options.depth_use and options.skip_loss and options.skip_run == 1:
        raise ValueError("--depth-use skips single blocks as well: leave --skip-loss out, or give --skip-run 2 or more")
    if options.without and (options.depth_use or options.skip_loss):
        other = "--depth-use" if options.depth_use else "--skip-loss"
        raise ValueError(f"{other} is of the whole model; leave it or --without out")
    if options.model.startswith(STATES):
        profile, skipped, used, diagnosis = _measure_states(options)
    else:
        profile, skipped, used, diagnosis = _measure(options)
    return Finished(
        document=lambda: as_json(profile, diagnosis, skipped, used),
        show=lambda: _show(profile, skipped, used, diagnosis, full=options.full),
        save=lambda folder: _save(profile, skipped, used, diagnosis, folder),
        python=_in_python(options),
        failed=lambda: failures(profile, conditions),
    )


def as_json(
    profile: Profile, diagnosis: Diagnosis, skipped: pd.DataFrame | None = None, used: DepthUse | None = None
) -> dict[str, Any]:
    """What `--json` prints: the verdict, and the curves at `output`, mean over samples."""
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
    return found


def _wishes(options: ProbeOptions) -> dict[str, Any]:
    """What `Scope.probe` is asked for."""
    return {
        "measures": options.measures,
        "stations": options.stations,
        "exclude_tokens": options.exclude_tokens,
        "gradients": options.gradients,
        "without": options.without or (),
    }


def _in_python(options: ProbeOptions) -> str:
    """The call that measures the same of a model and inputs that are at hand, or of states."""
    if options.model.startswith(STATES):
        wishes = {name: getattr(options, name) for name in ("measures", "exclude_tokens", "causal", "samples")}
        return call("profile_of", repr(options.model.removeprefix(STATES)), wishes, {"causal": None, "samples": None})
    return call("probe", "model, inputs", {**_wishes(options), **options.hints}, _PLAIN)


def _conditions(options: ProbeOptions) -> list[Condition]:
    from depthscope.cli.fail_on import OPTION
    from depthscope.conditions import parse_condition
    from depthscope.measures import GRADIENTS, choose_measures

    measured = choose_measures(options.measures) + (GRADIENTS if options.gradients else ())
    return [parse_condition(text, measured, OPTION) for text in options.fail_on or []]


def _measure(options: ProbeOptions) -> tuple[Profile, pd.DataFrame | None, DepthUse | None, Diagnosis]:
    """Loads the model, makes its input, probes and judges; where a remedy is called for, it is measured."""
    from depthscope.diagnosis import diagnose
    from depthscope.diagnosis.fixing import best
    from depthscope.remedies import Recommendation

    with prepared(options) as ready:
        scope, progress = ready.scope, ready.progress
        profile = scope.probe(**_wishes(options), progress=progress("probing", ready.pieces(scope.depth_of_model)))
        used = attempt("--depth-use", lambda: use_of(ready)) if options.depth_use else None
        skipped = attempt("--skip-loss", lambda: _skipped(ready, options.skip_run)) if options.skip_loss else None
        ready.describe(profile.metadata, *_saved_remedies(scope.model))

        def measure() -> Recommendation:
            return best(scope, profile, progress("trying remedies", None))

        def judged(chosen: Callable[[], Recommendation] | None = None) -> Diagnosis:
            return diagnose(profile, measure=chosen)

        found = None if options.estimate or was_stopped() else attempt("a measured remedy", lambda: judged(measure))
        found = found or judged()
        notes = profile.metadata["notes"]
        notes += [note for note in of_interruption() if note not in notes]
        return profile, skipped, used, found


def _measure_states(options: ProbeOptions) -> tuple[Profile, None, None, Diagnosis]:
    """Of hidden states that somebody has saved: nothing is run, and no remedy can be tried."""
    from depthscope.cli.running import show_progress
    from depthscope.diagnosis import diagnose
    from depthscope.probing import profile_of

    for option in fields(options):
        if option.name not in _OF_STATES and getattr(options, option.name) != option.default:
            name = option.name.replace("_", "-")
            raise ValueError(f"--{name} needs a model, and {options.model!r} has hidden states alone; leave it out")
    with show_progress(not options.json) as progress:
        profile = profile_of(
            options.model.removeprefix(STATES),
            measures=options.measures,
            exclude_tokens=options.exclude_tokens,
            causal=options.causal,
            samples=options.samples,
            progress=progress("measuring", None),
        )
    return profile, None, None, diagnose(profile)


def _skipped(ready: Prepared, run: int) -> pd.DataFrame:
    rows = ready.scope.depth_of_model - run + 1
    return ready.scope.skip_loss(run=run, progress=ready.progress("skipping blocks", rows))


def _saved_remedies(model: nn.Module) -> list[str]:
    """A model that was saved with remedies is loaded without them."""
    from depthscope.remedies import applied
    from depthscope.remedies.record import expression, recorded

    missing = [expression(item.remedy) for item in recorded(model)] if not applied(model) else []
    named = ", ".join(missing)
    return [f"saved with {named}, measured without: depthscope.remedies.restore(model) puts it back"] if missing else []


def _show(
    profile: Profile, skipped: pd.DataFrame | None, used: DepthUse | None, diagnosis: Diagnosis, *, full: bool
) -> None:
    from depthscope.cli.display import show, show_profile
    from depthscope.diagnosis.summary import of_profile

    show(of_profile(profile, diagnosis, used, skipped), full=full, rest="every measure of every block")
    if full:
        show_profile(profile, diagnosis, skipped, used)


def _save(
    profile: Profile, skipped: pd.DataFrame | None, used: DepthUse | None, diagnosis: Diagnosis, folder: Path
) -> None:
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
    if used is not None:
        save_use(used, folder)
