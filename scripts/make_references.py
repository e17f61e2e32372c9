"""Measures again what is normal: the bands that ship in `depthscope/diagnosis/references`.

    python scripts/make_references.py [FOLDER]     # some ten minutes; needs the huggingface and figures extras

Every family in its base shape with five seeds of random weights, as `depthscope probe` measures it, on eight pieces of
Python's manual (images of noise for ViT, random tokens for `encoder`). A band runs, block by block, from the lowest to
the highest value of a sequence, and at least three standard deviations of the five seeds' means to either side of their
mean: a sixth seed falls outside that about once in twenty times (Student's t with 4 degrees of freedom, 2.8 × √1.2).
Blocks are counted absolutely: at initialisation a block does not know how many follow it, except where the
family scales its weights with depth (GPT-2). Bands of trained models come from `scripts/gallery/make.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

from depthscope.probing import Profile

TARGET = Path(__file__).parents[1] / "src/depthscope/diagnosis/references"
MEASURES = ("token_similarity", "cosine_similarity", "direction_similarity", "effective_rank")
SEEDS = range(5)
FAMILIES = {
    "bert": "BERT-base at initialisation",
    "roberta": "RoBERTa-base at initialisation",
    "albert": "ALBERT-base at initialisation",
    "distilbert": "DistilBERT at initialisation",
    "vit": "ViT-base at initialisation",
    "gpt2": "GPT-2 at initialisation",
    "opt": "an OPT of base shape at initialisation",
    "llama": "a Llama of base shape at initialisation",
    "encoder": "the Xavier encoder of Yu & Zhang's Algorithm 1",
}
DEVIATIONS = 3.0
SCALES_WITH_DEPTH = ("gpt2",)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    folder.mkdir(parents=True, exist_ok=True)
    for family, label in FAMILIES.items():
        profiles = [measure(family, "--seed", str(seed)) for seed in SEEDS]
        write(folder / f"{family}.json", band(label, profiles, any_depth=family not in SCALES_WITH_DEPTH))


def measure(model: str, *options: str) -> Profile:
    """A profile, in a process of its own."""
    with tempfile.TemporaryDirectory() as out:
        measures = ",".join(MEASURES)
        command = [sys.executable, "-m", "depthscope", "probe", model, "--measures", measures, "--out", out, *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return Profile.load(out)


def band(label: str, profiles: list[Profile], *, any_depth: bool) -> dict[str, Any]:
    """What a file holds: whom it is about, and the lowest, mean and highest value of each measure by block."""
    about = profiles[0].metadata
    frame = pd.concat([profile.frame.assign(run=run) for run, profile in enumerate(profiles)])
    frame = frame[frame["station"] == "output"]
    curves = {}
    for name in MEASURES:
        rows = frame[frame["measure"] == name]
        by_block = rows.groupby("block")["value"].agg(["min", "mean", "max"])
        runs = rows.groupby(["run", "block"])["value"].mean().groupby("block").std().fillna(0.0)  # nan: a single run
        low = by_block["min"].clip(upper=by_block["mean"] - DEVIATIONS * runs)
        high = by_block["max"].clip(lower=by_block["mean"] + DEVIATIONS * runs)
        if "similarity" in name:
            high = high.clip(upper=1.0)
        sides = {"low": low, "mean": by_block["mean"], "high": high}
        curves[name] = {side: [float(f"{value:.4g}") for value in values] for side, values in sides.items()}
    keys = ("class", "family", "placement", "causal", "blocks", "width", "tokens", "samples", "versions")
    look = {"weights": about["weights"]["look"]}
    return (
        {"label": label, "any_depth": any_depth, "runs": len(profiles)}
        | {k: about[k] for k in keys}
        | look
        | {"curves": curves}
    )


def write(path: Path, content: dict[str, Any]) -> None:
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
    scratch.replace(path)
    print(f"wrote {path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
