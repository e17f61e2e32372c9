"""Chains of module calls in a pass: what one call returns enters the next.

A *passage* is one call of a module with the tokens that enter it and the tokens of the same shape that leave it. Two
passages are linked if what leaves the first enters the second, unchanged or after something else that stands between
(a norm, a change of the resolution). That something else may read nothing older than what the first one returned: else
the first one is a branch, and the trunk passes by it. Where whoever calls a module adds what it returns to what it was
given, the sum is what leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby, islice, pairwise
from typing import NamedTuple

from depthscope.anatomy.unknown import Ends
from depthscope.discovery.tracing import Call, Passed, States

BETWEEN = 500  # states that may lie between two calls of a chain; whoever reads the past by another way finds more


class Passage(NamedTuple):
    """One call of a module, and where the tokens enter and leave it."""

    call: Call
    entrance: Passed
    exit: Passed
    state: int  # of what leaves
    added: bool  # what leaves is the sum of what was given and what was returned

    @property
    def ends(self) -> Ends:
        return Ends(self.entrance.path, self.exit.path, self.added)


Chain = tuple[Passage, ...]


class Links:
    """The passages of some calls, in the order of time, and which of them follow each other."""

    def __init__(self, calls: Sequence[Call], states: States, axes: tuple[int, ...], returned: Sequence[Passed]):
        self.states = states
        self.returned = returned  # by the model
        self.axes = axes
        sums = {parts: state for state, parts in states.sums.items()}
        self.passages = {id(call): _passages(call, sums, axes) for call in calls}
        self.calls = [call for call in calls if self.passages[id(call)]]
        self._older: dict[int, frozenset[int]] = {}

    def before(self, entrance: Passed, among: Sequence[Passage]) -> list[Passage]:
        """The passages from which these tokens come, with nothing older beside them."""
        if entrance.state is None:
            return []
        stops = frozenset(passage.state for passage in among)
        walked = set(islice(self.states.walk(entrance.state, stops), BETWEEN + 1))
        if len(walked) > BETWEEN:
            return []
        return [
            passage
            for passage in among
            if passage.state in walked and len(passage.exit.shape) == len(entrance.shape)
            if not (walked - {passage.state}) & self._older_than(passage)
        ]

    def follow_each_other(self, first: Passage, call: Call, entrance: Passed) -> bool:
        """Blocks of one class are entered in one way: what enters as a context, a decoder's say, is another trunk's."""
        return type(first.call.module) is not type(call.module) or first.entrance.path == entrance.path

    def _older_than(self, passage: Passage) -> frozenset[int]:
        """The states of the trunk's size that led to what entered a call; windows of it have another shape."""
        start, size = passage.entrance.state, passage.entrance.shape.numel()
        if start is None:
            return frozenset()
        if start not in self._older:
            walked = self.states.walk(start)
            self._older[start] = frozenset(s for s in walked if self.states.sizes[s] == size)
        return self._older[start]

    def longest(self, calls: Sequence[Call], used: frozenset[tuple[Call, Passed]] = frozenset()) -> Chain:
        """The longest chain of these calls, and among equals the one with the most tokens that are passed on unchanged.

        `used` has what enters and leaves calls in chains that are known already.
        """
        best: dict[Passage, tuple[int, int, Passage | None]] = {}
        for call in calls:
            earlier = list(best)
            free = [p for p in self.passages[id(call)] if not {(call, p.entrance), (call, p.exit)} & used]
            for entrance in dict.fromkeys(passage.entrance for passage in free):
                linked = [p for p in self.before(entrance, earlier) if self.follow_each_other(p, call, entrance)]
                reached = [_after(passage, best[passage], entrance) for passage in linked]
                length, same, previous = max(reached, key=_merit(entrance), default=(1, 0, None))
                for passage in free:
                    if passage.entrance == entrance:
                        best[passage] = (length, same, previous)
        last = self._last({passage: (reached[:2], reached[2]) for passage, reached in best.items()})
        if last is None:
            return ()
        chain = [last]
        while (previous := best[chain[-1]][2]) is not None:
            chain.append(previous)
        return tuple(reversed(chain))

    def _last(self, reached: dict[Passage, tuple[tuple[int, int], Passage | None]]) -> Passage | None:
        """The end of the longest chain. What leaves it must lead to what the model returns, with nothing older beside
        it, or leave as it leaves the call before: else it may be a branch."""
        for _, group in groupby(sorted(reached, key=lambda p: reached[p][0], reverse=True), lambda p: reached[p][0]):
            judged = [(self._leads_out(p), _like(p, reached[p][1]), p) for p in group]
            if good := [one for one in judged if one[0] or all(one[1])]:
                return max(good, key=lambda one: one[:2])[2]
        return None

    def _leads_out(self, passage: Passage) -> bool:
        return any(self.before(replace(o, shape=passage.exit.shape), [passage]) for o in self.returned)

    def all_chains(self, calls: Sequence[Call]) -> list[Chain]:
        """Chains of at least two calls, the longest first; a call with two streams may be in two of them."""
        found: list[Chain] = []
        used: frozenset[tuple[Call, Passed]] = frozenset()
        while len(chain := self.longest(calls, used)) > 1:
            found.append(chain)
            used |= {(p.call, passed) for p in chain for passed in (p.entrance, p.exit)}
        return found

    def filled(self, chain: Chain, others: Sequence[Call], akin: Callable[[Call, Chain], bool]) -> Chain:
        """The chain with the other calls through which its tokens pass on their way, and at its ends those that are
        akin to it."""
        passages = [p for call in others for p in self.passages.get(id(call), ())]
        whole: Chain = chain[:1]
        for first, second in pairwise(chain):
            between = [p for p in passages if first.call.number < p.call.number < second.call.number]
            whole = (*whole, *self._way(first, second, between), second)
        at_ends = [p for p in passages if akin(p.call, whole)]
        whole = (*self._way(None, chain[0], at_ends), *whole)
        while following := self._following(whole[-1], at_ends):
            whole = (*whole, following)
        return whole

    def _following(self, last: Passage, at_ends: list[Passage]) -> Passage | None:
        later = [p for p in at_ends if p.call.number > last.call.number and p.call is not last.call]
        next_ones = [
            p
            for p in later
            if last in self.before(p.entrance, [last, *later]) and self.follow_each_other(last, p.call, p.entrance)
        ]
        return max(next_ones, key=lambda passage: (self._leads_out(passage), _like(passage, last)), default=None)

    def _way(self, first: Passage | None, second: Passage, between: list[Passage]) -> Chain:
        """The passages that lead to the second one; from the first one, if there is one."""
        starts = [] if first is None else [first]
        earlier = [p for p in between if p.call.number < second.call.number and p.call is not second.call]
        for passage in self.before(second.entrance, [*starts, *earlier]):
            if passage is not first and self.follow_each_other(passage, second.call, second.entrance):
                way = self._way(first, passage, earlier)
                if way or first is None or first in self.before(passage.entrance, [first]):
                    return (*way, passage)
        return ()


