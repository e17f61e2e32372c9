"""The four networks that Dong et al. compare, as what is left out of a model, in the readings of their own code.

Their code (attention-rank-collapse, `surgery.py` and the notebook beside it) takes away the skip of attention only: the
MLP of "SAN + MLP" keeps its own. "No MLP" is, for BERT and XLNet, the whole step with its skip and norm; for ALBERT it
is the two linear layers, so that an activation, a skip and a norm are left.
"""

from __future__ import annotations

VARIANTS = ("SAN", "SAN+MLP", "SAN+skip", "full")
OTHER_READINGS = {
    "SAN+MLP, no skip at all": ("skips",),
    "SAN, whole FFN step out": ("attention_skip", "ffn_step"),
    "SAN+skip, whole FFN step out": ("ffn_step",),
}


def left_out(family: str, variant: str) -> tuple[str, ...]:
    """What is left out of a model of this family to make it this variant."""
    if variant in OTHER_READINGS:
        return OTHER_READINGS[variant]
    no_mlp = ("ffn_linears",) if family == "albert" else ("ffn_step",)
    skip = () if variant in ("SAN+skip", "full") else ("attention_skip",)
    return skip + (() if variant in ("SAN+MLP", "full") else no_mlp)


def other_readings(family: str) -> tuple[str, ...]:
    """The readings beside the authors' that are another network."""
    return tuple(OTHER_READINGS) if family == "albert" else tuple(OTHER_READINGS)[:1]
