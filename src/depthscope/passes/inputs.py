"""What a user hands in, as batches that the model takes: a tensor, a dict, strings, or an iterable of these."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthscope.offloading import device_of


class Batch(NamedTuple):
    """One call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(model: nn.Module, batch: Batch) -> Any:
    """One pass of the model. What is given is copied first: a pass may write into its inputs, or fill a cache of keys
    and values, or a dictionary of features, further."""

    def own(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone()
        if isinstance(value, dict):
            return {name: own(item) for name, item in value.items()}
        return copy.deepcopy(value) if hasattr(value, "get_seq_length") else value

    return model(*map(own, batch.args), **{name: own(value) for name, value in batch.kwargs.items()})


def call_alike(model: nn.Module, batch: Batch) -> Any:
    """As `call`, with the same random numbers each time, so that two passes of a model that draws some (dropout that is
    always on) can be compared. Only inside `undisturbed`, which restores the random state."""
    torch.manual_seed(0)
    random.seed(0)
    return call(model, batch)


Tokenizer = Callable[..., Mapping[str, Any]]


def batches(model: nn.Module, inputs: Any, tokenizer: Tokenizer | None = None) -> Iterator[Batch]:
    """The calls to make. A list of strings is one batch; a pair inside an iterable is (inputs, targets)."""
    device = device_of(model)
    for item in _items(inputs):
        yield _batch(model, item, tokenizer, device)


def _items(inputs: Any) -> Iterable[Any]:
    if isinstance(inputs, Tensor | Mapping | str) or _are_strings(inputs):
        return [inputs]
    if isinstance(inputs, tuple) and any(isinstance(item, Tensor) for item in inputs):
        raise ValueError(
            "a tuple of tensors could be a batch or several: pass a dict of the model's arguments, or a list"
        )
    if isinstance(inputs, Iterable):
        return (item[0] if isinstance(item, list | tuple) and not _are_strings(item) else item for item in inputs)
    raise TypeError(f"expected a tensor, a dict batch, strings, or an iterable of these, got {type(inputs).__name__}")


def _are_strings(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(item, str) for item in value)


def _batch(model: nn.Module, item: Any, tokenizer: Tokenizer | None, device: torch.device) -> Batch:
    if isinstance(item, str) or _are_strings(item):
        texts = [item] if isinstance(item, str) else list(item)
        if tokenizer is not None:
            item = dict(tokenizer(texts, return_tensors="pt", padding=len(texts) > 1, truncation=True))
        elif (features := features_of(model)) is not None:
            item = dict(features(texts))
        else:
            raise ValueError("these inputs are strings: pass tokenizer=, or token ids instead")
    if isinstance(item, Tensor):
        item = item.to(device)
        name = getattr(model, "main_input_name", None)
        batch = Batch((), {name: item}) if name else Batch((item,), {})
    elif isinstance(item, Mapping):
        named = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in item.items()}
        batch = Batch((), named) if features_of(model) is None else Batch((named,), {})
    else:
        raise TypeError(f"expected batches of tensors, dicts or strings, got {type(item).__name__}")
    batch = _with_decoder_inputs(model, batch)
    if "use_cache" in inspect.signature(model.forward).parameters:
        batch.kwargs.setdefault("use_cache", False)  # a cache of keys and values would grow with depth
    return batch


def features_of(model: nn.Module) -> Callable[[list[str]], Mapping[str, Any]] | None:
    """How a model of sentence-transformers, a sequence of modules that hand on one dictionary of features, makes these
    of texts; None for other models."""
    if not isinstance(model, nn.Sequential):
        return None
    return getattr(model, "preprocess", None) or getattr(model, "tokenize", None)


def _with_decoder_inputs(model: nn.Module, batch: Batch) -> Batch:
    """An encoder-decoder that was given one sequence reads it on both sides, with the same mask."""
    config = getattr(model, "config", None)
    kwargs = batch.kwargs
    has_own = not {"decoder_input_ids", "decoder_inputs_embeds", "labels"}.isdisjoint(kwargs)
    if getattr(config, "is_encoder_decoder", False) and "input_ids" in kwargs and not has_own:
        kwargs["decoder_input_ids"] = kwargs["input_ids"]
        if "attention_mask" in kwargs:
            kwargs.setdefault("decoder_attention_mask", kwargs["attention_mask"])
    return batch
