"""Measures every trained model of `weights.py` on two batches of its own kind of inputs: the gallery's data.

    python scripts/gallery/make.py CACHE [FOLDER] [NAME …]    # half an hour of one core; goes on where it was

CACHE keeps what was downloaded. FOLDER gets NAME.json: curves by block, what skipping costs, and the loss. `pip install
gguf` for the two models in four bits. Aggregates alone: no text, no weights.
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
BY_BLOCK = ("attention_ratio", "ffn_ratio", "skip_later", "skip_output", "skip_loss", "lens_kl")


def measure(trained: Trained, cache: Path) -> dict[str, Any]:
    folder = unpack(trained, cache)
    model = trained.load(folder)
    found = [on(model, batch, trained.mask) for batch in getattr(inputs, trained.inputs)(folder)]
    about = found[0].pop("about")
    found[1].pop("about")
    known = {
        name: about.get(name) for name in ("class", "family", "placement", "causal", "blocks", "width", "parameters")
    }
    packages = {"title": trained.title, "kind": trained.kind, "packages": list(trained.packages)}
    return packages | known | {"inputs": trained.inputs, "texts": found}


def on(model: nn.Module, batch: dict[str, Tensor], mask: int | None) -> dict[str, Any]:
    """One batch: what a probe and the use of depth tell of it."""
    loss = None  # the model's own: of the next token, where it is causal
    if "answers" in batch:
        loss = partial(of_answers, batch.pop("answers"))
    elif mask is not None:
        batch, wanted = masked(batch, mask)
        loss = partial(of_hidden, wanted)
    scope = depthscope.Scope(model, batch)
    profile = scope.probe(measures="verdict")
    use = scope.depth(loss=loss, linear=False)
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
        "verdict": depthscope.diagnose(profile, depth=use).to_dict(),
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


if __name__ == "__main__":
    main()
