"""Open sets: measures, families, remedies, studies and recipes by name, ours and those of other packages.

Another package adds to a set in one of two ways. Code that runs calls `register`. An installed package names an entry
point in the set's group (`depthscope.measures`, …); the entry point is loaded when the set is first asked for something
that is not ours, or for all of it. Two things of one name are refused, and both owners are named.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from depthscope.naming import unknown_name

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A set of things by name, in the order in which they were added.

    `kind` is the word for one of them in messages, `group` the entry-point group that other packages use,
    `name_of` reads the name of a thing (None: `__name__`), and `check` refuses, with a ValueError, what does not belong
    into the set.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        ours: Iterable[T] = (),
        *,
        name_of: Callable[[T], str] | None = lambda thing: getattr(thing, "name", ""),
        check: Callable[[T], None] = lambda _thing: None,
    ):
        self.kind, self.group = kind, group
        self._name_of, self._check = name_of, check
        self.version = 0  # counts changes, for whoever remembers answers of the set
        self._things: dict[str, T] = {}
        self._owners: dict[str, str] = {}
        self._searched = False
        for thing in ours:
            self.register(thing, owner="depthscope")

    def register(self, thing: T, *, owner: str | None = None) -> T:
        """Adds a thing and returns it. `owner` names its package in messages; by default that of the calling code."""
        name = self._name(thing)
        owner = owner or str(sys._getframe(1).f_globals.get("__name__", "")).split(".")[0]
        if name in self._things:
            if self._things[name] is thing:
                return thing
            raise ValueError(f"the {self.kind} {name!r} exists twice: one of {self._owners[name]}, one of {owner}")
        self._things[name], self._owners[name] = thing, owner
        self.version += 1
        return thing

    def _name(self, thing: T) -> str:
        """The name of a thing that belongs into the set; a ValueError if it does not."""
        self._check(thing)
        name = getattr(thing, "__name__", None) if self._name_of is None else self._name_of(thing)
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"expected a {self.kind} with a name, got {thing!r}")
        return name

    def unregister(self, name: str) -> None:
        """Takes out what `register` added."""
        del self._things[name], self._owners[name]
        self.version += 1

    def ours(self) -> list[str]:
        """The names that depthscope itself has; nothing is loaded for them."""
        return [name for name, owner in self._owners.items() if owner == "depthscope"]

    def owner(self, name: str) -> str:
        """The package that a thing comes from."""
        self[name]
        return self._owners[name]

    def __getitem__(self, name: str) -> T:
        """The thing of this name; a ValueError (not a KeyError) names what exists."""
        if name not in self:
            raise unknown_name(self.kind, name, self._things)
        return self._things[name]

    def __contains__(self, name: object) -> bool:
        if name not in self._things:
            self._search()
        return name in self._things

    def __iter__(self) -> Iterator[str]:
        self._search()
        return iter(self._things)

    def __len__(self) -> int:
        self._search()
        return len(self._things)

    def get(self, name: str, default: Any = None) -> Any:
        """The thing of this name, or the default."""
        if name not in self:
            return default
        return self[name]

    def _search(self) -> None:
        """Loads, once, what installed packages add. A package that is broken is left out, with a warning."""
        if self._searched:
            return
        self._searched = True  # before: what is loaded may ask for this set
        try:
            for point in entry_points(group=self.group):
                owner = point.dist.name if point.dist is not None else point.module.split(".")[0]
                why = ""
                try:
                    found = point.load()
                except Exception as error:
                    found, why = [], f"cannot be loaded ({type(error).__name__}: {error})"
                for thing in found if isinstance(found, list | tuple) else [found]:
                    try:
                        self._name(thing)
                    except (ValueError, AttributeError, TypeError) as error:
                        why = f"is no {self.kind}: {error}"
                    else:
                        self.register(thing, owner=owner)
                if why:
                    what = f"{owner} offers {point.name!r} in {self.group}, and {point.value} {why}"
                    warnings.warn(f"{what}; depthscope goes on without it", stacklevel=2)
        except BaseException:
            self._searched = False  # the next question gets the same answer, not half a set
            raise
