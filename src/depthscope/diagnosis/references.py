"""What is normal: bands that `scripts/make_references.py` measured, and the one that fits a profile."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from depthscope.probing import Profile, Reference

_TOKENS_APART = 2.0  # similarity depends on the number of tokens; no band beyond twice or half as many


def reference_for(profile: Profile) -> Reference | None:
    """The band of this profile's kind, as long as the profile is deep; None if there is none.

    Of its kind: the class, the width and about the number of tokens, and, where the initialiser scales with
    depth or the weights are trained, the depth. Trained weights are set against a trained model if there
    is one, else against what they were before training.
    """
    look = profile.metadata.get("weights", {}).get("look")
    fitting = [item for item in _all() if _fits(item, profile)]
    fitting.sort(key=lambda item: item["weights"] != look)
    if not fitting or (look != "trained" and fitting[0]["weights"] == "trained"):
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
    paths = sorted((path for path in folder.iterdir() if path.name.endswith(".json")), key=lambda path: path.name)
    return tuple(json.loads(path.read_text(encoding="utf-8")) for path in paths)
