"""What a user hands in, as batches that the model takes: a tensor, a dict, strings, or an iterable of these."""

from __future__ import annotations

import copy
import inspect
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthscope.offloading import device_of


class Batch(NamedTuple):
    """One call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def inputs(self) -> Any:
        """As a user hands it in: a dict, or one tensor."""
        return self.kwargs or (self.args[0] if self.args else {})


def call(model: nn.Module, batch: Batch) -> Any:
    """One pass of the model. What is given is copied first: a pass may write into its inputs, or fill a cache of keys
    and values, or a dictionary of features, further. A model that fails on its inputs is said in one line."""
    args, kwargs = list(map(_own, batch.args)), {name: _own(value) for name, value in batch.kwargs.items()}
    try:
        return model(*args, **kwargs)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, KeyError, AssertionError) as error:
        is_named = type(error).__module__ != "builtins"  # a class of somebody's own: they may want to catch it
        if is_named or _is_ours(error) or "allocate" in str(error) or "out of memory" in str(error):
            raise
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise ValueError(f"{type(model).__name__} fails on these inputs, {described(batch)}: {why}") from error


def _own(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _own(item) for name, item in value.items()}
    return copy.deepcopy(value) if hasattr(value, "get_seq_length") else value


def _is_ours(error: Exception) -> bool:
    """Whether a line of this library has raised it, and not one of PyTorch's functions that a listener has called."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    name = str(frame.f_globals.get("__name__", ""))
    listens = name == __name__ or frame.f_code.co_name == "__torch_function__"
    return isinstance(error, ValueError | TypeError) and name.startswith("depthscope.") and not listens


def described(given: Any) -> str:
    """The tensors in what a module is given, with what a model may not take: "int64 (2, 6) from 3 to 90"."""
    found = []
    for tensor in tensors_in(given):
        layout = str(tensor.layout).removeprefix("torch.")
        kind = str(tensor.dtype).removeprefix("torch.") + ("" if layout == "strided" else f" {layout}")
        counts = not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized or tensor.is_nested)
        ends = ""
        if counts and layout == "strided" and tensor.device.type == "cpu" and tensor.numel():
            ends = f" from {tensor.min().item()} to {tensor.max().item()}"
        found.append(f"{kind} nested" if tensor.is_nested else f"{kind} {tuple(tensor.shape)}{ends}")
    return ", ".join(found) or "without a tensor"


def tensors_in(given: Any) -> Iterator[Tensor]:
    """All tensors in tuples, lists and dictionaries."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping | tuple | list):
        for item in given.values() if isinstance(given, Mapping) else given:
            yield from tensors_in(item)


def call_alike(model: nn.Module, batch: Batch) -> Any:
    """As `call`, with the same random numbers each time, so that two passes of a model that draws some (dropout that is
    always on) can be compared. Only inside `undisturbed`, which restores the random state."""
    torch.manual_seed(0)
    random.seed(0)
    return call(model, batch)


def with_one_input_changed(batch: Batch, change: Callable[[Any], Tensor | None]) -> Iterator[Batch]:
    """The batch with `change(value)` in the place of one of its inputs, for every one that is not left as it is by
    None; masks and positions stay."""
    for index, value in enumerate(batch.args):
        if (new := change(value)) is not None:
            yield Batch((*batch.args[:index], new, *batch.args[index + 1 :]), batch.kwargs)
    for name, value in batch.kwargs.items():
        if "mask" not in name and "position" not in name and (new := change(value)) is not None:
            yield Batch(batch.args, batch.kwargs | {name: new})


def other_numbers(value: Tensor) -> Tensor:
    """Other tokens of the same kind. A norm would not see value + 1."""
    return 1 - value if value.is_floating_point() else torch.where(value > 0, value - 1, value + 1)


Tokenizer = Callable[..., Mapping[str, Any]]


def batches(
    model: nn.Module, inputs: Any, tokenizer: Tokenizer | None = None, modules: list[nn.Module] | None = None
) -> Iterator[Batch]:
    """The calls to make. A list of strings is one batch; a pair inside an iterable is (inputs, targets). `modules`:
    all of the model's, where somebody has listed them already."""
    if isinstance(inputs, Tensor | Mapping | str) or _are_strings(inputs):
        inputs = [inputs]
    elif isinstance(inputs, tuple) and any(isinstance(item, Tensor) for item in inputs):
        raise ValueError(
            "a tuple of tensors could be a batch or several: pass a dict of the model's arguments, or a list"
        )
    elif not isinstance(inputs, Iterable):
        got = type(inputs).__name__
        raise TypeError(f"expected a tensor, a dict batch, strings, or an iterable of these, got {got}")
    device = device_of(model, modules)
    for item in inputs:
        is_pair = isinstance(item, list | tuple) and item and not _are_strings(item)
        yield _batch(model, item[0] if is_pair else item, tokenizer, device)


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
    _refuse_unreadable(item)
    if isinstance(item, Tensor):
        item = item.to(device)
        name = getattr(model, "main_input_name", None)
        batch = Batch((), {name: item}) if name else Batch((item,), {})
    elif isinstance(item, Mapping):
        named = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in item.items()}
        batch = Batch((), named) if features_of(model) is None else Batch((named,), {})
    else:
        empty = "an empty " if isinstance(item, list | tuple) and not item else ""
        got = f"{empty}{type(item).__name__}"
        raise TypeError(f"expected batches of tensors, dicts or strings, got {got}")
    kwargs = batch.kwargs
    has_own = not {"decoder_input_ids", "decoder_inputs_embeds", "labels"}.isdisjoint(kwargs)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and "input_ids" in kwargs and not has_own:
        kwargs["decoder_input_ids"] = kwargs["input_ids"]  # one sequence is read on both sides, with the same mask
        if "attention_mask" in kwargs:
            kwargs.setdefault("decoder_attention_mask", kwargs["attention_mask"])
    if "use_cache" in inspect.signature(model.forward).parameters:
        kwargs.setdefault("use_cache", False)  # a cache of keys and values would grow with depth
    return batch


def _refuse_unreadable(item: Any) -> None:
    """Nothing can be measured of no sequence, of no token, of tensors without numbers; ragged ones are read padded."""
    given = list(tensors_in(item))
    for tensor in given:
        if tensor.is_nested:
            raise ValueError("expected sequences of one length, got a nested tensor: pad it, and pass a mask")
        if tensor.is_meta:
            raise ValueError(
                f"expected inputs with numbers, got {described(tensor)} on the meta device, which has none"
            )
    if given and all(0 in tensor.shape for tensor in given):
        shape = tuple(given[0].shape)
        raise ValueError(f"expected at least one sequence of at least one token, got inputs of shape {shape}")


def features_of(model: nn.Module) -> Callable[[list[str]], Mapping[str, Any]] | None:
    """How a model of sentence-transformers, a sequence of modules that hand on one dictionary of features, makes these
    of texts; None for other models."""
    if not isinstance(model, nn.Sequential):
        return None
    return getattr(model, "preprocess", None) or getattr(model, "tokenize", None)
