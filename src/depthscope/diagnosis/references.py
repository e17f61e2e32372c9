"""What is normal: bands that fit a profile.

New models are set beside new models of their family (`scripts/make_references.py`), trained ones beside other trained
ones, block by block at the same relative depth (`scripts/gallery/make.py`), never beside themselves.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from depthscope.probing import Profile, Reference

_TOKENS_APART = 2.0  # similarity depends on the number of tokens; no band beyond twice or half as many
_TRAINED = "trained.json"
_FEWEST = 3  # other trained models that make a band
_TRAINED_TOKENS = (32, 512)  # those of the trained models were read with 57 to 170


def reference_for(profile: Profile) -> Reference | None:
    """The band of this profile's kind, as long as the profile is deep; None if there is none.

    Of new models: those of the same class and width, with about the number of tokens, and, where the initialiser
    scales with depth, the depth. Of trained ones: all other trained models in which tokens see later ones, or all in
    which they do not.
    """
    look = profile.metadata.get("weights", {}).get("look")
    if look == "trained":
        return _of_trained(profile)
    fitting = [item for item in _all() if _fits(item, profile)]
    if not fitting:
        return None
    found, blocks = fitting[0], profile.depth + 1
    sides = {
        side: {
            name: values[side][:blocks]
            for name, values in found["curves"].items()
            if "rank" not in name or profile.metadata.get("tokens") == found["tokens"]
        }
        for side in ("low", "high")
    }
    return Reference(found["label"], sides["low"], sides["high"])


def _of_trained(profile: Profile) -> Reference | None:
    """From the lowest to the highest sequence of the other trained models, at the same share of their depth."""
    about = profile.metadata
    altered = about.get("excluded_tokens") or about.get("without")
    if altered or not _TRAINED_TOKENS[0] <= about.get("tokens", 0) <= _TRAINED_TOKENS[1] or profile.depth < 1:
        return None
    others = [item for item in _trained() if item["causal"] == about.get("causal") and not _is_it(item, about)]
    if len(others) < _FEWEST:
        return None
    place = np.linspace(0, 1, profile.depth + 1)
    sides: dict[str, dict[str, list[float]]] = {"low": {}, "high": {}}
    for name in others[0]["curves"]:
        for side, outermost in (("low", np.min), ("high", np.max)):
            curves = [np.asarray(item["curves"][name][side]) for item in others]
            there = [np.interp(place, np.linspace(0, 1, len(curve)), curve) for curve in curves]
            sides[side][name] = outermost(there, axis=0).tolist()
    kind = "causal" if about.get("causal") else "bidirectional"
    return Reference(f"{len(others)} other trained {kind} models", sides["low"], sides["high"])


def _is_it(item: dict[str, Any], about: dict[str, Any]) -> bool:
    """Whether a profile may be of this very model: one of its family and size."""
    return all(item[name] == about.get(name) for name in ("family", "blocks", "width"))


def _fits(item: dict[str, Any], profile: Profile) -> bool:
    about = profile.metadata
    kind = item["class"].removesuffix("Model")
    apart = about.get("tokens", 0) / item["tokens"]
    return (
        str(about.get("class", "")).startswith(kind)
        and about.get("family") == item["family"]
        and about.get("placement") == item["placement"]
        and about.get("causal") == item["causal"]
        and about.get("width") == item["width"]
        and not about.get("excluded_tokens")
        and not about.get("without")
        and 1 / _TOKENS_APART <= apart <= _TOKENS_APART
        and (item["any_depth"] or about.get("blocks") == item["blocks"])
    )


@cache
def _all() -> tuple[dict[str, Any], ...]:
    folder = files("depthscope.diagnosis") / "references"
    paths = [path for path in folder.iterdir() if path.name.endswith(".json") and path.name != _TRAINED]
    paths.sort(key=lambda path: path.name)
    return tuple(json.loads(path.read_text(encoding="utf-8")) for path in paths)


@cache
def _trained() -> tuple[dict[str, Any], ...]:
    path = files("depthscope.diagnosis") / "references" / _TRAINED
    return tuple(json.loads(path.read_text(encoding="utf-8")))
