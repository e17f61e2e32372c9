"""`depthscope probe MODEL`: a profile of any Transformer, block by block, in one command."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthscope.cli.command import Finished, as_command, call, prepared, show_progress
from depthscope.cli.console import sparkline
from depthscope.cli.options import ProbeOptions
from depthscope.files import write_folder
from depthscope.interruption import attempt, was_stopped
from depthscope.interruption import notes as of_interruption
from depthscope.sealed import record_writer

if TYPE_CHECKING:
    import pandas as pd

    from depthscope.conditions import Condition
    from depthscope.diagnosis import Diagnosis
    from depthscope.probing import Profile

_GATE = "--fail-on"
_STATES = "states:"  # then a folder of hidden states that were saved, without a model
_OF_STATES = ("measures", "exclude_tokens", "causal", "samples")  # what `profile_of` takes
_ALSO_OF_STATES = ("model", "out", "json", "full", "stations", "estimate", "fail_on", "seed")  # what harms nothing
_BY_BLOCK = ("token_similarity", "direction_similarity", "cosine_similarity", "effective_rank",
             "queries_keys_gradient", "values_output_gradient")  # fmt: skip


@as_command
def probe(options: ProbeOptions) -> Finished:
    """Measure a Transformer block by block: how alike its tokens become, where, and what is left."""
    from depthscope.conditions import parse_condition
    from depthscope.diagnosis.summary import of_profile
    from depthscope.measures import GRADIENTS, choose_measures

    measured = choose_measures(options.measures) + (GRADIENTS if options.gradients else ())
    conditions = [parse_condition(text, measured, _GATE) for text in options.fail_on or []]
    asked = {name: getattr(options, name) for name in ("measures", "stations", "exclude_tokens", "gradients")}
    asked["without"] = options.without or ()
    if options.model.startswith(_STATES):
        states = options.model.removeprefix(_STATES)
        asked = {name: getattr(options, name) for name in _OF_STATES}
        profile, diagnosis = _measure_states(options, states, asked)
        python = call("profile_of", repr(states), asked)
    else:
        profile, diagnosis = _measure(options, asked)
        python = call("probe", "model, inputs", {**asked, **options.hints})
    return Finished(
        document=as_json(profile, diagnosis),
        summary=of_profile(profile, diagnosis),
        save=lambda folder: _save(profile, diagnosis, folder),
        python=python,
        tables=_tables(profile),
        findings=diagnosis.findings,
        failed=lambda: failures(profile, conditions),
    )


def _measure(options: ProbeOptions, asked: dict[str, Any]) -> tuple[Profile, Diagnosis]:
    """Probes and judges; where a remedy is called for, it is measured."""
    from depthscope.diagnosis import diagnose
    from depthscope.diagnosis.fixing import best
    from depthscope.remedies import applied
    from depthscope.remedies.record import expression, recorded

    with prepared(options) as ready:
        scope, progress = ready.scope, ready.progress
        profile = scope.probe(**asked, progress=progress("probing", ready.pieces(scope.depth_of_model)))
        saved_with = [] if applied(scope.model) else [expression(remedy) for remedy, _ in recorded(scope.model)]
        named = f"saved with {', '.join(saved_with)}, measured without"
        more = [f"{named}: depthscope.remedies.restore(model) puts it back"] if saved_with else []
        ready.describe(profile.metadata, *more)
        found = None
        if not options.estimate and not was_stopped():
            found = attempt(
                "a measured remedy",
                lambda: diagnose(profile, measure=lambda: best(scope, profile, progress("trying remedies", None))),
            )
        found = found or diagnose(profile)
        notes = profile.metadata["notes"]
        notes += [note for note in of_interruption() if note not in notes]
        return profile, found


def _measure_states(options: ProbeOptions, states: str, asked: dict[str, Any]) -> tuple[Profile, Diagnosis]:
    """Of hidden states that somebody has saved: nothing is run, and no remedy can be tried."""
    from depthscope.diagnosis import diagnose
    from depthscope.probing import profile_of

    for option in fields(options):
        if option.name not in (*_OF_STATES, *_ALSO_OF_STATES) and getattr(options, option.name) != option.default:
            name = option.name.replace("_", "-")
            raise ValueError(f"--{name} needs a model, and {options.model!r} has hidden states alone; leave it out")
    with show_progress(not options.json) as progress:
        profile = profile_of(states, **asked, progress=progress("measuring", None))
    return profile, diagnose(profile)


def as_json(profile: Profile, diagnosis: Diagnosis) -> dict[str, Any]:
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
    return found


def _tables(profile: Profile) -> dict[str, pd.DataFrame]:
    """What `--full` adds: every measure as a curve, and the main ones block by block."""
    import pandas as pd

    from depthscope.measures import MEASURES

    here, curves = set(profile.names()), {}
    for station, name in profile.frame[["station", "measure"]].drop_duplicates().itertuples(index=False, name=None):
        measure = MEASURES.get(name)
        if (measure is not None and measure.is_name) or (station != "output" and name in here):
            continue  # a number that has no mean
        for part in profile.parts:
            curve = profile.curve(name, station, part)
            defined = [value for value in curve if not math.isnan(value)] or [math.nan]
            low, high = (0.0, 1.0) if measure is not None and measure.is_share else (min(defined), max(defined))
            flat = high - low <= 1e-5 * max(abs(low), abs(high))
            label = " ".join(word for word in (name, "" if station == "output" else f"({station})", part) if word)
            curves[label] = sparkline(curve, low, low if flat else high, 24), defined[0], defined[-1]
    columns = [(name, "output", name) for name in _BY_BLOCK if name in here]
    if profile.metadata.get("placement") not in (None, "post"):  # what norms make for the branches to read
        read = (("attention_input", "attention reads"), ("ffn_input", "FFN reads"))
        columns += [("token_similarity", at, label) for at, label in read if "token_similarity" in profile.names(at)]
    parts = []
    for part, (first, last) in profile.parts.items():
        blocks = [f"{part} {block}" if part else str(block) for block in ("in", *range(first, last + 1))]
        rows = {label: profile.curve(name, at, part) for name, at, label in columns}
        parts.append(pd.DataFrame(rows, index=blocks))
    made = pd.DataFrame.from_dict(curves, orient="index", columns=["before block 1 to the last", "first", "last"])
    return {"every measure": made, "every block": pd.concat(parts)}


def failures(profile: Profile, conditions: list[Condition]) -> Iterator[str]:
    """One sentence per condition of `--fail-on` that holds; at the last block, one per part.

    A gate must not pass because there was nothing to compare: an undefined value where it is asked is an error.
    """
    from depthscope.conditions import asked_blocks, find, station_of

    lasts = [last for _, last in profile.parts.values()]
    for condition in conditions:
        rows = profile.frame[profile.frame["measure"] == condition.measure]
        station = station_of(condition, [str(name) for name in rows["station"].unique()])
        there = sorted(int(block) for block in rows.loc[rows["station"] == station, "block"].unique())
        curve = profile.curve(condition.measure, station)
        asked = asked_blocks(condition, there, lasts)
        if undefined := [block for block in asked if math.isnan(curve[block])]:
            raise ValueError(f"{_GATE} cannot be decided: {condition.measure} is undefined at block {undefined[0]}")
        if not asked:
            raise ValueError(f"{_GATE} cannot be decided: {condition.measure} is in no block")
        values = {block: curve[block] for block in there}
        for last in [[last] for last in lasts] if condition.blocks == "last" else [lasts]:
            if (found := find(condition, values, last)) is not None:
                yield f"{condition} holds: {found.value:.6g} {found.where}"


def _save(profile: Profile, diagnosis: Diagnosis, folder: Path) -> None:
    """All files or, on a full disk, none; a picture that cannot be drawn does not cost the profile."""
    from depthscope.diagnosis import reference_for
    from depthscope.probing.saved import MADE_OF_A_PROFILE, writers

    made: dict[str, Callable[[Path], object]] = {
        "profile.png": lambda path: profile.plot(reference=reference_for(profile)).savefig(path, dpi=160),
        "diagnosis.json": record_writer("diagnosis", 1, diagnosis.to_dict()),
    }
    try:
        every = writers(profile.frame, profile.sinks, profile.metadata, made)
        write_folder(folder, every, obsolete=MADE_OF_A_PROFILE)
    except OSError:
        raise
    except Exception:
        profile.save(folder)
        raise
