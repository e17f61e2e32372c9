"""What a measure gets: only what its record says that it needs. Anything else is an error, not another number."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor

from depthscope.measures.norms import TokenNorms
from depthscope.measures.operators import AttentionOperator, DenseAttention
from depthscope.measures.similarity import directions_without_outliers
from depthscope.measures.sweeps import Survey, survey
from depthscope.measures.tokens import TokenMatrix

T = TypeVar("T")


class MissingNeed(LookupError):
    """A measure has asked for something that its record does not say it needs."""

    def __init__(self, what: str, known: Iterable[str]):
        super().__init__(f"{what!r} was not computed: add it to the measure's needs ({', '.join(known) or 'none'} now)")


class Parts:
    """Some parts by name; a part that is a function is computed once, when it is asked for."""

    def __init__(self, parts: dict[str, Any], shared: dict[Any, Any] | None = None):
        self.parts = parts
        self._shared: dict[Any, Any] = {} if shared is None else shared

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "parts":
            raise AttributeError(name)
        if name not in self.parts:
            raise MissingNeed(name, self.parts)
        if callable(self.parts[name]):
            return self._once(name, self.parts[name])
        return self.parts[name]

    def _once(self, key: Any, compute: Callable[[], T]) -> T:
        if key not in self._shared:
            self._shared[key] = compute()
        found: T = self._shared[key]
        return found


class Summary(Parts):
    """What is kept of the tokens at a station after they have passed; over the stations of a pass, (stations, batch).

    | part           | what it is                                          |
    | -------------- | --------------------------------------------------- |
    | `norms`        | `TokenNorms` of the tokens                          |
    | `directions`   | `TokenNorms` of the unit tokens                     |
    | `ordinary`     | `TokenNorms` of the unit tokens without outliers    |
    | `largest_norm` | the norm of the largest token                       |
    | `outliers`     | how many tokens are outliers                        |
    """

    def only(self, needs: frozenset[str]) -> Summary:
        """The parts that a measure has declared; an undeclared one cannot be read, whoever else needs it."""
        return Summary({name: part for name, part in self.parts.items() if name in needs})


# Part → how it is taken from the tokens that are measured, and from all tokens, outliers included.
PARTS: dict[str, Callable[[TokenMatrix, TokenMatrix], TokenNorms | Tensor]] = {
    "norms": lambda x, _found: x.norms,
    "directions": lambda x, _found: x.directions.norms,
    "ordinary": lambda x, _found: directions_without_outliers(x),
    "largest_norm": lambda x, _found: x.largest_norm,
    "outliers": lambda _x, found: found.outliers.sum(dim=-1).double(),
}
OF_OUTLIERS = frozenset({"ordinary", "outliers", "sinks"})  # needs for which outlier tokens must be found
HEAD_PARTS = frozenset({"attention", "matrix", "tokens", "real", "sinks", "values", "scores"})


class HeadInput(Parts):
    """One head of one block. What several measures share (`once`) is computed once.

    | part        | what it is                                                                     |
    | ----------- | ------------------------------------------------------------------------------ |
    | `attention` | P as an operator: `@`, `.dense()`                                              |
    | `matrix`    | P itself, (batch, n, m)                                                        |
    | `tokens`    | the `TokenMatrix` that attention reads                                         |
    | `real`      | (batch, n) true for real tokens; None: all are                                 |
    | `sinks`     | (batch, n) true for the outlier tokens that entered the block                  |
    | `values`    | (batch, m, d_v), the values that P is applied to                               |
    | `scores`    | (batch, n, m), what an eager softmax read; None: `attention` makes them        |

    With `attention` come `dense`, its matrix, and `survey`: what one sweep over its rows finds out.
    """

    @property
    def attention(self) -> AttentionOperator:
        alone = "matrix" in self.parts and "attention" not in self.parts
        return DenseAttention(self.matrix) if alone else self.__getattr__("attention")

    @property
    def dense(self) -> Tensor:
        """The matrix of `attention`, made once."""
        return self._once("dense", self.attention.dense)

    @property
    def survey(self) -> Survey | None:
        """What one sweep over the rows finds out, shared by all measures of a head; None where a matrix can be had."""
        attention = self.attention
        return self._once("survey", lambda: survey(attention, self.real)) if attention.is_streamed else None

    def once(self, compute: Callable[[HeadInput], T]) -> T:
        """compute(self), computed once: for what several measures share."""
        # What one measure computed from more than another has is not shared.
        return self._once((compute, frozenset(self.parts)), lambda: compute(self))

    def only(self, needs: frozenset[str]) -> HeadInput:
        """The parts that a measure has declared, and the mask."""
        source = {"matrix"} if "attention" in needs and "attention" not in self.parts else set()  # a matrix is enough
        kept = {name: make for name, make in self.parts.items() if name in needs | source | {"real"}}
        return HeadInput(kept, self._shared)

    def has(self, needs: frozenset[str]) -> bool:
        """Whether all of these can be had."""
        return needs <= self.parts.keys()
