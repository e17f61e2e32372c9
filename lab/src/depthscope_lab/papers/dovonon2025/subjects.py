"""The models that the studies of Dovonon et al. look at: fresh ones, MiniLM, and what a user has in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from depthscope.models.families import build_family
from depthscope.text import Text, cut, train_tokenizer
from depthscope_lab.extras import require
from depthscope_lab.papers.dong2021.pretrained import Pretrained, given, minilm

FRESH = {"bert": "BERT", "vit": "ViT", "gpt2": "GPT-2", "llama": "Llama-like"}
_VOCABULARY = 28_000  # below those of all families


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


def ids_of(text: Text, tokens: int, samples: int) -> dict[str, Tensor]:
    """Pieces spread over the text, by a tokenizer made for it: for models that have no tokenizer of their own."""
    return as_batch(torch.tensor(cut(text, train_tokenizer(text, _VOCABULARY), tokens, samples, spread=True)))


def as_batch(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def photographs(samples: int, side: int = 224) -> dict[str, Tensor]:
    """Squares of the two photographs that come with scikit-learn (a temple, a flower), in turn: (samples, 3, s, s).

    Cut at places spread over each photograph, at its full height, and scaled to mean 0 and deviation 1.
    """
    images = require("sklearn.datasets").load_sample_images().images  # 427 × 640 × 3
    found = []
    for sample in range(samples):
        image = torch.tensor(images[sample % len(images)]).permute(2, 0, 1).float()
        _, height, width = image.shape
        left = (width - height) * (sample // len(images)) // max(1, (samples - 1) // len(images))
        found.append(image[:, :, left : left + height])
    pixels = F.interpolate(torch.stack(found), size=(side, side), mode="bilinear", antialias=True)
    return {"pixel_values": (pixels - pixels.mean()) / pixels.std()}


def pretrained(data: str | None) -> list[Pretrained]:
    """MiniLM where it is installed, and the models in a folder, or in the folders in it; refuses one without any."""
    return [*minilm(), *given(data, families=None)]


def loaded(found: Pretrained, text: Text, tokens: int, samples: int) -> Subject:
    """A pretrained model with text by its own tokenizer, or with photographs of its size."""
    model = found.load()
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        side = model.config.image_size
        batch = photographs(samples, side if isinstance(side, int) else side[0])
        return Subject(found.name, "pretrained", "vision", model, batch)
    return Subject(found.name, "pretrained", "language", model, as_batch(found.ids(text, tokens, samples)))
