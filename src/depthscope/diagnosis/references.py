"""What is normal of trained models: their range, block by block at the same relative depth (`scripts/gallery/make.py`).

A model is never set beside itself. New models have no range: one of a family is like the next by construction.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from depthscope.probing import Profile, Reference

_FEWEST = 3  # other trained models that make a range
_TOKENS = (32, 512)  # the trained models were read with 57 to 170
_ITSELF = ("family", "blocks", "width")  # a profile may be of this very model if it has all of these in common


def reference_for(profile: Profile) -> Reference | None:
    """From the lowest to the highest sequence of the other trained models, as long as the profile is deep.

    They are those in which tokens see later ones, or those in which they do not. None if there are too few.
    """
    about = profile.metadata
    altered = about.get("excluded_tokens") or about.get("without") or profile.depth < 1
    trained = about.get("weights", {}).get("look") == "trained"
    if altered or not trained or not _TOKENS[0] <= about.get("tokens", 0) <= _TOKENS[1]:
        return None
    others = [
        item
        for item in _trained_models()
        if item["causal"] == about.get("causal") and any(item[name] != about.get(name) for name in _ITSELF)
    ]
    if len(others) < _FEWEST:
        return None
    place = np.linspace(0, 1, profile.depth + 1)

    def range_of(name: str, side: str) -> list[float]:
        curves = [item["curves"][name][side] for item in others]
        there = np.stack([np.interp(place, np.linspace(0, 1, len(curve)), curve) for curve in curves])
        return list((there.min(axis=0) if side == "low" else there.max(axis=0)).tolist())

    low, high = ({name: range_of(name, side) for name in others[0]["curves"]} for side in ("low", "high"))
    kind = "causal" if about.get("causal") else "bidirectional"
    return Reference(f"{len(others)} other trained {kind} models", low, high)


@cache
def _trained_models() -> list[dict[str, Any]]:
    path = files("depthscope.diagnosis") / "references" / "trained.json"
    return list(json.loads(path.read_text(encoding="utf-8")))
