"""The measures by name, one record each: what a measure is of, what it needs, how it is computed, its groups.

| `of`        | what the measure is of                      | where it stands in a profile                       |
| ----------- | ------------------------------------------- | -------------------------------------------------- |
| `station`   | a `Summary` of the tokens at a station      | that station                                       |
| `tokens`    | the `TokenMatrix` at a station              | that station                                       |
| `batch`     | the same, all sequences of a batch together | that station, without a sample                     |
| `step`      | the way from the trunk station heard before | the station where it ends; `output`: whole block   |
| `block`     | a block's input against its output          | `output`                                           |
| `branch`    | a branch against the trunk                  | `attention_branch`, `ffn_branch`                   |
| `attention` | one head's attention, a `HeadInput`         | `attention` or `cross_attention`, with its head    |

What `compute` is given: `station` a Summary, `tokens` and `batch` a TokenMatrix, `step` and `branch` the `TokenNorms`
before and after (of the trunk and of the branch), `block` the unit tokens before and after, their mask and a `Scratch`,
`attention` a HeadInput. Results are (batch,) or, of a Summary or a step, (stations, batch).
A result may be a `Bounded`, a number with a bound on its own error: the largest bounds are in the profile's metadata.

Other packages add measures with `MEASURES.register(Measure(…))` or the entry-point group `depthscope.measures`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from depthscope.measures.attention import Mu, attention_entropy, omega_and_mu
from depthscope.measures.attention_spectra import Bounded, bounded_delta, bounded_second_eigenvalue
from depthscope.measures.energy import energy_split, largest_feature
from depthscope.measures.operators import AttentionOperator
from depthscope.measures.parts import HEAD_PARTS, PARTS, HeadInput
from depthscope.measures.rank import (
    composite_residual,
    effective_rank,
    ordinary_rank,
    stable_rank,
)
from depthscope.measures.similarity import (
    escalation_rate,
    frequency_ratio,
    growth,
    mean_angle,
    mean_cosine,
    token_diversity,
    token_similarity,
)
from depthscope.measures.sweeps import Survey, largest_logit, row_peaks
from depthscope.measures.tokens import TokenMatrix
from depthscope.naming import as_names, unknown_name
from depthscope.registry import Registry

Kind = Literal["station", "tokens", "batch", "step", "block", "branch", "attention"]
Group = Literal["light", "verdict", "spectral", "all"]
# "light" is O(nd); "verdict", which a probe takes, adds what `diagnose` asks for;
# "spectral" adds ranks and attention.
GROUP_NAMES: tuple[Group, ...] = ("light", "verdict", "spectral", "all")
_OLD_NAMES: dict[str, Group] = {"default": "light"}  # as measures of plug-ins may still have it in their groups
_LIGHT: tuple[Group, ...] = ("light", "verdict", "spectral", "all")
_VERDICT: tuple[Group, ...] = ("verdict", "all")
_RANK: tuple[Group, ...] = ("spectral", "all")
# Rows that `probe(gradients=True)` adds.
GRADIENTS = (
    "output_gradient",
    "weight_gradient",
    "queries_keys_gradient",
    "values_output_gradient",
    "ffn_gradient",
    "norms_gradient",
    "other_gradient",
)
_NEEDS: dict[str, frozenset[str]] = {"station": frozenset(PARTS), "attention": HEAD_PARTS}


@dataclass(frozen=True)
class Measure:
    """One measure. `needs` names parts of a `Summary` or a `HeadInput`; what is not named there cannot be read."""

    name: str
    of: Kind
    compute: Callable[..., Any]  # → a Tensor or a Bounded
    needs: frozenset[str] = frozenset()
    groups: tuple[Group, ...] = ("all",)
    short: str = ""  # for trackers: t_sim
    is_share: bool = False  # a number from 0 to 1, and drawn so
    is_name: bool = False  # the number of something: it has no mean, and is not drawn
    crosses: bool = False  # attention: also of cross-attention, (batch, n, m)
    incomplete: bool = False  # attention: also where rows sum to less than 1, beside a sink that is no token

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(_OLD_NAMES.get(group, group) for group in self.groups))


def _check(measure: Measure) -> None:
    if not isinstance(measure, Measure):
        raise ValueError(f"expected a Measure, got {measure!r}")
    name = measure.name
    if not isinstance(name, str) or not name.isidentifier() or name != name.lower() or name in GRADIENTS:
        raise ValueError(f"expected a name of small letters, digits and _ that is free, got {measure.name!r}")
    if measure.of not in get_args(Kind):
        raise ValueError(f"measure {measure.name!r} is of {measure.of!r}: expected one of {', '.join(get_args(Kind))}")
    if not isinstance(measure.needs, frozenset):
        raise ValueError(f"measure {measure.name!r} must give its needs as a frozenset, got {measure.needs!r}")
    if strange := [str(name) for name in measure.groups if name not in GROUP_NAMES]:
        raise ValueError(f"measure {measure.name!r} is in unknown groups: {', '.join(strange)}")
    known = _NEEDS.get(measure.of, frozenset())
    if unknown := measure.needs - known:
        there = ", ".join(sorted(known)) or "nothing can be named"
        raise ValueError(f"measure {measure.name!r} needs {', '.join(sorted(unknown))}, of a {measure.of}: {there}")
    if measure.of in _NEEDS and not measure.needs:
        raise ValueError(f"measure {measure.name!r} is of a {measure.of} and must name its needs")
    if measure.name in GROUP_NAMES:
        raise ValueError(f"{measure.name!r} is the name of a group of measures")


def half_turns(before: Tensor, after: Tensor, real: Tensor | None, scratch: object) -> Tensor:
    """The mean angle between unit tokens before and after, over π; a sweep that has the angle already divides it."""
    return mean_angle(before, after, real, scratch) / torch.pi  # type: ignore[arg-type]


def _sink_attention(head: HeadInput) -> Tensor:
    """The attention that outlier tokens draw, mean over the queries; nan where a sequence has none."""
    sinks = head.sinks  # (batch, n)
    if not sinks.any():
        return torch.full(sinks.shape[:1], torch.nan, dtype=torch.float64, device=sinks.device)
    if head.survey is not None:
        share = torch.where(sinks, head.survey.mean_row, 0.0).sum(dim=-1)
    else:
        real = torch.ones_like(sinks) if head.real is None else head.real.to(sinks.device)
        drawn = torch.where(sinks[:, None, :] & real[:, :, None], head.dense, 0.0).sum(dim=(-2, -1))
        share = drawn.double() / real.sum(dim=-1)
    return torch.where(sinks.any(dim=-1), share, torch.nan)


def _entropy(head: HeadInput) -> Tensor:
    return attention_entropy(head.dense, head.real) if head.survey is None else head.survey.entropy


def _largest_logit(head: HeadInput) -> Tensor:
    known = head.survey if head.scores is None else None
    peaks = row_peaks(head.attention, head.scores) if known is None else known.peaks
    if peaks is None:
        raise ValueError("expected the scores that a softmax reads, or queries and keys, got attention's matrix alone")
    return largest_logit(peaks, head.real)


def _sink_value_norm(head: HeadInput) -> Tensor:
    """The size of the outlier tokens' values over the median; nan where a sequence has none."""
    ratios = TokenMatrix(head.values, head.real).norm_ratios
    return ratios.masked_fill(~head.sinks, torch.nan).nanmean(dim=-1)


