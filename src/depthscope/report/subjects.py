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

_FIELDS = {Profile: "profile", Diagnosis: "diagnosis", PathShares: "shares", Spectra: "spectra", DepthUse: "use"}


@dataclass(frozen=True)
class Subject:
    """One of the things that a page sets side by side. What was not measured is None or empty.

    | field       | what it is                                                                                     |
    | ----------- | ---------------------------------------------------------------------------------------------- |
    | `training`  | a row per logged number: series, seed, step, quantity, value                                   |
    | `watched`   | a row per number of `watch`: series, step, block, station, measure, value                      |
    | `compared`  | what a fair comparison found: the `cells`, `choices` and `verdict` of its summary             |
    | `title`     | what a study shows                                                                             |
    | `claims`    | those of a study, as dictionaries; `figure` is its picture as PNG, `data` its table            |
    | `notes`     | what a reader must know besides                                                                |
    | `commands`  | by title, what made it: a command, a line of Python                                            |
    | `damage`    | which files of it are damaged, missing or of another kind, in sentences                        |
    """

    label: str = ""
    profile: Profile | None = None
    diagnosis: Diagnosis | None = None
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
    notes: tuple[str, ...] = ()
    commands: dict[str, str] = field(default_factory=dict)
    damage: tuple[str, ...] = ()

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
        names = (str(found.metadata.get("model") or "") for found in self.of_model if found is not None)
        return next(filter(None, names), "")

    def filled(self) -> dict[str, Any]:
        """The fields that say something, but for the label: tables do, empty texts and lists do not."""
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "label"}
        texts = (str, tuple, dict)
        return {
            name: value for name, value in own.items() if (value if isinstance(value, texts) else value is not None)
        }


def subjects_of(things: Iterable[object]) -> list[Subject]:
    """Objects as subjects. What follows a profile without being of its kind belongs to it: a diagnosis, path shares,
    spectra, the use of depth; a second one of a kind begins a new subject."""
    found: list[Subject] = []
    for thing in things:
        if isinstance(thing, Fixed):
            found += _before_and_after(thing)
            continue
        name = next((name for kind, name in _FIELDS.items() if isinstance(thing, kind)), "")
        if not name and not isinstance(thing, Subject):
            kinds = ", ".join(kind.__name__ for kind in (*_FIELDS, Fixed))
            raise ValueError(f"expected a folder, or one of {kinds}, got {thing!r}")
        part = thing if isinstance(thing, Subject) else Subject(**{name: thing})  # type: ignore[arg-type]
        before = found[-1].filled() if found and found[-1].label not in ("before", "after") else part.filled()
        if before.keys() & part.filled().keys():
            found.append(part)
        else:
            found[-1] = replace(found[-1], **part.filled())
    return named(list(map(judged, found)))


def _before_and_after(fixed: Fixed) -> list[Subject]:
    before, after = fixed.verdicts
    notes = (*fixed.notes, *([] if fixed.losses is None else [of_losses(*fixed.losses)]))
    subjects = [Subject("before", fixed.before, before, notes=notes)]
    return [*subjects, Subject("after", fixed.after, after)] if fixed.remedies else subjects


def of_losses(before: float, after: float) -> str:
    return f"The loss is {before:.4g} before the remedy and {after:.4g} with it."


def judged(subject: Subject) -> Subject:
    """With a verdict, if there is a profile to judge."""
    if subject.profile is None or subject.diagnosis is not None:
        return subject
    return replace(subject, diagnosis=diagnose(subject.profile))


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
