"""From a configuration to its task: the data is loaded here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from depthscope_lab.training.characters import CharacterModelling, load_characters
from depthscope_lab.training.config import CharacterConfig, ImageConfig, LanguageConfig, TrainingConfig
from depthscope_lab.training.data.cifar10 import TEST, TRAINING, load_cifar10
from depthscope_lab.training.data.labelled import DIGITS_TEST, DIGITS_TRAINING, LabelledImages, load_digits
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


def make_task(config: TrainingConfig, data: str | None = None, *, empty: bool = False) -> Task:
    """The task of a configuration. `data`: where its data is, if it does not come with a library.

    `empty`: for sizes and counts, on the meta device: CIFAR-10 and WikiText-103 as they are when complete, not read.
    """
    if config.recipe in RECIPES and (own := RECIPES[config.recipe].task) is not None:
        if config.evaluate_on != "test":
            raise ValueError(f"{config.recipe} has a task of its own: none of its training data can be held back")
        return own(config, data)
    if isinstance(config, ImageConfig) and config.dataset == "cifar10":
        if not empty:
            return ImageClassification(config, load_cifar10(data))
        return ImageClassification(replace(config, augment=False), _no_images(TRAINING, TEST, 3, 32))
    if isinstance(config, LanguageConfig) and config.dataset == "wikitext103":
        if not empty:
            return LanguageModelling(config, load_wikitext((data or WIKITEXT103).removeprefix("hf:")))
        words = Vocabulary(tuple(map(str, range(WIKITEXT103_WORDS))))
        lengths = (WIKITEXT103_TOKENS, config.eval_rows * 2)
        train, held_out = (np.broadcast_to(np.int32(0), (length,)) for length in lengths)
        return LanguageModelling(config, Corpus(config.dataset, words, train, held_out, held_out, fingerprint=""))
    if data is not None:
        others = f"; for WikiText take txl-wikitext103 --data {data}" if isinstance(config, LanguageConfig) else ""
        raise ValueError(f"{config.recipe} brings its data: leave --data out{others}")
    if isinstance(config, ImageConfig):
        none = _no_images(DIGITS_TRAINING, DIGITS_TEST, 1, 8) if empty else load_digits()
        return ImageClassification(config, none)
    if isinstance(config, LanguageConfig):
        return LanguageModelling(config, load_manual())  # small, and every Python has its own
    if isinstance(config, CharacterConfig):
        return CharacterModelling(config, load_characters())
    raise ValueError(f"no task is known for {type(config).__name__}")


def _no_images(train: int, test: int, channels: int, size: int) -> LabelledImages:
    images = [torch.empty(count, channels, size, size, dtype=torch.uint8, device="meta") for count in (train, test)]
    labels = [torch.empty(count, dtype=torch.int64, device="meta") for count in (train, test)]
    half = (0.5,) * channels
    return LabelledImages("empty", images[0], labels[0], images[1], labels[1], white=1, mean=half, std=half)
