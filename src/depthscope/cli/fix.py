"""`depthscope fix MODEL`: what a remedy does to a model, before and after, and the line of Python that puts it in."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthscope.cli.options import FixOptions, as_command

if TYPE_CHECKING:
    from torch import nn

    from depthscope.cli.inputs import Inputs
    from depthscope.cli.running import Progress
    from depthscope.probing import Profile
    from depthscope.remedies import DeEscalate, Recommendation, ResidualWeight

MEASURES = ("token_similarity", "direction_similarity", "effective_rank")


@dataclass(frozen=True)
class Fixed:
    """The model before and after, and what was put in."""

    before: Profile
    after: Profile
    remedies: tuple[DeEscalate | ResidualWeight, ...]  # none: nothing needs to be done
    reason: str
    losses: tuple[float, float] | None  # before, after; None: the model has no loss
    notes: tuple[str, ...]
    apply_options: str = ""  # what `apply` must be told of a model that it does not know

    @property
    def python(self) -> str:
        """The lines that put the remedies in."""
        names = ", ".join(sorted({type(remedy).__name__ for remedy in self.remedies}))
        remedies = ", ".join(_expression(remedy) for remedy in self.remedies)
        return f"from depthscope.remedies import {names}\n\ndepthscope.apply(model, {remedies}{self.apply_options})"


@as_command
def fix(options: FixOptions) -> None:
    """Put de-escalation into a Transformer, show it before and after, and print the line that does it."""
    from depthscope.cli.running import require_writable

    tau = chosen_tau(options)
    if options.out is not None:
        require_writable(options.out)
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        fixed = _fix(options, tau)
    if options.out is not None:
        _save(fixed, options.out)
    if options.json:
        print(json.dumps(as_json(fixed), ensure_ascii=False, allow_nan=False))
        return
    from depthscope.cli.fix_display import show

    show(fixed)
    if options.out is not None:
        print(f"wrote {options.out}")


def chosen_tau(options: FixOptions) -> float | None:
    """The number; None for "recommended"."""
    if options.tau == "recommended":
        if options.level is not None and not 0 < options.level < 1:
            raise ValueError(f"expected --level between 0 and 1, got {options.level}")
        return None
    if options.level is not None:
        raise ValueError("--level chooses a τ; give --level or --tau, not both")
    try:
        tau = float(options.tau)
    except ValueError:
        raise ValueError(f"expected --tau with a number in [0, 1] or recommended, got {options.tau!r}") from None
    if not 0 <= tau <= 1:
        raise ValueError(f"expected --tau in [0, 1], got {options.tau}")
    return tau


def _fix(options: FixOptions, tau: float | None) -> Fixed:
    from depthscope.cli.running import prepared

    with prepared(options) as (loaded, inputs, progress):
        return _measure(loaded.model, inputs, options, tau, progress, loaded.notes + inputs.notes)


def _measure(
    model: nn.Module, inputs: Inputs, options: FixOptions, tau: float | None, progress: Progress, notes: tuple[str, ...]
) -> Fixed:
    from depthscope.diagnosis import diagnose
    from depthscope.remedies import applied, apply, remove

    if applied(model):
        raise ValueError(f"{options.model} has remedies already: depthscope.remove(model) takes them out")
    advance = progress("probing", None)
    before = _probe(model, inputs, options, advance)
    notes = (*before.metadata.get("notes", []), *notes)
    verdict = diagnose(before)
    if verdict.verdict not in ("collapsing", "collapsed"):
        advice = f"what to do: {verdict.recommendation.reason}"
        if tau is None:
            return Fixed(
                before, before, (), f"no remedy is put in; {advice} --tau puts one in all the same", None, notes
            )
        notes = (*notes, f"put in as asked for, against the verdict; {advice}")
    loss_before = _loss(model, inputs)
    progress("measuring the odds", None)
    found, remedies = chosen_remedies(model, inputs.batches, options, tau, before)
    reason = found.reason if found is not None else f"τ = {tau:g} as asked for"
    if not remedies:
        return Fixed(before, before, (), reason, None, notes)
    apply(model, *remedies, blocks=options.blocks, inputs=inputs.batches)
    try:
        after = _probe(model, inputs, options, progress("probing again", None))
        loss_after = _loss(model, inputs)
    finally:
        remove(model)
    losses = None if loss_before is None or loss_after is None else (loss_before, loss_after)
    return Fixed(before, after, remedies, reason, losses, notes, _apply_options(before, options))


def _apply_options(before: Profile, options: FixOptions) -> str:
    """A model of no known family is told to `apply` as it was found here."""
    named = "" if options.blocks is None else f', blocks="{options.blocks}"'
    causal = before.metadata.get("causal")
    told = before.metadata.get("family") == "unknown" and causal is not None
    return f"{named}, causal={causal}" if told else named


def chosen_remedies(
    model: nn.Module, batches: Any, options: FixOptions, tau: float | None, before: Profile
) -> tuple[Recommendation | None, tuple[DeEscalate | ResidualWeight, ...]]:
    """What is put in: as asked for, else as recommended. Sinks of causal models are left alone."""
    from dataclasses import replace

    from depthscope.remedies import DeEscalate, ResidualWeight, recommend

    causal = before.metadata.get("causal") and not _padded_on_the_left(batches)
    sinks = sink_positions(before) if causal else ()  # positions are numbers of real tokens only without such padding
    found, alpha = None, options.alpha
    if tau is None:
        found = recommend(
            model,
            batches,
            level=options.level,
            at=options.at,
            mixing=options.mixing,
            blocks=options.blocks,
            weigh_branches=options.alpha is None and not is_trained(before),
        )
        tau, alpha = found.tau, found.alpha if options.alpha is None else options.alpha
        if tau == 0:
            return found, ()
    remedy = DeEscalate(tau, at=options.at, mixing=options.mixing)
    remedy = replace(remedy, skip_in_mean=sinks, leave_alone=sinks)
    return found, (remedy,) if alpha is None else (remedy, ResidualWeight(alpha))


def _padded_on_the_left(batches: Any) -> bool:
    items = [batches] if hasattr(batches, "items") else batches if isinstance(batches, list | tuple) else []
    masks = [item["attention_mask"] for item in items if hasattr(item, "items") and "attention_mask" in item]
    return any(bool((mask[:, 0] == 0).any()) for mask in masks)


def sink_positions(profile: Profile) -> tuple[int, ...]:
    """Positions whose token is an outlier in at least half of the samples, at most four."""
    if len(profile.sinks) == 0:
        return ()
    counts = profile.sinks.groupby("token")["sample"].nunique()
    common = counts[counts * 2 >= profile.metadata["samples"]].sort_values(ascending=False)
    return tuple(sorted(int(token) for token in common.index[:4]))


def is_trained(profile: Profile) -> bool:
    """Whether the weights look trained."""
    return profile.metadata.get("weights", {}).get("look") == "trained"


def as_json(fixed: Fixed) -> dict[str, Any]:
    """What `--json` prints: curves and verdict before and after, the remedies and why."""
    from depthscope.cli.running import finite
    from depthscope.diagnosis import diagnose
    from depthscope.remedies.record import to_dict

    profiles = {"before": fixed.before, "after": fixed.after}
    return finite(
        {
            "model": fixed.before.metadata["model"],
            "remedies": [to_dict(remedy) for remedy in fixed.remedies],
            "reason": fixed.reason,
            "python": fixed.python if fixed.remedies else None,
            "loss": None if fixed.losses is None else dict(zip(("before", "after"), fixed.losses, strict=True)),
            "trained": is_trained(fixed.before),
            "notes": list(fixed.notes),
        }
        | {
            when: {
                "profile": {name: profile.curve(name) for name in profile.names()},
                "diagnosis": diagnose(profile).to_dict(),
            }
            for when, profile in profiles.items()
        }
    )


def _probe(model: nn.Module, inputs: Inputs, options: FixOptions, advance: Any) -> Profile:
    from depthscope import probing

    profile = probing.probe(model, inputs.batches, measures="verdict", blocks=options.blocks, progress=advance)
    profile.metadata.update(model=options.model, seed=options.seed, **inputs.metadata)
    return profile


def _loss(model: nn.Module, inputs: Inputs) -> float | None:
    """The model's own loss, where it is a language model of Hugging Face with its head."""
    from depthscope.probing.skipping import mean_loss

    if getattr(model, "lm_head", None) is None and not hasattr(model, "get_output_embeddings"):
        return None
    try:
        return mean_loss(model, inputs.batches)
    except ValueError:  # it returns none
        return None


def _expression(remedy: DeEscalate | ResidualWeight) -> str:
    from dataclasses import fields

    options = [
        f"{field.name}={_literal(getattr(remedy, field.name))}"
        for field in fields(remedy)
        if getattr(remedy, field.name) != field.default or field.name in ("tau", "at")
    ]
    return f"{type(remedy).__name__}({', '.join(options)})"


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _save(fixed: Fixed, folder: Path) -> None:
    from depthscope.cli.fix_display import draw
    from depthscope.cli.running import write

    fixed.before.save(folder / "before")
    fixed.after.save(folder / "after")
    text = json.dumps(as_json(fixed), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write(folder / "fix.json", lambda path: path.write_text(text, encoding="utf-8"))
    write(folder / "fix.png", lambda path: draw(fixed).savefig(path, dpi=160))