def _passages(call: Call, sums: dict[frozenset[int], int], axes: tuple[int, ...]) -> tuple[Passage, ...]:
    found = []
    for entrance in call.entered:
        for leaves in call.left:
            if leaves.state is None or leaves.state == entrance.state:
                continue
            if entrance.shape == leaves.shape and len(entrance.shape) in axes:
                found.append(Passage(call, entrance, leaves, leaves.state, False))
                total = None if entrance.state is None else sums.get(frozenset({entrance.state, leaves.state}))
                if total is not None and entrance.path[0] == 0:  # a hook after a call sees no arguments with names
                    found.append(Passage(call, entrance, leaves, total, True))
    return tuple(found)


def _after(passage: Passage, reached: tuple[int, int, Passage | None], entrance: Passed) -> tuple[int, int, Passage]:
    return reached[0] + 1, reached[1] + (entrance.state == passage.state), passage


def _merit(entrance: Passed) -> Callable[[tuple[int, int, Passage]], tuple[int, int, bool]]:
    return lambda reached: (reached[0], reached[1], reached[2].entrance.path == entrance.path)


def _like(passage: Passage, other: Passage | None) -> tuple[bool, bool]:
    """Where there is a choice, tokens leave a module as they leave the one before."""
    return (
        other is not None and passage.added == other.added,
        other is not None and passage.exit.path == other.exit.path,
    )
