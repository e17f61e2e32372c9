"""The gate of a watch: conditions that, held for some looks in a row, warn or ask that the training stops.

A *look* is one watched step. The gate counts; it never stops anything itself. It counts, and says nothing, before a
grace period is over and while the loss falls: tokens that are alike for a while are how a healthy model begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from depthscope.conditions import Condition, Finding, find, parse_condition, station_of
from depthscope.measures import MEASURES
from depthscope.probing.roles import COHERENT, OF_GRADIENTS
from depthscope.watching.losses import Losses

Means = Mapping[str, Mapping[str, Mapping[int, float]]]  # station → measure → block → mean over the batch
Rules = str | Sequence[str]

# Steps before which a rule says nothing, unless it has its own number ("after 500"): thrice the last step, 70, at which
# one of 14 small healthy trainings had tokens that were alike and, on its first plateau, a loss that did not fall.
GRACE = 200

# What a number says, whatever a rule compares it with.
_MEANINGS = {
    "token_similarity": "at 1 the tokens of a sequence are equal",
    "cosine_similarity": "at 1 the tokens of a sequence point the same way",
    "direction_similarity": "at 1 the tokens of a sequence lie on one line",
    "token_diversity": "at 0 the tokens of a sequence are equal",
    "effective_rank": "how many directions the tokens of a sequence fill",
    "stable_rank": "at 1 the tokens of a sequence fill one direction",
    "angular_distance": "at 0 the block does not turn its tokens",
    "largest_token_share": "at 1 one token has all the energy, as an attention sink",
    "frobenius_norm": "the size of the tokens of a sequence",
    "queries_keys_gradient": "at 0 queries and keys do not learn, as where tokens are alike",
    COHERENT: "at 1 the weight learns from the tokens' mean alone",
    "escalation_rate": "above 1 the step makes the tokens of a sequence more alike",
}
_NEARLY = 0.99  # from here on a similarity is nearly 1
_NEARLY_ALIKE = {
    "token_similarity": "the tokens of a sequence are nearly equal, what follows can hardly tell them apart",
    "cosine_similarity": "the tokens of a sequence point nearly the same way, and differ in length alone",
    "direction_similarity": "the tokens of a sequence lie nearly on one line",
}


class DepthAlarm(UserWarning):
    """The warning of a watch whose `warn_if` or `stop_if` holds."""


@dataclass(frozen=True)
class Alarm:
    """A rule that has held for as many looks in a row as it asks for. `str(alarm)` is one line."""

    rule: str
    stops: bool  # a rule of `stop_if`
    measure: str
    step: int  # the look at which it was raised
    since: int  # the first look of those in a row
    good: int | None  # the look before that one, at which the rule did not hold; None: it held from the first look on
    block: int
    value: float
    where: str  # the block in words
    meaning: str
    loss: str  # why it was no reason to wait
    checkpoint: Path | None = None  # the last good one: no later than `good`, where who trains keeps them
    knows_checkpoints: bool = False

    def __str__(self) -> str:
        value = "undefined (nan)" if math.isnan(self.value) else f"{self.value:.4g}"
        now = "" if self.step == self.since else f", seen in a row until step {self.step}"
        line = f"{self.rule} holds since step {self.since}{now}: {value} {self.where}: {self.meaning}; "
        line += "it held from the first look on" if self.good is None else f"at step {self.good} it did not hold"
        line += f"; {self.loss}"
        if self.checkpoint is not None:
            return f"{line}; the last good checkpoint is {self.checkpoint}"
        return f"{line}; no checkpoint was saved by then" if self.knows_checkpoints else line


@dataclass
class Count:
    """How long a rule has held."""

    since: int | None = None  # the first look in a row
    looks: int = 0  # in a row
    good: int | None = None  # the last look at which it did not hold
    said: bool = False  # an alarm was raised; not raised twice

    def see(self, step: int, holds: bool) -> None:
        if not holds:
            self.since, self.looks, self.good, self.said = None, 0, step, False
            return
        if self.since is None:
            self.since = step
        self.looks += 1


class Gate:
    """The rules of a watch with their counts."""

    def __init__(self, stop_if: Sequence[Condition], warn_if: Sequence[Condition], preferred: Sequence[str]):
        self._rules = [(rule, True) for rule in stop_if] + [(rule, False) for rule in warn_if]
        self._counts = [Count() for _ in self._rules]
        self._preferred = preferred
        self.losses = Losses()
        self.should_stop = False

    def __bool__(self) -> bool:
        return bool(self._rules)

    def see(self, step: int, means: Means, lasts: Sequence[int], *, late: bool = False) -> list[Alarm]:
        """One look: the alarms that it raises. `lasts` are the last blocks of the model's parts; `late` are the
        measures of the backward pass, which come after all others of the step."""
        alarms, falls, loss = [], *self.losses.judge()
        for (rule, stops), count in zip(self._rules, self._counts, strict=True):
            if (rule.measure in OF_GRADIENTS) != late:
                continue
            found = _find(rule, means, lasts, self._preferred)
            count.see(step, found is not None)
            waits = falls or step < (GRACE if rule.after is None else rule.after)
            if found is not None and count.looks >= rule.looks and not count.said and not waits:
                count.said = True
                alarms.append(_alarm(rule, stops, step, count, found, loss))
        self.should_stop |= any(alarm.stops for alarm in alarms)
        return alarms

    @property
    def goods(self) -> list[int | None]:
        """For each rule the last look at which it did not hold: a checkpoint up to there is good by this rule."""
        return [count.good for count in self._counts]

    def state(self) -> dict[str, Any]:
        """The counts as plain values, by rule, and the losses."""
        counts = {
            _key(rule, stops): [count.since, count.looks, count.good]
            for (rule, stops), count in zip(self._rules, self._counts, strict=True)
        }
        return {**counts, _LOSSES: self.losses.state()}

    @staticmethod
    def goods_in(state: Mapping[str, Any]) -> list[int | None]:
        """The steps of the last good checkpoints that a saved state names, one by rule."""
        return [count[2] for key, count in state.items() if key != _LOSSES]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Counts on from `state()`. A rule that is not in it begins anew; one that has fired fires again at its next
        look, if it still holds."""
        self._counts = [_count(state, _key(rule, stops)) for rule, stops in self._rules]
        self.losses = Losses.of(state.get(_LOSSES))
        self.should_stop = False


