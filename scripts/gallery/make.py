"""Measures every trained model of `weights.py` on two batches of its own kind of inputs: the gallery's data.

    python scripts/gallery/make.py CACHE [FOLDER] [NAME …]    # half an hour of one core; goes on where it was

CACHE keeps what was downloaded. FOLDER gets NAME.json: curves by block, what skipping costs, and the loss. `pip install
gguf` for the two models in four bits, and `setuptools<80` for the packages of rxnfp and TabPFN. Aggregates alone: no
text, no weights.
"""

from __future__ import annotations

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from weights import TRAINED, Trained, unpack

import depthscope
import inputs

TARGET = Path(__file__).parents[2] / "docs/gallery/data"
CURVES = ("token_similarity", "direction_similarity", "cosine_similarity", "effective_rank", "largest_token_share")
SIMILARITIES = ("token_similarity", "direction_similarity", "cosine_similarity")
REFERENCES = Path(__file__).parents[2] / "src/depthscope/diagnosis/references/trained.json"
BY_BLOCK = ("attention_ratio", "ffn_ratio", "skip_later", "skip_output", "skip_loss", "lens_kl")


def measure(trained: Trained, cache: Path) -> dict[str, Any]:
    folder = unpack(trained, cache)
    model = trained.load(folder)
    found = [on(model, batch, trained.mask, trained.causal) for batch in getattr(inputs, trained.inputs)(folder)]
    about = found[0].pop("about")
    found[1].pop("about")
    known = {
        name: about.get(name) for name in ("class", "family", "placement", "causal", "blocks", "width", "parameters")
    }
    packages = {"title": trained.title, "kind": trained.kind, "packages": list(trained.packages)}
    return packages | known | {"inputs": trained.inputs, "texts": found}


def on(model: nn.Module, batch: dict[str, Tensor], mask: int | None, causal: bool | None) -> dict[str, Any]:
    """One batch: what a probe and the use of depth tell of it."""
    loss = None  # the model's own: of the next token, where it is causal
    if "answers" in batch:
        loss = partial(of_answers, batch.pop("answers"))
    elif mask is not None:
        batch, wanted = masked(batch, mask)
        loss = partial(of_hidden, wanted)
    scope = depthscope.Scope(model, batch, causal=causal)
    profile = scope.probe(stations="output")
    use = scope.depth(loss=loss)
    said = depthscope.diagnose(profile).to_dict()
    frame = profile.frame[profile.frame["station"] == "output"]
    by_block = frame.groupby(["measure", "block"])["value"].agg(["min", "mean", "max"])
    curves = {
        name: {side: rounded(by_block.loc[name][side]) for side in ("min", "mean", "max")}
        for name in CURVES
        if name in by_block.index.get_level_values(0)
    }
    return {
        "about": profile.metadata,
        "tokens": profile.metadata["tokens"],
        "samples": profile.metadata["samples"],
        "curves": curves,
        "by_block": {name: rounded(use.frame[name]) for name in BY_BLOCK if name in use.frame},
        "loss": use.metadata["loss"],
        "verdict": said["verdict"],
        "headline": said["headline"],
        "findings": {f["rule"]: f["sentence"] for f in (*said["findings"], *use.to_dict()["findings"])},
    }


def masked(batch: dict[str, Tensor], mask: int) -> tuple[dict[str, Tensor], Tensor]:
    """Every seventh token hidden, as in the training of a masked language model; what is wanted there, else -100."""
    ids, place = batch["input_ids"], torch.arange(batch["input_ids"].shape[1])
    hidden = (place % 7 == 3) & batch["attention_mask"].bool()
    return batch | {"input_ids": ids.masked_fill(hidden, mask)}, ids.masked_fill(~hidden, -100)


def of_hidden(wanted: Tensor, output: Any) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), wanted.flatten())


def of_answers(answers: Tensor, output: Tensor) -> Tensor:
    """TabPFN says the classes of the rows that have no label."""
    return F.cross_entropy(output.flatten(0, 1), answers.flatten().long())


def rounded(values: Any) -> list[float | None]:
    return [None if math.isnan(value) else float(f"{value:.4g}") for value in values]


def references(folder: Path) -> list[dict[str, Any]]:
    """What the verdict and the grey bands need of each model: the lowest and highest sequence of both batches."""
    found = []
    for trained in TRAINED:
        of = json.loads((folder / f"{trained.name}.json").read_text(encoding="utf-8"))
        curves = {
            name: {
                "low": [min(pair) for pair in zip(*(text["curves"][name]["min"] for text in of["texts"]), strict=True)],
                "high": [
                    max(pair) for pair in zip(*(text["curves"][name]["max"] for text in of["texts"]), strict=True)
                ],
            }
            for name in SIMILARITIES
        }
        about = {name: of[name] for name in ("title", "kind", "family", "placement", "causal", "blocks", "width")}
        found.append(about | {"curves": curves})
    return found


def table(folder: Path) -> str:
    """The overview of docs/gallery/README.md: both batches of each model, in Markdown."""
    names = ["model", "trained on", "blocks × width", "norms", "similarity before, halfway, after", "directions, after"]
    names += ["loss", "dearest block", "verdict"]
    rows = [names, ["---"] * len(names)]
    for trained in TRAINED:
        of = json.loads((folder / f"{trained.name}.json").read_text(encoding="utf-8"))
        both = [_cells(text) for text in of["texts"]]
        cells = [" · ".join(dict.fromkeys(pair)) for pair in zip(*both, strict=True)]
        rows.append([of["title"], of["kind"], f"{of['blocks']} × {of['width']}", of["placement"], *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(text: dict[str, Any]) -> list[str]:
    similar, directions = (text["curves"][name]["mean"] for name in ("token_similarity", "direction_similarity"))
    costs = [cost for cost in text["by_block"]["skip_loss"] if cost is not None]
    dearest = f"{costs.index(max(costs)) + 1} ({max(costs):+.2f})" if costs else "no loss"
    return [
        f"{similar[0]:.2f}, {similar[len(similar) // 2]:.2f}, {similar[-1]:.2f}",
        f"{directions[-1]:.2f}",
        "no loss" if text["loss"] is None else f"{text['loss']:.2f}",
        dearest,
        text["verdict"],
    ]


def main() -> None:
    torch.set_num_threads(1)
    cache, folder = Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else TARGET
    folder.mkdir(parents=True, exist_ok=True)
    for trained in TRAINED:
        path = folder / f"{trained.name}.json"
        if sys.argv[3:] and trained.name not in sys.argv[3:]:
            continue
        if not path.exists():
            path.write_text(json.dumps(measure(trained, cache), ensure_ascii=False) + "\n", encoding="utf-8")
            print(f"wrote {path.name}", flush=True)
    if not sys.argv[3:]:
        lines = ",\n".join(json.dumps(item, ensure_ascii=False) for item in references(folder))
        REFERENCES.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        print(table(folder))


if __name__ == "__main__":
    main()
