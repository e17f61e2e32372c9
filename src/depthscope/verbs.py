"""What can be done with a `Scope`: the public functions as its methods, with their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import update_wrapper
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import nn

import depthscope
from depthscope.discovery import Hints

if TYPE_CHECKING:
    import os
    from pathlib import Path

    import pandas as pd

    from depthscope.attention_paths import PathShares
    from depthscope.diagnosis import Fixed
    from depthscope.probing import Captured, Profile
    from depthscope.remedies import Recommendation, Remedy
    from depthscope.scope import Scope
    from depthscope.usage import DepthUse
    from depthscope.value_spectra import Spectra
    from depthscope.watching import Watch

F = TypeVar("F", bound=Callable[..., Any])


class _Verb:
    """A method that shows the options of a public function, which is imported when somebody asks for them."""

    def __init__(self, function: str, method: Callable[..., Any]):
        update_wrapper(self, method)
        self._function, self._method = function, method

    def __get__(self, scope: Verbs | None, _owner: type | None = None) -> Any:
        return self if scope is None else MethodType(self, scope)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._method(*args, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        own = inspect.signature(self._method)
        named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        settled = {"tokenizer", *Hints.__annotations__, *own.parameters}  # what a scope knows
        options = inspect.signature(getattr(depthscope, self._function)).parameters.values()
        return own.replace(
            parameters=[*named, *(p for p in options if p.kind is p.KEYWORD_ONLY and p.name not in settled)]
        )


def _with_options_of(function: str) -> Callable[[F], F]:
    def as_verb(method: F) -> F:
        return cast(F, _Verb(function, method))

    return as_verb


class Verbs:
    """The methods of a `Scope`. The functions have the options, and an example each."""

    def _for(self, inputs: Any = None) -> Scope:
        scope = cast("Scope", self)
        return scope if inputs is None else scope.on(inputs)

    @_with_options_of("probe")
    def probe(self, inputs: Any = None, **options: Any) -> Profile:
        """Measures the model block by block: `depthscope.probe`, with its options."""
        return depthscope.probe(self._for(inputs), **options)

    @_with_options_of("depth_use")
    def depth(self, inputs: Any = None, **options: Any) -> DepthUse:
        """How much of its depth the model uses: `depthscope.depth_use`, with its options."""
        return depthscope.depth_use(self._for(inputs), **options)

    @_with_options_of("paths")
    def paths(self, inputs: Any = None, **options: Any) -> PathShares:
        """The last block's output by the length of the paths that led there: `depthscope.paths`, with its options."""
        return depthscope.paths(self._for(inputs), **options)

    @_with_options_of("spectra")
    def spectra(self, **options: Any) -> Spectra:
        """The eigenvalues of W_V W_O, block by block: `depthscope.spectra`, with its options."""
        return depthscope.spectra(self._for(), **options)

    @_with_options_of("recommend")
    def recommend(self, inputs: Any = None, **options: Any) -> Recommendation:
        """Which remedies, with which numbers: `depthscope.recommend`, with its options."""
        return depthscope.recommend(self._for(inputs), **options)

    @_with_options_of("fix")
    def fix(self, inputs: Any = None, **options: Any) -> Fixed:
        """The model before and after its remedy: `depthscope.fix`, with its options."""
        return depthscope.fix(self._for(inputs), **options)

    @_with_options_of("skip_loss")
    def skip_loss(self, inputs: Any = None, **options: Any) -> pd.DataFrame:
        """What each block is worth to the loss: `depthscope.skip_loss`, with its options."""
        return depthscope.skip_loss(self._for(inputs), **options)

    def capture(
        self,
        stations: str | Sequence[str] = "output",
        blocks: int | Iterable[int] | None = None,
        inputs: Any = None,
    ) -> Captured:
        """The tokens themselves, of all blocks or those of these numbers: `depthscope.capture`."""
        return depthscope.capture(self._for(inputs), stations=stations, numbers=blocks)

    def ablate(self, *what: str | int | Iterable[int]) -> AbstractContextManager[nn.Module]:
        """The model without parts of its blocks, or without blocks: `depthscope.ablate`."""
        return depthscope.ablate(self._for(), *what)

    @_with_options_of("watch")
    def watch(self, every: int = 50, **options: Any) -> Watch:
        """Watches the model while it is trained: `depthscope.watch`, with its options."""
        return depthscope.watch(self._for().original, every, **options, **self._for().hints)

    def apply(self, *remedies: Remedy) -> nn.Module:
        """Puts remedies into the model, to stay: `depthscope.apply`."""
        return depthscope.apply(self._for(), *remedies)

    def remove(self) -> nn.Module:
        """Takes all remedies out of the model: `depthscope.remove`."""
        return depthscope.remove(self._for())

    def restore(self, weights: Any = None) -> nn.Module:
        """Puts the remedies back that the model's configuration records: `depthscope.restore`."""
        return depthscope.restore(self._for().model, weights)

    def report(self, target: str | os.PathLike[str], *things: Any, title: str = "") -> Path:
        """Writes one page about these things, or a fresh profile: `depthscope.write_report`."""
        return depthscope.write_report(target, *(things or (self.probe(),)), title=title)
