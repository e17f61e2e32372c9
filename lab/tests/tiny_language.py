"""A language model that trains in milliseconds, on random words."""

from typing import Any

import torch

from depthscope_lab.training.config import LanguageConfig
from depthscope_lab.training.data.token_stream import Vocabulary
from depthscope_lab.training.data.wikitext import Corpus
from depthscope_lab.training.language import LanguageModelling
from depthscope_lab.training.recipes import txl_manual
from samples import seeded

WORDS = 13
SPLITS = (("train", 4 * 29), ("valid", 70), ("test", 70))


def corpus() -> Corpus:
    """Six segments of five tokens in each of four rows, the last one shorter."""
    draw = {name: torch.randint(WORDS, (length,), generator=seeded(length)).int().numpy() for name, length in SPLITS}
    return Corpus("random words", Vocabulary(tuple(map(str, range(WORDS)))), **draw, fingerprint="none")


def small(variant: str = "deescalated", **changes: Any) -> LanguageConfig:
    shape = {"depth": 2, "width": 16, "ffn_width": 24, "heads": 2, "batch_size": 4, "segment": 5, "memory": 4}
    reading = {"eval_rows": 3, "eval_segment": 4, "eval_memory": 6, "eval_clamp": 5, "hidden_segments": 2}
    return txl_manual(variant).changed(**shape | reading | {"steps": 9, "lr": 1e-2} | changes)


def task_of(config: LanguageConfig) -> LanguageModelling:
    return LanguageModelling(config, corpus())