def make_gate(
    stop_if: Rules | None,
    warn_if: Rules | None,
    measures: Sequence[str],
    watched: Iterable[str],
    preferred: Sequence[str] = ("output",),
) -> Gate:
    """The gate of a watch of these measures and stations; a rule that it could never decide is refused."""
    stations = frozenset(watched)
    rules = {
        name: [parse_condition(text, measures, f"{name}=", in_a_row=True) for text in _texts(name, given)]
        for name, given in (("stop_if", stop_if), ("warn_if", warn_if))
    }
    for name, conditions in rules.items():
        for rule in conditions:
            _require_station(f"{name}=", rule, stations, preferred)
    return Gate(rules["stop_if"], rules["warn_if"], preferred)


def _texts(name: str, given: object) -> list[str]:
    if given is None:
        return []
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        example = '"token_similarity>0.99 for 3"'
        raise ValueError(f"expected {name}= to be a rule such as {example} or a list of rules, got {given!r}")
    return list(texts)


def _require_station(option: str, rule: Condition, stations: frozenset[str], preferred: Sequence[str]) -> None:
    kind = _kind_of(rule.measure)
    if kind == "branch":
        if rule.station is None:
            raise ValueError(f'{option} "{rule}": say at which branch, "at attention_branch" or "at ffn_branch"')
    elif kind != "block" and rule.station is not None and rule.station not in stations:
        raise ValueError(f'{option} "{rule}" asks at {rule.station}, which is not watched: add it to stations=')
    elif kind != "block" and rule.station is None and len(stations) > 1 and not stations & {*preferred}:
        raise ValueError(f'{option} "{rule}": say at which station, one of {", ".join(sorted(stations))}')


def _kind_of(measure: str) -> str:
    if measure in OF_GRADIENTS:
        return "branch" if measure == COHERENT else "block"
    return MEASURES[measure].of


def _find(rule: Condition, means: Means, lasts: Sequence[int], preferred: Sequence[str]) -> Finding | None:
    # What enters block 1 stands at `output`, also where that station is not watched.
    there = [name for name, of_station in means.items() if any(of_station.get(rule.measure, {}).keys() - {0})]
    return find(rule, means[station_of(rule, there, preferred)][rule.measure], lasts)


def _alarm(rule: Condition, stops: bool, step: int, count: Count, found: Finding, loss: str) -> Alarm:
    assert count.since is not None
    if math.isnan(found.value):
        meaning = "it has no value there, and undefined counts as a violation"
    elif found.value >= _NEARLY and rule.measure in _NEARLY_ALIKE:
        meaning = _NEARLY_ALIKE[rule.measure]
    else:
        meaning = _MEANINGS.get(rule.measure, "beyond what you allowed")
    since, good = count.since, count.good
    return Alarm(
        str(rule), stops, rule.measure, step, since, good, found.block, found.value, found.where, meaning, loss
    )


def at_checkpoint(alarm: Alarm, checkpoint: Path | None) -> Alarm:
    """The alarm of a training that keeps checkpoints: the last good one, or that there is none."""
    return replace(alarm, checkpoint=checkpoint, knows_checkpoints=True)


_LOSSES = "losses"  # beside the rules


def _key(rule: Condition, stops: bool) -> str:
    return f"{'stop' if stops else 'warn'} if {rule}"


def _count(state: object, key: str) -> Count:
    """That of a rule in `Gate.state()`; ValueError if it is something else: a count must not be guessed."""
    if not isinstance(state, Mapping):
        raise ValueError(f"the state of the gate in the checkpoint is damaged: expected counts by rule, got {state!r}")
    found = state.get(key, [None, 0, None])
    if not isinstance(found, list | tuple) or len(found) != 3 or not _is_count(*found):
        raise ValueError(
            f'the state of the gate in the checkpoint is damaged: "{key}" has {found!r}, expected [first look or null, '
            "looks in a row, last good look or null]"
        )
    return Count(*found)


def _is_count(since: object, looks: object, good: object) -> bool:
    steps = all(step is None or (type(step) is int and step >= 0) for step in (since, good))
    return steps and type(looks) is int and looks >= 0 and (looks > 0) == (since is not None)
