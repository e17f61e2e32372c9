"""What a page is about: a model as it was measured, a training, a study; from objects, or from what `--out` wrote."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pandas as pd

from depthscope.attention_paths import PathShares
from depthscope.diagnosis import Diagnosis, Fixed, diagnose
from depthscope.probing import Profile
from depthscope.usage import DepthUse
from depthscope.value_spectra import Spectra


@dataclass(frozen=True)
class Subject:
    """One of the things that a page sets side by side. What was not measured is None or empty.

    | field       | what it is                                                                                     |
    | ----------- | ---------------------------------------------------------------------------------------------- |
    | `diagnosis` | as `Diagnosis.to_dict` gives it                                                                |
    | `skipped`   | what `skip_loss` returned                                                                      |
    | `training`  | a row per logged number: series, seed, step, quantity, value                                   |
    | `watched`   | a row per number of `watch`: series, step, block, station, measure, value                      |
    | `compared`  | what a fair comparison found: the `cells`, `choices` and `verdict` of its summary             |
    | `title`     | what a study shows                                                                             |
    | `claims`    | those of a study, as dictionaries; `figure` is its picture as PNG, `data` its table            |
    | `remedy`    | what `fix` wrote: reason, python, loss, notes                                                  |
    | `commands`  | by title, what made it: a command, a line of Python                                            |
    | `unchecked` | names of its files that an earlier version wrote without a sum                                  |
    | `damage`    | which files of it are damaged, missing or of another kind, in sentences                        |
    """

    label: str = ""
    profile: Profile | None = None
    diagnosis: dict[str, Any] | None = None
    skipped: pd.DataFrame | None = None
    shares: PathShares | None = None
    spectra: Spectra | None = None
    use: DepthUse | None = None
    training: pd.DataFrame | None = None
    watched: pd.DataFrame | None = None
    compared: dict[str, Any] | None = None
    title: str = ""
    claims: tuple[dict[str, str], ...] = ()
    figure: bytes | None = None
    data: pd.DataFrame | None = None
    remedy: dict[str, Any] | None = None
    commands: dict[str, str] = field(default_factory=dict)
    damage: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def of_model(self) -> tuple[Profile | PathShares | Spectra | DepthUse | None, ...]:
        """What was measured of a model, each with metadata of its own."""
        return self.profile, self.shares, self.spectra, self.use

    @property
    def depth(self) -> int:
        """Blocks; 0 if there are none."""
        for found in self.of_model:
            if found is not None:
                return found.depth
        return int(self.watched["block"].max()) if self.watched is not None and len(self.watched) else 0

    @property
    def model(self) -> str:
        """The model's name, as it was given; "" if it has none."""
        for found in self.of_model:
            if found is not None and found.metadata.get("model"):
                return str(found.metadata["model"])
        return ""


def subjects_of(things: Iterable[object]) -> list[Subject]:
    """Objects as subjects. What follows a profile without being of its kind belongs to it: a diagnosis, path shares,
    spectra, the use of depth, the table of `skip_loss`; a second one of a kind begins a new subject."""
    found: list[Subject] = []
    for thing in things:
        for part in _parts(thing):
            if found and not isinstance(thing, Fixed) and _fits(found[-1], part):
                found[-1] = _joined(found[-1], part)
            else:
                found.append(part)
    return named([_judged(subject) for subject in found])


def _parts(thing: object) -> list[Subject]:
    if isinstance(thing, Subject):
        return [thing]
    if isinstance(thing, Profile):
        return [Subject(profile=thing)]
    if isinstance(thing, Diagnosis):
        return [Subject(diagnosis=thing.to_dict())]
    if isinstance(thing, PathShares):
        return [Subject(shares=thing)]
    if isinstance(thing, Spectra):
        return [Subject(spectra=thing)]
    if isinstance(thing, DepthUse):
        return [Subject(use=thing)]
    if isinstance(thing, pd.DataFrame) and {"first_block", "last_block", "change"} <= set(thing.columns):
        return [Subject(skipped=thing)]
    if isinstance(thing, Fixed):
        return _before_and_after(thing)
    raise ValueError(
        "expected a folder, a Profile, Diagnosis, Fixed, PathShares, Spectra, DepthUse, or what skip_loss returned, "
        f"got {thing!r}"
    )


def _before_and_after(fixed: Fixed) -> list[Subject]:
    before, after = (verdict.to_dict() for verdict in fixed.verdicts)
    loss = None if fixed.losses is None else dict(zip(("before", "after"), fixed.losses, strict=True))
    said = {
        "reason": fixed.recommendation.reason,
        "python": fixed.python,
        "loss": loss,
        "notes": list(fixed.notes),
        "trained": fixed.trained,
    }
    subjects = [Subject("before", fixed.before, before, remedy=said)]
    return [*subjects, Subject("after", fixed.after, after)] if fixed.remedies else subjects


def _fits(subject: Subject, part: Subject) -> bool:
    return subject.remedy is None and not (_filled(subject) & _filled(part))


def _filled(subject: Subject) -> set[str]:
    values = {item.name: getattr(subject, item.name) for item in fields(subject) if item.name != "label"}
    return {name for name, value in values.items() if value is not None and has_content(value)}


def has_content(value: object) -> bool:
    """Whether a field says something: tables do, empty texts and lists do not."""
    return bool(value) if isinstance(value, str | tuple | dict) else True


def _joined(subject: Subject, part: Subject) -> Subject:
    return replace(subject, **{name: getattr(part, name) for name in _filled(part)})


def _judged(subject: Subject) -> Subject:
    """With a verdict, if there is a profile to judge."""
    if subject.profile is None or subject.diagnosis is not None:
        return subject
    judged = diagnose(subject.profile, subject.skipped, spectra=subject.spectra, depth=subject.use)
    return replace(subject, diagnosis=judged.to_dict())


def named(subjects: Sequence[Subject]) -> list[Subject]:
    """With labels that differ: the model's name where there is none, and a number where two are the same."""
    taken: set[str] = set()
    found = []
    for subject in subjects:
        base = label = subject.label or subject.model or "run"
        number = 2
        while label in taken:
            label, number = f"{base} ({number})", number + 1
        taken.add(label)
        found.append(replace(subject, label=label))
    return found
