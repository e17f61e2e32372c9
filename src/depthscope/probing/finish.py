"""Stage two: what the looks of a pass say, for all stations and blocks together, in float64, with one transfer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthscope.measures import PARTS, Bounded, Measure, Summary, TokenNorms
from depthscope.measures.norms import mean_is_lost, times_power_of_two
from depthscope.measures.tokens import are_outliers, ratios_to_median
from depthscope.probing.readings import Reading, check_shape
from depthscope.probing.station import Look, safe_norms

# The numbers of a look, each (batch,): three of every `TokenNorms`.
FIELDS = (
    *("norms.count", "norms.mean_norm", "norms.deviation_norm"),
    *("directions.count", "directions.mean_norm", "directions.deviation_norm"),
    *("ordinary.count", "ordinary.mean_norm", "ordinary.deviation_norm"),
    "largest_norm",
    "outliers",
    "turn",  # the mean angle to the tokens that entered the block, in radians; nan where there was nothing to compare
    "doubt",  # 1 where a wide look may say something else
    "unexpected",  # 1 where there are outliers that the look was not told of
)
TOGETHER = 32  # looks whose vectors are kept at a time: memory must not grow with depth


class Looks:
    """All looks of one kind in a pass, finished a few dozen at a time."""

    def __init__(self, look: Look) -> None:
        self.tokens, self.epsilon, self.batch = look.shape[1], look.epsilon, look.shape[0]
        self._waiting: list[Look] = []
        self._done: list[Tensor] = []  # (fields, looks, batch)
        self._count = 0
        self._numbers = torch.empty(0)  # (fields, looks, batch), on the host, once they have been fetched
        self.fields: dict[str, Tensor] = {}  # the same by name

    def add(self, look: Look) -> int:
        """Its number among them."""
        self._waiting.append(look)
        if len(self._waiting) == TOGETHER:
            self._finish()
        self._count += 1
        return self._count - 1

    def _finish(self) -> None:
        self._done.append(numbers_of(self._waiting))
        for look in self._waiting:
            look.forget()
        self._waiting = []

    def numbers(self) -> Tensor:
        """(fields, looks, batch), where the tokens were."""
        if self._waiting:
            self._finish()
        return torch.cat(self._done, dim=1)

    def read(self, numbers: Tensor) -> None:
        """Takes what has come to the host."""
        self._numbers = numbers.reshape(len(FIELDS), self._count, self.batch)
        self.fields = dict(zip(FIELDS, self._numbers, strict=True))

    def norms(self, places: list[int], of: str = "norms") -> TokenNorms:
        """Of these looks, each quantity (looks, batch)."""
        return self._norms(self._numbers[:, places], of)

    def summary(self, places: list[int]) -> Summary:
        """All parts of these looks."""
        chosen = self._numbers[:, places]
        return Summary(
            {name: chosen[FIELDS.index(name)] if name in FIELDS else self._norms(chosen, name) for name in PARTS}
        )

    def _norms(self, numbers: Tensor, of: str) -> TokenNorms:
        first = FIELDS.index(f"{of}.count")
        count, mean_norm, deviation_norm = numbers[first : first + 3]
        return TokenNorms(self.tokens, count, mean_norm, deviation_norm, self.epsilon)


def numbers_of(looks: list[Look]) -> Tensor:
    """The fields of looks of one kind, float64, (fields, looks, batch)."""
    one = looks[0]

    def stacked(part: Callable[[Look], Tensor | None]) -> Tensor:
        """A part of all looks; nan where one has none."""
        found = [part(look) for look in looks]
        like = next(value for value in found if value is not None)
        return torch.stack([torch.full_like(like, torch.nan) if value is None else value for value in found])

    of_tokens = stacked(lambda x: x.token_norms)  # (looks, batch, n)
    measured = None if one.measured is None else stacked(lambda x: x.measured)
    found = are_outliers(ratios_to_median(of_tokens, measured))
    measured = torch.ones_like(found) if measured is None else measured
    directed = measured if one.directed is None else stacked(lambda x: x.directed)
    ordinary = directed & ~found
    counts, all_counts, ordinary_counts = (mask.sum(dim=-1).double() for mask in (measured, directed, ordinary))
    tokens = measured.shape[-1]

    norms = torch.where(measured, of_tokens.double(), 0.0)
    spread = _root_of_squares(stacked(lambda x: x.distances), measured)
    mean = (stacked(lambda x: x.first).double() + stacked(lambda x: x.offset)).squeeze(-2)  # (looks, batch, d)
    mean_norm = counts.sqrt() * torch.linalg.vector_norm(mean, dim=-1)

    # Means of unit tokens, from the one that all were shifted by. Outliers are few: what the mean of all adds to that
    # of the others, where distances are taken from, cancels at most a half.
    unit_first = stacked(lambda x: x.unit_first).double()
    unit_first = (unit_first / torch.linalg.vector_norm(unit_first, dim=-1, keepdim=True)).squeeze(-2)
    offset = stacked(lambda x: x.unit_offset).double().squeeze(-2)
    of_all = offset
    if one.finds_outliers:
        of_all = stacked(lambda x: x.unit_sum).double().squeeze(-2) / all_counts.unsqueeze(-1)
    means = [
        count.sqrt() * torch.linalg.vector_norm(unit_first + mean, dim=-1)
        for count, mean in ((all_counts, of_all), (ordinary_counts, offset))
    ]
    distances = stacked(lambda x: x.unit_distances)
    apart = all_counts * (of_all - offset).square().sum(dim=-1)
    all_spread = (_root_of_squares(distances, directed).square() - apart).clamp(min=0).sqrt()
    has_outliers = found.any(dim=-1)
    ordinary_spread = torch.where(has_outliers, _root_of_squares(distances, ordinary), all_spread)
    ordinary_mean = torch.where(has_outliers, means[1], means[0])

    low, high = safe_norms(of_tokens.dtype, wide=one.wide)
    inside = (((norms > low) & (norms < high)) | ~measured).all(dim=-1)
    equal = (spread == 0) & (torch.where(measured, norms, torch.inf).amin(dim=-1) > low**0.5)
    known = inside & (((spread > low) & (spread < high)) | equal | (counts == 1))
    lost = mean_is_lost(mean_norm, spread, tokens, of_tokens.dtype)
    lost |= mean_is_lost(ordinary_mean, ordinary_spread, tokens, of_tokens.dtype)

    if any(look.turns is not None for look in looks):
        angles = 2 * torch.arcsin((stacked(lambda x: x.turns).double() / 2).clamp(max=1))
        before = [torch.ones_like(found[0]) if look.directed_before is None else look.directed_before for look in looks]
        both = directed & torch.stack(before)
        turn = torch.where(both, angles, 0.0).sum(dim=-1) / both.sum(dim=-1)
    else:
        turn = torch.full_like(counts, torch.nan)
    if one.found is not None:
        found = stacked(lambda x: x.outliers)
    exponents = None if one.exponent is None else stacked(lambda x: x.exponent)
    sized = [mean_norm, spread, norms.amax(dim=-1)]
    mean_norm, spread, largest = sized if exponents is None else [times_power_of_two(x, exponents) for x in sized]
    fields = [
        *_where_any(counts, mean_norm, spread),
        *_where_any(all_counts, means[0], all_spread),
        *_where_any(ordinary_counts, ordinary_mean, ordinary_spread),
        largest,
        found.sum(dim=-1).double(),
        turn,
        ((counts > 0) & (lost | ~known)).double(),
        torch.zeros_like(counts) if one.finds_outliers else has_outliers.double(),
    ]
    return torch.stack(fields)


def _root_of_squares(values: Tensor, mask: Tensor) -> Tensor:
    return torch.linalg.vector_norm(torch.where(mask, values.double(), 0.0), dim=-1)


def _where_any(counts: Tensor, *values: Tensor) -> list[Tensor]:
    """The counts, and the values where they are of any token at all."""
    return [counts, *(torch.where(counts > 0, value, torch.nan) for value in values)]


class Seen(NamedTuple):
    """A token matrix that has passed, and where its numbers will be."""

    look: Look
    looks: Looks
    number: int  # among the looks of its kind
    of_tokens: dict[str, Tensor | Bounded]  # by measure, what was computed of the tokens themselves

    @property
    def batch(self) -> int:
        return self.look.shape[0]


class PlacesOfLooks(NamedTuple):
    """What is reported of looks, and where: block, station, and one look or two."""

    stations: list[tuple[int, str, Seen]]
    turns: list[tuple[int, str, Seen]]
    steps: list[tuple[int, str, Seen, Seen]]  # before, after
    branches: list[tuple[int, str, Seen, Seen]]  # the trunk, the branch
    same: list[bool]  # of each step, whether the same tokens were left out at both ends; empty: none was


def readings_of(
    kinds: list[Looks], places: PlacesOfLooks, measures: dict[str, list[Measure]], first_sample: int
) -> Iterator[Reading]:
    """The measures of stations, steps and branches: one call each for all looks of a kind."""

    def each(items: Sequence[tuple[Any, ...]], name: str, values: Tensor) -> Iterator[Reading]:
        check_shape(name, values, (len(items), items[0][-1].batch))
        for (block, station, *_), row in zip(items, values.tolist(), strict=True):
            yield Reading(block, station, -1, name, first_sample, row)

    for looks in kinds:
        if stations := [item for item in places.stations if item[2].looks is looks]:
            summary = looks.summary([seen.number for *_, seen in stations])
            for measure in measures.get("station", []):
                yield from each(stations, measure.name, measure.compute(summary.only(measure.needs)))
        if turns := [item for item in places.turns if item[2].looks is looks]:
            angles = looks.fields["turn"][[seen.number for *_, seen in turns]]
            yield from each(turns, "angular_distance", angles / torch.pi)
    for kind, pairs in (("step", places.steps), ("branch", places.branches)):
        for before, after in dict.fromkeys((a.looks, b.looks) for *_, a, b in pairs):
            numbers = [i for i, item in enumerate(pairs) if (item[2].looks, item[3].looks) == (before, after)]
            items = [pairs[i] for i in numbers]
            fits = (before.batch, before.tokens) == (after.batch, after.tokens)
            starts = before.norms([a.number for *_, a, _ in items])
            ends = after.norms([b.number for *_, b in items])
            for measure in measures.get(kind, []):
                values = measure.compute(starts, ends) if fits else torch.full_like(ends.norm, torch.nan)
                if kind == "step" and places.same:  # an outlier was left out at one end only: these are other tokens
                    values = torch.where(torch.tensor(places.same)[numbers].unsqueeze(-1), values, torch.nan)
                yield from each(items, measure.name, values)


def without_positions(excluded: tuple[int, ...], tokens: Tensor, mask: Tensor | None) -> Tensor:
    """The mask without these positions, which are counted among the real tokens of each sequence."""
    real = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if mask is None else mask
    real = real.to(tokens.device)
    from_start, length = real.cumsum(dim=-1) - 1, real.sum(dim=-1, keepdim=True)  # (batch, n), (batch, 1)
    most = int(length.max())
    for index in excluded:
        if not -most <= index < most:
            raise ValueError(f"cannot exclude token {index}: the sequences have {most} tokens at most")
        real = real & (from_start != (index if index >= 0 else length + index))
    return real