def _whole_or_streamed(head: HeadInput) -> tuple[Tensor | AttentionOperator, Tensor | None, Survey | None]:
    return (head.dense if head.survey is None else head.attention), head.real, head.survey


def _omega_and_mu(head: HeadInput) -> tuple[Tensor, Mu]:
    return omega_and_mu(_whole_or_streamed(head)[0], head.tokens)


def _station(name: str, compute: Callable[..., Tensor], *needs: str, **fields: object) -> Measure:
    return Measure(name, "station", compute, frozenset(needs), **{"groups": _LIGHT, **fields})  # type: ignore[arg-type]


def _head(name: str, compute: Callable[[HeadInput], Tensor | Bounded], *needs: str, **fields: object) -> Measure:
    return Measure(name, "attention", compute, frozenset(needs), **{"groups": _RANK, **fields})  # type: ignore[arg-type]


_OURS = (
    _station("token_similarity", lambda s: token_similarity(s.norms), "norms", short="t_sim", is_share=True),
    _station("token_diversity", lambda s: token_diversity(s.norms), "norms", short="t_div", is_share=True),
    _station("cosine_similarity", lambda s: mean_cosine(s.directions), "directions", short="t_cos", is_share=True),
    _station("direction_similarity", lambda s: token_similarity(s.ordinary), "ordinary", is_share=True),
    _station("outliers", lambda s: s.outliers, "outliers"),
    _station(
        "largest_token_share",
        lambda s: (s.largest_norm / s.norms.norm).square().clamp(max=1),
        "largest_norm",
        "norms",
        is_share=True,
    ),
    _station("frobenius_norm", lambda s: s.norms.norm, "norms"),
    Measure("growth_mean", "step", lambda before, after: growth(before, after).mean, groups=_LIGHT),
    Measure("growth_diversity", "step", lambda before, after: growth(before, after).diversity, groups=_LIGHT),
    Measure("escalation_rate", "step", escalation_rate, groups=_LIGHT),
    Measure("angular_distance", "block", half_turns, groups=_LIGHT),
    Measure("branch_ratio", "branch", lambda trunk, branch: branch.norm / trunk.norm, groups=_RANK),
    Measure("effective_rank", "tokens", effective_rank, groups=("verdict", "spectral", "all")),
    Measure("ordinary_rank", "tokens", ordinary_rank, groups=("verdict", "spectral", "all")),
    Measure("largest_feature_share", "tokens", lambda x: largest_feature(x).share, groups=_VERDICT, is_share=True),
    Measure("largest_feature", "tokens", lambda x: largest_feature(x).feature, groups=_VERDICT, is_name=True),
    Measure("stable_rank", "tokens", stable_rank, groups=_RANK),
    _head("delta", lambda head: bounded_delta(*_whole_or_streamed(head)), "attention"),
    _head("second_eigenvalue", lambda head: bounded_second_eigenvalue(*_whole_or_streamed(head)), "attention"),
    _head("omega", lambda head: head.once(_omega_and_mu)[0], "attention", "tokens"),
    _head("mu_mean", lambda head: head.once(_omega_and_mu)[1].mean, "attention", "tokens"),
    _head("mu_diversity", lambda head: head.once(_omega_and_mu)[1].diversity, "attention", "tokens"),
    _head("attention_entropy", _entropy, "attention", crosses=True),
    _head("largest_logit", _largest_logit, "attention", "scores", crosses=True, incomplete=True),
    _head("sink_attention", _sink_attention, "attention", "sinks", is_share=True, incomplete=True),
    _head("sink_value_norm", _sink_value_norm, "values", "sinks", incomplete=True),
    Measure("composite_residual", "tokens", composite_residual),
    _station("frequency_ratio", lambda s: frequency_ratio(s.norms), "norms", groups=("all",)),
    Measure("energy_shared", "batch", lambda x: x.once(energy_split).shared, groups=_VERDICT),
    Measure("energy_sequence", "batch", lambda x: x.once(energy_split).sequence, groups=_VERDICT),
    Measure("energy_position", "batch", lambda x: x.once(energy_split).position, groups=_VERDICT),
    Measure("energy_token", "batch", lambda x: x.once(energy_split).token, groups=_VERDICT),
)
MEASURES: Registry[Measure] = Registry("measure", "depthscope.measures", _OURS, check=_check)


