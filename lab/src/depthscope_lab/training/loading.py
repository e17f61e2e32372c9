"""From a configuration to its task: the data is loaded here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from depthscope_lab.training.characters import CharacterModelling
from depthscope_lab.training.config import CharacterConfig, ImageConfig, LanguageConfig, TrainingConfig
from depthscope_lab.training.data import LabelledImages, load_cifar10, load_digits
from depthscope_lab.training.data.characters import load_characters
from depthscope_lab.training.data.cifar10 import TEST, TRAINING
from depthscope_lab.training.data.token_stream import Vocabulary
from depthscope_lab.training.data.wikitext import (
    WIKITEXT103,
    WIKITEXT103_TOKENS,
    WIKITEXT103_WORDS,
    Corpus,
    load_manual,
    load_wikitext,
)
from depthscope_lab.training.images import ImageClassification
from depthscope_lab.training.language import LanguageModelling
from depthscope_lab.training.recipes import RECIPES
from depthscope_lab.training.task import Task


def make_task(config: TrainingConfig, data: str | None = None, *, allow_incomplete: bool = False) -> Task:
    """The task of a configuration. `data`: where its data is, if it does not come with a library."""
    if (own := _own_task(config, data)) is not None:
        return own
    if isinstance(config, ImageConfig):
        if config.dataset == "digits":
            if data is not None or allow_incomplete:
                raise ValueError(f"{config.recipe} brings its data (scikit-learn's digits); leave --data out")
            return ImageClassification(config, load_digits())
        return ImageClassification(config, load_cifar10(data, allow_incomplete=allow_incomplete))
    if isinstance(config, LanguageConfig):
        if allow_incomplete:
            raise ValueError("--allow-incomplete is for vit-cifar10; leave it out")
        if config.dataset == "manual":
            if data is not None:
                raise ValueError(
                    f"{config.recipe} reads Python's manual; for WikiText take txl-wikitext103 --data {data}"
                )
            return LanguageModelling(config, load_manual())
        return LanguageModelling(config, load_wikitext((data or WIKITEXT103).removeprefix("hf:")))
    if isinstance(config, CharacterConfig):
        if data is not None or allow_incomplete:
            raise ValueError(f"{config.recipe} brings its data (Python's manual); leave --data out")
        return CharacterModelling(config, load_characters())
    raise ValueError(f"no task is known for {type(config).__name__}")


def make_empty_task(config: TrainingConfig) -> Task:
    """The same without its data, on the meta device: for sizes and counts, with nothing loaded.

    A recipe with a task of its own makes that one, without `data`.
    """
    if (own := _own_task(config, None)) is not None:
        return own
    if isinstance(config, ImageConfig):
        cifar = config.dataset == "cifar10"
        shape, train, test = ((3, 32, 32), TRAINING, TEST) if cifar else ((1, 8, 8), 1437, 360)
        images = [torch.empty(count, *shape, dtype=torch.uint8, device="meta") for count in (train, test)]
        labels = [torch.empty(count, dtype=torch.int64, device="meta") for count in (train, test)]
        channels = (0.5,) * shape[0]
        empty = LabelledImages(
            config.dataset, images[0], labels[0], images[1], labels[1], white=1, mean=channels, std=channels
        )
        return ImageClassification(replace(config, augment=False), empty)  # which needs pixels
    if isinstance(config, LanguageConfig):
        if config.dataset == "manual":  # small, and every Python has its own
            return LanguageModelling(config, load_manual())
        words = Vocabulary(tuple(map(str, range(WIKITEXT103_WORDS))))
        stream, held_out = (
            np.broadcast_to(np.int32(0), (count,)) for count in (WIKITEXT103_TOKENS, config.eval_rows * 2)
        )
        return LanguageModelling(config, Corpus(config.dataset, words, stream, held_out, held_out, fingerprint=""))
    if isinstance(config, CharacterConfig):
        return CharacterModelling(config, load_characters())  # small, and every Python has its own
    raise ValueError(f"no task is known for {type(config).__name__}")


def _own_task(config: TrainingConfig, data: str | None) -> Task | None:
    """The task that the recipe brings along; None if its data and model are of this package."""
    make = RECIPES[config.recipe].task if config.recipe in RECIPES else None
    if make is not None and config.evaluate_on != "test":
        raise ValueError(f"{config.recipe} has a task of its own: nothing of its training data can be held back for it")
    return None if make is None else make(config, data)
