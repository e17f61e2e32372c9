"""Batches for a model: text for what reads ids, images for what sees pixels, random tokens for a bare encoder.

What would not fit into this machine, or into a day, is refused before it is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, simplefilter

from depthscope.cli.models import LoadedModel, chosen_dtype
from depthscope.cli.options import ModelOptions, ProbeOptions
from depthscope.extras import require
from depthscope.text import cut, read_text, require_length, train_tokenizer

if TYPE_CHECKING:
    from torch import Tensor, nn

BATCH = 8
_IN_ALL = 2**15  # tokens of all sequences: of longer ones there are fewer, unless --samples says how many
_WIDE = 8  # token matrices of a block that are there at once: trunk, q, k, v, branch, and the FFN's, 4 × as wide
_EAGER = 2  # attention matrices of all heads that are there at once without fused kernels: scores, and their softmax
_LONGEST_ATTENTION = 65_536  # tokens: measures of attention sweep n² scores, at a quarter of that for a minute a head
_IMAGE_FORMATS = ("PNG", "JPEG")  # whatever a file is called: others start programs (EPS starts Ghostscript)
_OFFSET_POSITIONS = {"roberta", "xlm-roberta", "camembert", "mpnet"}  # their positions start after the padding's id


@dataclass(frozen=True)
class Inputs:
    """What the probe is given, and what its metadata say about it."""

    batches: Any
    count: int | None  # batches; None if only the factory knows
    metadata: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tokenizer: Any = None  # the model's own, which can spell the ids


def make_inputs(loaded: LoadedModel, options: ModelOptions) -> Inputs:
    """The batches for this model, still on the CPU. An option that does not fit the model is refused."""
    from depthscope.models import CausalLM, Encoder, VisionTransformer

    model: Any = loaded.model
    reads = getattr(model, "main_input_name", None)
    if loaded.inputs is not None:
        _refuse(options, "the factory brings its own input", "tokens", "samples", "batch", "text", "images")
        return _from_factory(loaded.inputs, options)
    if isinstance(model, Encoder):
        _refuse(options, "an encoder reads random tokens", "text", "images")
        return _random_tokens(model, options)
    if reads == "pixel_values" or isinstance(model, VisionTransformer):
        _refuse(options, "the model sees images", "text", "tokens")
        return _images(model, options)
    if reads == "input_ids" or isinstance(model, CausalLM):
        _refuse(options, "the model reads text", "images")
        return _text(loaded, options)
    raise ValueError(
        f"expected a model whose input is known, got {type(model).__name__}: let module:factory return (model, inputs)"
    )


def _refuse(options: ModelOptions, because: str, *names: str) -> None:
    for name in names:
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} does not fit {options.model!r}: {because}")


def _shape(options: ModelOptions) -> tuple[int, int]:
    """Sequences in all, and at a time."""
    fitting = max(_IN_ALL // (options.tokens or options.usual_tokens), 1)
    samples = min(options.usual_samples, fitting) if options.samples is None else options.samples
    return samples, min(samples, BATCH if options.batch is None else options.batch)


def _batches(options: ModelOptions, metadata: dict[str, Any], **tensors: Tensor) -> Inputs:
    """Cuts tensors of all samples into dictionaries of a batch each."""
    samples, batch = _shape(options)
    starts = range(0, samples, batch)
    batches = [{name: tensor[first : first + batch] for name, tensor in tensors.items()} for first in starts]
    return Inputs(batches, len(batches), metadata)


def _noise(model: nn.Module, options: ModelOptions, *shape: int) -> Tensor:
    import torch

    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return torch.randn(*shape, generator=torch.Generator().manual_seed(options.seed)).to(dtype)


def _from_factory(inputs: Any, options: ModelOptions) -> Inputs:
    """A factory's own input; its floating-point tensors take the dtype, if one was asked for."""
    import torch

    dtype = chosen_dtype(options)

    def cast(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.to(dtype) if dtype is not None and item.is_floating_point() else item
        if hasattr(item, "items"):
            return {key: cast(value) for key, value in item.items()}
        return [cast(value) for value in item] if isinstance(item, list | tuple) else item

    if isinstance(inputs, torch.Tensor) or hasattr(inputs, "items"):
        return Inputs(cast(inputs), 1)
    if not isinstance(inputs, Iterable) or isinstance(inputs, str):
        kind = type(inputs).__name__
        raise ValueError(f"expected a tensor, a dictionary or an iterable of batches from the factory, got {kind}")
    count = len(inputs) if isinstance(inputs, Sized) else None
    # They are read again for the remedy and for a loss: what can be read once only is kept.
    return Inputs(list(map(cast, inputs)) if dtype is not None or isinstance(inputs, Iterator) else inputs, count)


def _random_tokens(model: Any, options: ModelOptions) -> Inputs:
    from depthscope.memory import require_room

    samples, batch = _shape(options)
    width = model.blocks[0].config.width
    tokens = options.usual_tokens if options.tokens is None else options.tokens
    what = f"{samples} samples of {tokens} tokens of width {width}"
    require_room(4 * samples * tokens * width, what, "give fewer --samples or --tokens")
    _require_pass(model, options, batch, tokens, width)
    noise = _noise(model, options, samples, tokens, width)
    return _batches(options, {"stand_in": "random normal tokens"}, x=noise)


def _require_pass(model: nn.Module, options: ModelOptions, batch: int, tokens: int, width: int) -> None:
    """Refuses what the kernel would kill: one batch through one block; and measures of attention that take days.

    The numbers are on the low side: what is refused would not have fitted. Attention matrices of all heads are there
    at once in an eager implementation, or where a bias of relative positions is added to them.
    """
    from depthscope.measures import MEASURES, choose_measures
    from depthscope.memory import require_room

    config: Any = getattr(model, "config", None)
    what, entries = f"{batch} × {tokens} tokens (--batch, --tokens) of width {width}", _WIDE * batch * tokens * width
    eager = getattr(config, "_attn_implementation", None) == "eager"
    if eager or getattr(config, "relative_attention_num_buckets", None):
        heads = getattr(config.get_text_config(), "num_attention_heads", 1)
        entries += _EAGER * batch * heads * tokens**2
        what += f", with attention matrices of {heads} heads"
    require_room(entries * next(model.parameters()).element_size(), what, "give fewer --tokens or a smaller --batch")
    chosen = choose_measures(options.measures) if isinstance(options, ProbeOptions) else ()
    if tokens > _LONGEST_ATTENTION and (swept := [name for name in chosen if MEASURES[name].of == "attention"]):
        raise ValueError(
            f"expected at most {_LONGEST_ATTENTION} tokens for {swept[0]} and other measures of attention, whose "
            f"time grows with the square of the tokens, got --tokens {tokens}: give fewer, or --measures light"
        )


def _text(loaded: LoadedModel, options: ModelOptions) -> Inputs:
    """Pieces of a text: spread over it with the model's own tokenizer, else the first ones, with one made for the text.

    What is normal at initialisation was measured on the first pieces of Python's manual.
    """
    import torch

    model: Any = loaded.model
    config: Any = getattr(model, "config", None)
    if config is None:
        most, width, vocabulary = model.context, model.embedding.embedding_dim, model.embedding.num_embeddings
    else:
        about = config.get_text_config()
        most, width, vocabulary = _positions(loaded, options), getattr(about, "hidden_size", 1), about.vocab_size
    usual, (samples, batch) = options.usual_tokens, _shape(options)
    tokens = min(usual, most or usual) if options.tokens is None else options.tokens
    if most is not None and tokens > most:
        raise ValueError(f"expected at most {most} tokens, the model's positions, got --tokens {tokens}")
    _require_pass(model, options, batch, tokens, width)
    text = read_text(options.text)
    require_length(text, tokens, samples)  # before a tokenizer is made for it
    own = loaded.tokenizer
    ids = torch.tensor(cut(text, own or train_tokenizer(text, vocabulary), tokens, samples, spread=own is not None))
    tensors = {"ids": ids} if config is None else {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    metadata: dict[str, Any] = {"text": {"source": text.source, "sha256": text.sha256}}
    stand_in = "no tokenizer came with the model, and its ids are those of a WordPiece trained on the text"
    if own is None:
        metadata["stand_in"] = stand_in
    made = _batches(options, metadata, **tensors)
    notes = (stand_in,) if own is None and options.model.startswith("hf:") else ()
    return Inputs(made.batches, made.count, metadata, notes, own)


def _positions(loaded: LoadedModel, options: ModelOptions) -> int | None:
    """How many tokens the model has positions for; None if there is no limit.

    Rotary positions have no table: the number in the configuration is what the weights were trained on, and random ones
    were trained on none.
    """
    config: Any = loaded.model.config
    about = config.get_text_config()
    positions = getattr(about, "max_position_embeddings", None)
    is_rotary = any(hasattr(about, name) for name in ("rope_parameters", "rope_theta"))  # its two spellings
    if not isinstance(positions, int) or positions < 1 or (is_rotary and ":" not in options.model):
        positions = None
    elif config.model_type in _OFFSET_POSITIONS:
        positions -= config.pad_token_id + 1
    limits = [positions, getattr(loaded.tokenizer, "model_max_length", None)]
    return min((limit for limit in limits if limit is not None and limit < 10**9), default=None)  # huge: no limit


def _images(model: Any, options: ModelOptions) -> Inputs:
    """The first images of a folder, by name, or random normal pixels."""
    from depthscope.memory import require_room

    ours = getattr(model, "config", None) is None
    if ours:
        channels, patch = model.embed.in_channels, model.embed.kernel_size[0]
        patches = model.positions.shape[1] - (model.class_token is not None)
        size = (patch * round(patches**0.5),) * 2
    else:
        channels, sides = model.config.num_channels, model.config.image_size
        size = (sides, sides) if isinstance(sides, int) else tuple(sides)
    samples, _ = _shape(options)
    what = f"{samples} images of {' × '.join(map(str, size))} pixels"
    require_room(4 * samples * channels * math.prod(size), what, "give fewer --samples")
    pixels = _noise(model, options, samples if options.images is None else 1, channels, *size)
    metadata = {"images": "random normal pixels", "stand_in": "random normal pixels"}
    if options.images is not None:
        if channels != 3:
            raise ValueError(f"expected a model of colour images for --images, got one with {channels} channels")
        pixels, metadata = _read_images(options.images, samples, size).to(pixels.dtype), {"images": str(options.images)}
    return _batches(options, metadata, **{"images" if ours else "pixel_values": pixels})


def _read_images(folder: Path, samples: int, size: tuple[int, ...]) -> Tensor:
    """→ (samples, 3, height, width), resized, with mean and deviation ½: from −1 to 1, as ViT was trained."""
    import numpy as np
    import torch

    image_module: Any = require("PIL.Image", "figures")
    if not folder.is_dir():
        raise ValueError(f"expected a folder of images, got {str(folder)!r}, which is no folder")
    found = (path for path in folder.iterdir() if path.suffix.lower() in (".png", ".jpg", ".jpeg"))
    paths = sorted(path for path in found if path.is_file())  # a pipe has no end
    if len(paths) < samples:
        raise ValueError(
            f"expected at least {samples} images (png, jpg) in {str(folder)!r}, got {len(paths)}; "
            "add images or give fewer --samples"
        )
    height, width = size
    bombs = (image_module.DecompressionBombError, image_module.DecompressionBombWarning)
    pixels = torch.empty(samples, 3, height, width)
    for row, path in zip(pixels, paths, strict=False):
        try:
            with catch_warnings():
                simplefilter("error", image_module.DecompressionBombWarning)  # of sizes that no photograph has
                with image_module.open(path, formats=_IMAGE_FORMATS) as image:
                    small = image.convert("RGB").resize((width, height))
        except (OSError, SyntaxError, ValueError, *bombs) as error:
            reason = "it is neither" if isinstance(error, image_module.UnidentifiedImageError) else error
            raise ValueError(
                f"expected a PNG or JPEG image in {str(path)!r}, but it cannot be read: {reason}"
            ) from None
        row.copy_(torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1).float() / 127.5 - 1)
    return pixels
