"""The gate of a watch: conditions that, held for some looks in a row, warn or ask that the training stops.

A *look* is one watched step. `decide` is the rule, a pure function of the looks so far; the gate keeps these and never
stops anything itself. A healthy model begins with tokens that are alike for a while, in its last block above all. So a
rule asks half of the blocks unless it names others, and says nothing before a grace period is over nor while the loss
falls. This was chosen on 14 recorded trainings and judged on 14 others: docs/probing.md, `scripts/gate_trainings.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from depthscope.conditions import Condition, Finding, find, parse_condition, station_of
from depthscope.measures import MEASURES
from depthscope.probing.roles import COHERENT, OF_GRADIENTS
from depthscope.watching.losses import Judgement, Losses

Means = Mapping[str, Mapping[str, Mapping[int, float]]]  # station → measure → block → mean over the batch
Rules = str | Sequence[str]

# Steps before which a rule says nothing, unless it has its own number ("after 500"): thrice the last step, 70, at which
# a small healthy training had tokens that were alike and, on its first plateau, a loss that did not fall.
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
_BEYOND = {">": "above", ">=": "at or above", "<": "below", "<=": "at or below"}
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
    where: str  # the block in words, and in how many blocks the rule holds
    meaning: str
    loss: str  # why it was no reason to wait
    checkpoint: Path | None = None  # the last good one: no later than `good`, where who trains keeps them
    knows_checkpoints: bool = False

    def __str__(self) -> str:
        value = "undefined (nan)" if math.isnan(self.value) else f"{self.value:.4g}"
        line = f"{self.rule} holds since step {self.since}; step {self.step}: {value} {self.where}: {self.meaning}; "
        line += "it held from the first look on" if self.good is None else f"at step {self.good} it did not hold"
        line += f"; {self.loss}"
        if self.checkpoint is not None:
            return f"{line}; the last good checkpoint is {self.checkpoint}"
        return f"{line}; no checkpoint was saved by then" if self.knows_checkpoints else line


class Look(NamedTuple):
    """One watched step, as a rule sees it."""

    step: int
    found: Finding | None  # where the rule holds; None: it does not
    loss: Judgement


def decide(rule: Condition, history: Sequence[Look], *, stops: bool = True) -> Alarm | None:
    """The alarm that a rule raises at the newest look of a history (the oldest first), or None.

    It has held for as many looks in a row as it asks for, the loss does not fall, and the grace period is over.
    """
    row = list(takewhile(lambda look: look.found is not None, reversed(history)))  # the newest first
    newest = history[-1]
    waits = newest.loss.falls or newest.step < (GRACE if rule.after is None else rule.after)
    if newest.found is None or len(row) < rule.looks or waits:
        return None
    good = history[-len(row) - 1].step if len(row) < len(history) else None
    value = newest.found.value
    if math.isnan(value):
        meaning = "it has no value there, and undefined counts as a violation"
    elif value >= _NEARLY and rule.measure in _NEARLY_ALIKE:
        meaning = _NEARLY_ALIKE[rule.measure]
    else:
        meaning = _MEANINGS.get(rule.measure, "beyond what you allowed")
    where = f"at block {newest.found.block}"
    if newest.found.asked > 1:
        beyond = f"{_BEYOND[rule.comparison]} {rule.threshold:.15g}"
        where += f", {newest.found.held} of {newest.found.asked} blocks {beyond}"
    since, words = row[-1].step, newest.loss.words
    return Alarm(
        str(rule), stops, rule.measure, newest.step, since, good, newest.found.block, value, where, meaning, words
    )


class Gate:
    """The rules of a watch, each with its looks: the last at which it did not hold, and all since."""

    def __init__(self, stop_if: Sequence[Condition], warn_if: Sequence[Condition], preferred: Sequence[str]):
        self._rules = [(rule, True) for rule in stop_if] + [(rule, False) for rule in warn_if]
        self._histories: list[list[Look]] = [[] for _ in self._rules]
        self._said: list[int | None] = [None] * len(self._rules)  # since when it held when an alarm was raised
        self._preferred = preferred
        self.losses = Losses()
        self.should_stop = False

    def __bool__(self) -> bool:
        return bool(self._rules)

    def see(self, step: int, means: Means, lasts: Sequence[int], *, late: bool = False) -> list[Alarm]:
        """One look: the alarms that it raises, each once while its rule holds. `lasts` are the last blocks of the
        model's parts; `late` are the measures of the backward pass, which come after all others of the step."""
        alarms, loss = [], self.losses.judge()
        for number, ((rule, stops), history) in enumerate(zip(self._rules, self._histories, strict=True)):
            if (rule.measure in OF_GRADIENTS) != late:
                continue
            # What enters block 1 stands at `output`, also where that station is not watched.
            there = [name for name, of in means.items() if any(of.get(rule.measure, {}).keys() - {0})]
            found = find(rule, means[station_of(rule, there, self._preferred)][rule.measure], lasts)
            if found is None:
                history.clear()
                self._said[number] = None
            history.append(Look(step, found, loss))
            alarm = decide(rule, history, stops=stops)
            if alarm is not None and self._said[number] != alarm.since:
                self._said[number] = alarm.since
                alarms.append(alarm)
        self.should_stop |= any(alarm.stops for alarm in alarms)
        return alarms

    @property
    def goods(self) -> list[int | None]:
        """For each rule the last look at which it did not hold: a checkpoint up to there is good by this rule."""
        return [next((look.step for look in history[:1] if look.found is None), None) for history in self._histories]

    def state(self) -> dict[str, Any]:
        """By rule the first look of those in a row at which it held, their number, and the last look at which it did
        not hold; and the losses: plain values."""
        counts = {}
        for (rule, stops), history, good in zip(self._rules, self._histories, self.goods, strict=True):
            row = history[good is not None :]
            counts[_key(rule, stops)] = [row[0].step if row else None, len(row), good]
        return {**counts, _LOSSES: self.losses.state()}

    @staticmethod
    def goods_in(state: Mapping[str, Any]) -> list[int | None]:
        """The steps of the last good checkpoints that a saved state names, one by rule."""
        return [count[2] for key, count in state.items() if key != _LOSSES]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state()`. A rule that is not in it begins anew; one that has fired fires again at its next
        look, if it still holds."""
        self._histories = [_history(state.get(_key(rule, stops), [None, 0, None])) for rule, stops in self._rules]
        self._said = [None] * len(self._rules)
        self.losses = Losses.of(state.get(_LOSSES))
        self.should_stop = False


_LOSSES = "losses"  # beside the rules


def _key(rule: Condition, stops: bool) -> str:
    return f"{'stop' if stops else 'warn'} if {rule}"


def _history(count: Any) -> list[Look]:
    """The looks that a rule's entry in `Gate.state()` stands for; ValueError if it is something else."""
    unknown = Judgement(False, "")
    try:
        since, looks, good = count
        if not all(step is None or (type(step) is int and step >= 0) for step in (since, good)):
            raise ValueError
        if type(looks) is not int or looks < 0 or (looks > 0) != (since is not None):
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(
            f"the state of the gate in the checkpoint is damaged: got {count!r}, expected "
            "[first look or null, looks in a row, last good look or null]"
        ) from None
    held = [Look(since, Finding(0, math.nan, ""), unknown)] * looks
    return held if good is None else [Look(good, None, unknown), *held]


def make_gate(
    stop_if: Rules | None,
    warn_if: Rules | None,
    measures: Sequence[str],
    watched: Iterable[str],
    preferred: Sequence[str] = ("output",),
) -> Gate:
    """The gate of a watch of these measures and stations; a rule that it could never decide is refused."""
    stations = frozenset(watched)
    parsed: list[list[Condition]] = []
    for option, rules in (("stop_if=", stop_if), ("warn_if=", warn_if)):
        texts = [rules] if isinstance(rules, str) else [] if rules is None else rules
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            example = '"token_similarity>0.99 for 3"'
            raise ValueError(f"expected {option} to be a rule such as {example} or a list of rules, got {rules!r}")
        parsed.append([parse_condition(text, measures, option, in_a_row=True) for text in texts])
        for rule in parsed[-1]:
            _require_station(option, rule, stations, preferred)
    return Gate(parsed[0], parsed[1], preferred)


def _require_station(option: str, rule: Condition, stations: frozenset[str], preferred: Sequence[str]) -> None:
    of_block = rule.measure in OF_GRADIENTS and rule.measure != COHERENT
    if of_block or (rule.measure in MEASURES and MEASURES[rule.measure].of == "block"):
        return
    if rule.measure == COHERENT or MEASURES[rule.measure].of == "branch":
        if rule.station is None:
            raise ValueError(f'{option} "{rule}": say at which branch, "at attention_branch" or "at ffn_branch"')
    elif rule.station is not None and rule.station not in stations:
        raise ValueError(f'{option} "{rule}" asks at {rule.station}, which is not watched: add it to stations=')
    elif rule.station is None and len(stations) > 1 and not stations & {*preferred}:
        raise ValueError(f'{option} "{rule}": say at which station, one of {", ".join(sorted(stations))}')
