"""The stations of a block: the points where the token matrix is looked at or changed. The one list of them.

On the trunk, in order; on a branch, beside it. In post-norm, Algorithm 1 of Yu & Zhang 2024, X and Y₁ to Y₄ are the
trunk stations. In pre-norm `attention_input` and `ffn_input` are normed copies that the branches read, and `after_ffn`
is the output itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from depthscope.naming import unknown_name

Placement = Literal["post", "pre"]

TRUNK = ("input", "after_attention", "ffn_input", "after_ffn", "output")
BRANCH = ("attention_input", "attention_branch", "ffn_branch")
CROSS = ("after_cross_attention", "cross_attention_branch")  # in decoders that attend to an encoder
BLOCK = TRUNK + BRANCH  # what every block has
ALL = BLOCK + CROSS
FINAL = "final_norm"  # behind the last block, where a norm is seen there: no station of a block, and never changed
BRANCHES = ("attention_branch", "cross_attention_branch", "ffn_branch")  # what is added to the trunk
WHOLE_TRUNK = ("input", "after_attention", "after_cross_attention", "ffn_input", "after_ffn", "output")

# The trunk of a block by placement of the norms: station → the step that leads to it.
STEPS: dict[Placement, dict[str, str]] = {
    "post": {
        "after_attention": "attention",
        "after_cross_attention": "cross-attention",
        "ffn_input": "norm",
        "after_ffn": "FFN",
        "output": "norm",
    },
    "pre": {"after_attention": "attention", "after_cross_attention": "cross-attention", "output": "FFN"},
}


def trunk_of(placement: Placement | None) -> tuple[str, ...]:
    """The stations between which steps lead, in order; where the placement is not known, all that may be."""
    return WHOLE_TRUNK if placement is None else ("input", *STEPS[placement])


def choose_stations(stations: str | Sequence[str]) -> frozenset[str]:
    """The names behind a group ("trunk", "all"), a name, or a list of names and groups."""
    groups = {"trunk": TRUNK, "all": ALL}
    chosen: set[str] = set()
    for name in [stations] if isinstance(stations, str) else stations:
        if name not in groups and name not in ALL:
            raise unknown_name("station", str(name), ALL, expected="'trunk', 'all', or names of")
        chosen.update(groups.get(name, (name,)))
    if not chosen:
        raise ValueError("expected at least one station, got an empty list")
    return frozenset(chosen)
