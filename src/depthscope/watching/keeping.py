"""The last good checkpoint of a trainer that saves its own: found, and kept from the trainer's own tidying up."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

_PREFIX = "good-"


class Keeper:
    """Knows, for each look after which a rule may be found to hold, the newest checkpoint there was then.

    A trainer that keeps few checkpoints (`links`) removes it before the rule has held for long enough. So it is also
    linked as `good-NAME` beside it: hard links, which take no room while the trainer's own is there; a copy where the
    file system has none. What no alarm has named is removed at the end.
    """

    def __init__(self, *, links: bool, writes: bool = True):
        self._links, self._writes = links, writes  # only one process writes
        self._newest: dict[int, Path] = {}  # look → the newest checkpoint then
        self._linked: dict[Path, Path] = {}  # the trainer's → ours
        self._named: set[Path] = set()  # by alarms

    def look(self, step: int, newest: Path | None, goods: Sequence[int | None]) -> None:
        """After a look: the newest checkpoint there was before it, and for each rule the last look that was good."""
        if newest is not None:
            self._newest[step] = newest
        self._newest = {good: self._newest[good] for good in goods if good is not None and good in self._newest}
        if self._links:
            self._link({*self._newest.values()})

    def find(self, good: int | None) -> Path | None:
        """The checkpoint of an alarm whose last good look was this one."""
        found = None if good is None else self._newest.get(good)
        found = found if found is None else self._linked.get(found, found)
        if found is not None:
            self._named.add(found)
        return found

    def state(self) -> dict[str, str]:
        """By look, the newest checkpoint there was then, as plain values."""
        return {str(step): str(path) for step, path in self._newest.items()}

    def restore(self, state: Mapping[str, str]) -> None:
        """Goes on from `state()`; what is no longer there is forgotten, and ours counts where theirs is gone."""
        if not isinstance(state, Mapping) or not all(
            isinstance(step, str) and step.isdecimal() and isinstance(name, str) for step, name in state.items()
        ):
            raise ValueError(
                f"the good checkpoints in the checkpoint are damaged: expected paths by step, got {state!r}"
            )
        for step, name in state.items():
            theirs = Path(name)
            ours = theirs.with_name(_PREFIX + theirs.name)
            if self._links and ours.exists():
                self._linked[theirs] = ours
            if theirs.exists() or theirs in self._linked:
                self._newest[int(step)] = theirs

    def close(self) -> None:
        self._link(set())

    def _link(self, wanted: set[Path]) -> None:
        if not self._writes:
            return
        for theirs in [path for path in self._linked if path not in wanted]:
            if (ours := self._linked.pop(theirs)) not in self._named:
                _remove(ours)
        for theirs in wanted - self._linked.keys():
            try:
                self._linked[theirs] = _linked(theirs)
            except OSError as error:  # not worth a training run
                warnings.warn(f"the last good checkpoint {theirs} is not kept: {error}", stacklevel=2)


def _linked(path: Path) -> Path:
    """`good-NAME` beside a file or a folder, whole or not there."""
    target, scratch = path.with_name(_PREFIX + path.name), path.with_name(f".{_PREFIX}{path.name}")
    for old in (scratch, target):
        _remove(old)
    if path.is_dir():
        shutil.copytree(path, scratch, copy_function=_link_or_copy)
    else:
        _link_or_copy(str(path), str(scratch))
    scratch.rename(target)
    return target


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
