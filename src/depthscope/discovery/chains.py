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

AXES = (2, 3, 4)  # of a token matrix (n, d), with a batch, and of a map of features (batch, height, width, d)
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
Used = frozenset[tuple[Call, Passed]]


class Links:
    """The passages of some calls, in the order of time, and which of them follow each other."""

    def __init__(self, calls: Sequence[Call], states: States, returned: Sequence[Passed], injected: bool = False):
        self.states = states
        self.returned = returned  # by the model
        sums = {parts: state for state, parts in states.sums.items()}
        self.passages = {id(call): _passages(call, sums) for call in calls}
        self.calls = [call for call in calls if self.passages[id(call)]]
        self._older: dict[int, frozenset[int]] = {}
        # What enters the first call may be mixed again with what enters all others (x ← λx + μx₀).
        first = self.passages[id(self.calls[0])] if injected and self.calls else ()
        self.injected = frozenset[int]().union(*map(self._older_than, first))

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
            if not (walked - {passage.state} - self.injected) & self._older_than(passage)
        ]

    def _older_than(self, passage: Passage) -> frozenset[int]:
        """The states of the trunk's size that led to what entered a call; windows of it have another shape."""
        start, size = passage.entrance.state, passage.entrance.shape.numel()
        if start is None:
            return frozenset()
        if start not in self._older:
            walked = self.states.walk(start)
            self._older[start] = frozenset(s for s in walked if self.states.sizes[s] == size)
        return self._older[start]

    def _leads_out(self, passage: Passage) -> bool:
        return any(self.before(replace(o, shape=passage.exit.shape), [passage]) for o in self.returned)

    def all_chains(self, calls: Sequence[Call]) -> list[Chain]:
        """Chains of at least two calls, the longest first; a call with two streams may be in two of them."""
        found: list[Chain] = []
        used: Used = frozenset()
        while len(chain := self._longest(calls, used)) > 1:
            found.append(chain)
            used |= {(p.call, passed) for p in chain for passed in (p.entrance, p.exit)}
        return found

    def _longest(self, calls: Sequence[Call], used: Used) -> Chain:
        """The longest chain of these calls, and among equals the one with the most tokens that are passed on unchanged.

        `used` has what enters and leaves calls in chains that are known already. What leaves the last call must lead to
        what the model returns, with nothing older beside it, or leave as it leaves the call before: else it may be a
        branch.
        """
        length: dict[Passage, tuple[int, int]] = {}
        previous: dict[Passage, Passage | None] = {}
        for call in calls:
            earlier = list(length)
            free = [p for p in self.passages[id(call)] if not {(call, p.entrance), (call, p.exit)} & used]
            for entrance in dict.fromkeys(passage.entrance for passage in free):
                ways = [
                    (length[p][0] + 1, length[p][1] + (entrance.state == p.state), p.entrance.path == entrance.path, p)
                    for p in self.before(entrance, earlier)
                    if _may_follow(p, call, entrance)
                ]
                best = max(ways, key=lambda way: way[:3], default=(1, 0, False, None))
                for passage in free:
                    if passage.entrance == entrance:
                        length[passage], previous[passage] = best[:2], best[3]
        last = None
        for _, group in groupby(sorted(length, key=lambda p: length[p], reverse=True), lambda p: length[p]):
            judged = [(self._leads_out(p), _like(p, previous[p]), p) for p in group]
            if good := [one for one in judged if one[0] or all(one[1])]:
                last = max(good, key=lambda one: one[:2])[2]
                break
        chain: list[Passage] = []
        while last is not None:
            chain.append(last)
            last = previous[last]
        return tuple(reversed(chain))

    def filled(self, chain: Chain, others: Sequence[Call], list_of: Callable[[Call], str]) -> Chain:
        """The chain with the other calls through which its tokens pass on their way, and at its ends those of its
        classes or of its lists of modules."""
        passages = [p for call in others for p in self.passages.get(id(call), ())]
        whole: Chain = chain[:1]
        for first, second in pairwise(chain):
            between = [p for p in passages if first.call.number < p.call.number < second.call.number]
            whole = (*whole, *self._way(first, second, between), second)
        kinds, lists = {type(p.call.module) for p in whole}, {list_of(p.call) for p in whole} - {""}
        at_ends = [p for p in passages if type(p.call.module) in kinds or list_of(p.call) in lists]
        whole = (*self._way(None, chain[0], at_ends), *whole)
        while True:
            last = whole[-1]
            later = [p for p in at_ends if p.call.number > last.call.number]
            following = [
                p
                for p in later
                if _may_follow(last, p.call, p.entrance) and last in self.before(p.entrance, [last, *later])
            ]
            if not following:
                return whole
            judged = [(self._leads_out(p), _like(p, last), p) for p in following]
            whole = (*whole, max(judged, key=lambda one: one[:2])[2])

    def _way(self, first: Passage | None, second: Passage, between: list[Passage]) -> Chain:
        """The passages that lead to the second one; from the first one, if there is one."""
        starts = [] if first is None else [first]
        earlier = [p for p in between if p.call.number < second.call.number]
        for passage in self.before(second.entrance, [*starts, *earlier]):
            if passage is not first and _may_follow(passage, second.call, second.entrance):
                way = self._way(first, passage, earlier)
                if way or first is None or first in self.before(passage.entrance, [first]):
                    return (*way, passage)
        return ()


def _may_follow(first: Passage, call: Call, entrance: Passed) -> bool:
    """Blocks of one class are entered in one way: what enters as a context, a decoder's say, is another trunk's."""
    return type(first.call.module) is not type(call.module) or first.entrance.path == entrance.path


def _like(passage: Passage, other: Passage | None) -> tuple[bool, bool]:
    """Where there is a choice, tokens leave a module as they leave the one before."""
    if other is None:
        return False, False
    return passage.added == other.added, passage.exit.path == other.exit.path


def _passages(call: Call, sums: dict[frozenset[int], int]) -> tuple[Passage, ...]:
    found = []
    shortest = {p.state: len(p.path) for p in sorted(call.left, key=lambda p: -len(p.path))}  # one may leave twice
    for entrance in call.entered:
        for leaves in call.left:
            if leaves.state is None or leaves.state == entrance.state or len(leaves.path) > shortest[leaves.state]:
                continue
            if entrance.shape == leaves.shape and len(entrance.shape) in AXES:
                found.append(Passage(call, entrance, leaves, leaves.state, False))
                total = None if entrance.state is None else sums.get(frozenset({entrance.state, leaves.state}))
                if total is not None and entrance.path[0] == 0:  # a hook after a call sees no arguments with names
                    found.append(Passage(call, entrance, leaves, total, True))
    return tuple(found)
