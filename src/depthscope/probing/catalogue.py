"""The measures that a probe can take, by name, and the groups that users ask for.

| kind      | of what                                     | where it stands in a profile                       |
| --------- | ------------------------------------------- | -------------------------------------------------- |
| token     | the tokens at a station                     | that station                                       |
| step      | the way from the trunk station heard before | the station where it ends; `output`: whole block   |
| block     | a block's input against its output          | `output`                                           |
| branch    | a branch's size against the trunk           | `attention_branch`, `ffn_branch`                   |
| attention | one head's attention matrix                 | `attention` or `cross_attention`, with its head    |
| batch     | all sequences of a batch together           | that station, without a sample                     |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from depthscope import measures as m
from depthscope.measures import TokenMatrix, TokenNorms


class Summary(NamedTuple):
    """What is kept of the tokens at a station; stacked over the stations of a pass, (stations, batch)."""

    norms: TokenNorms
    directions: TokenNorms  # of the unit tokens
    ordinary: TokenNorms  # of the unit tokens without outliers
    largest_norm: Tensor
    outliers: Tensor  # how many


# Taken from the summaries, all stations of a pass at once.
FROM_SUMMARY: dict[str, Callable[[Summary], Tensor]] = {
    "token_similarity": lambda s: m.token_similarity(s.norms),
    "token_diversity": lambda s: m.token_diversity(s.norms),
    "cosine_similarity": lambda s: m.mean_cosine(s.directions),
    "direction_similarity": lambda s: m.token_similarity(s.ordinary),
    "outliers": lambda s: s.outliers,
    "largest_token_share": lambda s: (s.largest_norm / s.norms.norm).square().clamp(max=1),
    "frobenius_norm": lambda s: s.norms.norm,
    "frequency_ratio": lambda s: m.frequency_ratio(s.norms),
}
# Taken from the tokens themselves while they pass.
FROM_TOKENS: dict[str, Callable[[TokenMatrix], Tensor]] = {
    "effective_rank": m.effective_rank,
    "stable_rank": m.stable_rank,
    "leading_share": lambda x: m.leading_direction(x).energy_share,
    "leading_evenness": lambda x: m.leading_direction(x).evenness,
    "leading_token": lambda x: m.leading_direction(x).largest_token,
    "composite_residual": m.composite_residual,
}
STEP = ("growth_mean", "growth_diversity", "escalation_rate")
BLOCK = ("angular_distance",)
BRANCH = ("branch_ratio",)
ATTENTION = (
    "delta",
    "second_eigenvalue",
    "omega",
    "mu_mean",
    "mu_diversity",
    "attention_entropy",
    "sink_attention",
    "sink_value_norm",
)
BATCH = ("energy_shared", "energy_sequence", "energy_position", "energy_token")

_DEFAULT = (*list(FROM_SUMMARY)[:7], *STEP, *BLOCK)
_SPECTRAL = (*_DEFAULT, *BRANCH, *list(FROM_TOKENS)[:5], *ATTENTION)
GROUPS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    "verdict": (*_DEFAULT, "effective_rank", *BATCH),
    "spectral": _SPECTRAL,
    "all": (*_SPECTRAL, "composite_residual", "frequency_ratio", *BATCH),
}
NAMES = GROUPS["all"]


def only_at_outputs(measures: str | Sequence[str]) -> frozenset[str]:
    """What is not worth its cost inside the blocks: for a verdict, ranks and the split of the energy."""
    return frozenset(GROUPS["verdict"]) - frozenset(_DEFAULT) if measures == "verdict" else frozenset()


def choose(measures: str | Sequence[str]) -> tuple[str, ...]:
    """The names behind a group, a name, or a list of names and groups."""
    wanted = [measures] if isinstance(measures, str) else list(measures)
    chosen: dict[str, None] = {}
    for name in wanted:
        if name not in GROUPS and name not in NAMES:
            known = ", ".join((*GROUPS, *NAMES))
            raise ValueError(f"unknown measure {name!r}; expected a group or a name of: {known}")
        chosen.update(dict.fromkeys(GROUPS.get(name, (name,))))
    if not chosen:
        raise ValueError("expected at least one measure, got an empty list")
    return tuple(chosen)