def list_measures(group: Group = "all") -> tuple[str, ...]:
    """The measures that a probe can take.

    Args:
        group: "light", "verdict", "spectral", "all", …

    Returns:
        Their names, in the order of the catalogue.

    Example:
        >>> import depthscope
        >>> depthscope.list_measures("light")[0]
        'token_similarity'
    """
    group = _OLD_NAMES.get(group, group)
    return tuple(measure.name for measure in MEASURES.values() if group in measure.groups)


def choose_measures(measures: str | Sequence[str]) -> tuple[str, ...]:
    """The names behind a group, a name, or a list of names and groups."""
    wanted = as_names(measures, "measures")
    chosen: dict[str, None] = {}
    for name in wanted:
        if name in GROUP_NAMES or name in _OLD_NAMES:
            chosen.update(dict.fromkeys(list_measures(name)))  # type: ignore[arg-type]
        elif name in MEASURES:
            chosen[name] = None
        else:
            raise unknown_name("measure", name, (*GROUP_NAMES, *MEASURES), expected="a group or a name of")
    if not chosen:
        raise ValueError("expected at least one measure, got an empty list")
    return tuple(chosen)


def only_at_outputs(measures: str | Sequence[str]) -> frozenset[str]:
    """What is not worth its cost inside the blocks: for a verdict, ranks and the split of the energy.

    Measures that are asked for beside the verdict's are taken everywhere.
    """
    wanted = [measures] if isinstance(measures, str) else list(measures)
    if "verdict" not in wanted:
        return frozenset()
    beside = [name for name in wanted if name != "verdict"]
    return frozenset(list_measures("verdict")) - frozenset(choose_measures(["light", *beside]))
