"""The stations of a block: the points where the token matrix is looked at or changed. The one list of them.

On the trunk, in order; on a branch, beside it. In post-norm, Algorithm 1 of Yu & Zhang 2024, X and Y₁ to Y₄ are the
trunk stations. In pre-norm `attention_input`, `cross_attention_input` and `ffn_input` are normed copies that the
branches read, and `after_ffn` is the output itself. So it is in every other placement; only in post-norm do norms
stand on the trunk.

| placement  | a block                                     | among others   |
| ---------- | ------------------------------------------- | -------------- |
| "post"     | x ← norm(x + branch(x)), twice              | BERT           |
| "pre"      | x ← x + branch(norm(x)), twice              | GPT-2, Llama   |
| "sandwich" | x ← x + norm(branch(norm(x))), twice        | Gemma 2        |
| "branch"   | x ← x + norm(branch(x)), twice              | OLMo 2         |
| "parallel" | x ← x + attention(norm(x)) + FFN(norm(x))   | GPT-NeoX       |
| "mixer"    | x ← x + mixer(norm(x)), once                | Mamba          |
| "no"       | x ← x + branch(x), twice                    | ReZero         |
| "streams"  | x ← mix(x) + w branch(norm(vᵀx)), twice     | DeepSeek-V4    |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from depthscope.naming import as_names, unknown_name

Placement = Literal["post", "pre", "sandwich", "branch", "parallel", "mixer", "no", "streams"]

TRUNK = ("input", "after_attention", "ffn_input", "after_ffn", "output")
BRANCH = ("attention_input", "attention_branch", "ffn_branch")
CROSS = ("cross_attention_input", "after_cross_attention", "cross_attention_branch")  # in decoders that read an encoder
BLOCK = TRUNK + BRANCH  # what every block has
ALL = BLOCK + CROSS
FINAL = "final_norm"  # after the last block, where a norm is seen there: no station of a block, and never changed
BRANCHES = ("attention_branch", "cross_attention_branch", "ffn_branch")  # what is added to the trunk
_TWO_STEPS = {"after_attention": "attention", "after_cross_attention": "cross-attention", "output": "FFN"}

# The trunk of a block by placement of the norms: station → the step that leads to it.
STEPS: dict[Placement, dict[str, str]] = {
    "post": {
        "after_attention": "attention",
        "cross_attention_input": "norm",
        "after_cross_attention": "cross-attention",
        "ffn_input": "norm",
        "after_ffn": "FFN",
        "output": "norm",
    },
    "pre": _TWO_STEPS,
    "sandwich": _TWO_STEPS,
    "branch": _TWO_STEPS,
    "parallel": {"output": "attention with FFN"},
    "mixer": {"output": "mixer"},
    "no": _TWO_STEPS,
    "streams": {"output": "block"},
}
WHOLE_TRUNK = ("input", *STEPS["post"])  # all stations that a trunk may have

# What a reader is told of a placement.
IN_WORDS: dict[Placement, str] = {
    "post": "post-norm",
    "pre": "pre-norm",
    "sandwich": "norms before and after each branch",
    "branch": "norms after the branches",
    "parallel": "pre-norm, parallel branches",
    "mixer": "pre-norm, a mixer in the place of attention",
    "no": "no norms",
    "streams": "several streams (hyper-connections)",
}


def trunk_is_a_sum(placement: Placement | None) -> bool:
    """Whether the trunk is what entered it plus all branches, as in pre-norm: no norm stands on it."""
    return placement not in (None, "post", "streams")


def trunk_of(placement: Placement | None) -> tuple[str, ...]:
    """The stations between which steps lead, in order; where the placement is not known, all that may be."""
    return WHOLE_TRUNK if placement is None else ("input", *STEPS[placement])


def choose_stations(stations: str | Sequence[str]) -> frozenset[str]:
    """The names of a group ("verdict", what `diagnose` reads; "trunk", "all"), of a name, or of a list of both."""
    groups = {"verdict": (*TRUNK, "attention_input"), "trunk": TRUNK, "all": ALL}
    chosen: set[str] = set()
    for name in as_names(stations, "stations"):
        if name not in groups and name not in ALL:
            raise unknown_name("station", name, ALL, expected="'verdict', 'trunk', 'all', or names of")
        chosen.update(groups.get(name, (name,)))
    if not chosen:
        raise ValueError("expected at least one station, got an empty list")
    return frozenset(chosen)
