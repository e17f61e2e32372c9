"""Stage two: what the looks of a pass say, for all stations and blocks together, in float64, with one transfer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthscope.measures import PARTS, Bounded, Measure, Summary, TokenNorms
from depthscope.measures.norms import SAFE_NORMS, mean_is_lost, times_power_of_two
from depthscope.measures.tokens import are_outliers, ratios_to_median
from depthscope.probing.readings import Reading, check_shape
from depthscope.probing.station import Look

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
        self.waiting: list[Look] = []
        self._done: list[Tensor] = []  # (fields, looks, batch)
        self._count = 0
        self._numbers = torch.empty(0)  # (fields, looks, batch), on the host, once they have been fetched
        self.fields: dict[str, Tensor] = {}  # the same by name

    def add(self, look: Look) -> int:
        """Its number among them."""
        self.waiting.append(look)
        if len(self.waiting) == TOGETHER:
            self._finish()
        self._count += 1
        return self._count - 1

    def _finish(self) -> None:
        self._done.append(numbers_of(self.waiting))
        for look in self.waiting:  # what is finished is needed no more
            nothing = look.token_norms[:0]
            look.first = look.offset = look.distances = nothing
            look.unit_first = look.unit_offset = look.unit_distances = nothing
            look.unit_sum = look.turns = look.before = look.exponent = None
        self.waiting = []

    def numbers(self) -> Tensor:
        """(fields, looks, batch), where the tokens were."""
        if self.waiting:
            self._finish()
        return self._done[0] if len(self._done) == 1 else torch.cat(self._done, dim=1)

    def read(self, numbers: Tensor) -> None:
        """Takes what has come to the host."""
        self._numbers = numbers.reshape(len(FIELDS), self._count, self.batch)
        self.fields = dict(zip(FIELDS, self._numbers, strict=True))

    def not_finite(self) -> dict[int, list[int]]:
        """By look, the sequences in which a token that is measured is not finite."""
        if bool((self.fields["norms.mean_norm"] + self.fields["norms.deviation_norm"]).isfinite().all()):
            return {}  # as almost always
        norms = self.norms(list(range(self._count)))
        found: dict[int, list[int]] = {}
        for number, sequence in ((norms.count > 0) & norms.norm.isnan()).nonzero().tolist():
            found.setdefault(number, []).append(sequence)
        return found

    def norms(self, places: list[int]) -> TokenNorms:
        """Of these looks, each quantity (looks, batch)."""
        return self._norms(self._numbers[:, places], "norms")

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

    def stacked(part: str) -> Tensor:
        """A part of all looks; nan where one has none."""
        found = [getattr(look, part) for look in looks]
        like = next(value for value in found if value is not None)
        return torch.stack([torch.full_like(like, torch.nan) if value is None else value for value in found])

    of_tokens = stacked("token_norms")  # (looks, batch, n)
    measured = None if one.measured is None else stacked("measured")
    directed = measured if one.directed is one.measured else stacked("directed")
    found = are_outliers(ratios_to_median(of_tokens, measured))
    ordinary = ~found if directed is None else directed & ~found
    tokens = found.shape[-1]
    whole = of_tokens.new_full(found.shape[:-1], tokens, dtype=torch.float64)  # (looks, batch)
    counts, all_counts, ordinary_counts = (
        whole if mask is None else mask.sum(dim=-1).double() for mask in (measured, directed, ordinary)
    )

    norms = _masked(of_tokens.double(), measured)
    spread = _length(_masked(stacked("distances"), measured))
    mean = (stacked("first").double() + stacked("offset")).squeeze(-2)  # (looks, batch, d)
    mean_norm = counts.sqrt() * _length(mean)

    # Means of unit tokens, from the one that all were shifted by. Outliers are few: what the mean of all adds to that
    # of the others, where distances are taken from, cancels at most a half.
    unit_first = stacked("unit_first").double()
    unit_first = (unit_first / torch.linalg.vector_norm(unit_first, dim=-1, keepdim=True)).squeeze(-2)
    offset, distances = stacked("unit_offset").double().squeeze(-2), stacked("unit_distances")
    all_mean, all_spread = all_counts.sqrt() * _length(unit_first + offset), _length(_masked(distances, directed))
    ordinary_mean, ordinary_spread = all_mean, all_spread
    has_outliers = found.any(dim=-1)
    if one.finds_outliers:
        of_all = stacked("unit_sum").double().squeeze(-2) / all_counts.unsqueeze(-1)
        ordinary_mean, all_mean = (
            count.sqrt() * _length(unit_first + mean)
            for count, mean in ((ordinary_counts, offset), (all_counts, of_all))
        )
        apart = all_counts * (of_all - offset).square().sum(dim=-1)
        all_spread = (all_spread.square() - apart).clamp(min=0).sqrt()
        ordinary_spread = torch.where(has_outliers, _length(_masked(distances, ordinary)), all_spread)
        ordinary_mean = torch.where(has_outliers, ordinary_mean, all_mean)

    # Between these bounds norms were computed without harm.
    low, high = (0.0, torch.inf) if one.wide else SAFE_NORMS[of_tokens.dtype]
    least, largest = _masked(norms, measured, torch.inf).amin(dim=-1), norms.amax(dim=-1)
    inside = (least > low) & (largest < high)  # False for nan
    equal = (spread == 0) & (least > low**0.5)
    known = inside & (((spread > low) & (spread < high)) | equal | (counts == 1))
    lost = mean_is_lost(mean_norm, spread, tokens, of_tokens.dtype)
    lost |= mean_is_lost(ordinary_mean, ordinary_spread, tokens, of_tokens.dtype)

    turn = torch.full_like(counts, torch.nan)
    if any(look.turns is not None for look in looks):
        angles, both = 2 * torch.arcsin((stacked("turns").double() / 2).clamp(max=1)), directed
        masks = [None if look.before is None else look.before.directed for look in looks]
        if any(mask is not None for mask in masks):
            before = torch.stack([torch.ones_like(found[0]) if mask is None else mask for mask in masks])
            both = before if directed is None else directed & before
        turn = _masked(angles, both).sum(dim=-1) / (tokens if both is None else both.sum(dim=-1))
    if one.exponent is not None:
        exponents = stacked("exponent")
        mean_norm, spread, largest = (times_power_of_two(x, exponents) for x in (mean_norm, spread, largest))
    fields = [
        *_where_any(measured, counts, mean_norm, spread),
        *_where_any(directed, all_counts, all_mean, all_spread),
        *_where_any(directed, ordinary_counts, ordinary_mean, ordinary_spread),
        largest,
        found.sum(dim=-1).double(),
        turn,
        ((counts > 0) & (lost | ~known)).double(),
        torch.zeros_like(counts) if one.finds_outliers else has_outliers.double(),
    ]
    return torch.stack(fields)


def _length(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64)


def _masked(values: Tensor, mask: Tensor | None, elsewhere: float = 0.0) -> Tensor:
    """The values where the mask is true; None: everywhere."""
    return values if mask is None else torch.where(mask, values, elsewhere)


def _where_any(mask: Tensor | None, counts: Tensor, *values: Tensor) -> list[Tensor]:
    """The counts, and the values where they are of any token at all: without a mask they are, of outliers never all."""
    if mask is None:
        return [counts, *values]
    return [counts, *(torch.where(counts > 0, value, torch.nan) for value in values)]


class Seen(NamedTuple):
    """A token matrix that has passed, and where its numbers will be."""

    look: Look
    looks: Looks
    number: int  # among the looks of its kind
    of_tokens: dict[str, Tensor | Bounded]  # by measure, what was computed of the tokens themselves


class PlacesOfLooks(NamedTuple):
    """What is reported of looks, and where: block, station, and one look or two."""

    stations: list[tuple[int, str, Seen]]
    turns: list[tuple[int, str, Seen]]
    steps: list[tuple[int, str, Seen, Seen]]  # before, after
    branches: list[tuple[int, str, Seen, Seen]]  # the trunk, the branch


def readings_of(
    kinds: list[Looks], places: PlacesOfLooks, measures: dict[str, list[Measure]], first_sample: int
) -> Iterator[Reading]:
    """The measures of stations, steps and branches: one call each for all looks of a kind."""

    def each(items: Sequence[tuple[Any, ...]], name: str, values: Tensor) -> list[Reading]:
        check_shape(name, values, (len(items), items[0][-1].looks.batch))
        return [
            Reading(item[0], item[1], -1, name, first_sample, row)
            for item, row in zip(items, values.tolist(), strict=True)
        ]

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
            items = [item for item in pairs if (item[2].looks, item[3].looks) == (before, after)]
            fits = (before.batch, before.tokens) == (after.batch, after.tokens)
            starts = before.norms([a.number for *_, a, _ in items])
            ends = after.norms([b.number for *_, b in items])
            for measure in measures.get(kind, []):
                values = measure.compute(starts, ends) if fits else torch.full_like(ends.norm, torch.nan)
                yield from each(items, measure.name, values)


def without_positions(excluded: tuple[int, ...], tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mask without these positions, which are counted among the real tokens of each sequence; and how many real
    tokens the longest has, where the tokens are."""
    real = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device) if mask is None else mask
    real = real.to(tokens.device)
    from_start, length = real.cumsum(dim=-1) - 1, real.sum(dim=-1, keepdim=True)  # (batch, n), (batch, 1)
    for index in excluded:
        real = real & (from_start != (index if index >= 0 else length + index))
    return real, length.max()
