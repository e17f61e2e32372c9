"""Batches for a model: text for what reads ids, images for what sees pixels, random tokens for a bare encoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, simplefilter

from depthscope.cli.models import LoadedModel
from depthscope.cli.options import ModelOptions
from depthscope.cli.sizes import require_pass
from depthscope.extras import require
from depthscope.text import Text, cut, read_text, require_length, train_tokenizer

if TYPE_CHECKING:
    from torch import Tensor, nn

BATCH = 8
_IN_ALL = 2**15  # tokens of all sequences: of longer ones there are fewer, unless --samples says how many
_IMAGE_ENDINGS = {".png", ".jpg", ".jpeg"}
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


@dataclass(frozen=True)
class Reread:
    """Batches that can be read any number of times, each cast as it is read."""

    batches: Iterable[Any]
    cast: Callable[[Any], Any]

    def __iter__(self) -> Iterator[Any]:
        return map(self.cast, self.batches)


def make_inputs(loaded: LoadedModel, options: ModelOptions) -> Inputs:
    """The batches for this model, still on the CPU. An option that does not fit the model is refused."""
    from depthscope.models import CausalLM, Encoder, VisionTransformer

    model: Any = loaded.model
    reads = getattr(model, "main_input_name", None)
    if loaded.inputs is not None:
        _refuse(options, "the factory brings its own input", "tokens", "samples", "batch", "text", "images")
        return _given(loaded.inputs, model, options)
    if isinstance(loaded.model, Encoder):
        _refuse(options, "an encoder reads random tokens", "text", "images")
        return _random_tokens(model, model.blocks[0].config.width, options)
    if reads == "pixel_values" or isinstance(model, VisionTransformer):
        _refuse(options, "the model sees images", "text", "tokens")
        return _images(model, options)
    if reads == "input_ids" or isinstance(model, CausalLM):
        _refuse(options, "the model reads text", "images")
        return _text(loaded, options)
    if reads is None:
        return _made_for_a_stranger(loaded, options)
    raise ValueError(
        f"expected a model that reads text, images or tokens, got {type(model).__name__}, which reads {reads}; "
        "let module:factory return (model, inputs)"
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


def _batches(options: ModelOptions, **tensors: Tensor) -> Inputs:
    """Cuts tensors of all samples into dictionaries of a batch each."""
    samples, batch = _shape(options)
    batches = [
        {name: tensor[first : first + batch] for name, tensor in tensors.items()} for first in range(0, samples, batch)
    ]
    return Inputs(batches, len(batches))


def _floats(model: nn.Module) -> Any:
    return next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())


def _noise(options: ModelOptions, *shape: int) -> Tensor:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(options.seed))


def _given(inputs: Any, model: nn.Module, options: ModelOptions) -> Inputs:
    """A factory's own input; its floating-point tensors take the dtype, if one was asked for."""
    import torch

    def cast(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.to(_floats(model)) if options.dtype and item.is_floating_point() else item
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
    return Inputs(list(map(cast, inputs)) if isinstance(inputs, Iterator) else Reread(inputs, cast), count)


def _random_tokens(model: nn.Module, width: int, options: ModelOptions) -> Inputs:
    from depthscope.memory import require_room

    samples, batch = _shape(options)
    tokens = options.usual_tokens if options.tokens is None else options.tokens
    what = f"{samples} samples of {tokens} tokens of width {width}"
    require_room(4 * samples * tokens * width, what, "give fewer --samples or --tokens")
    require_pass(model, options, batch=batch, tokens=tokens, width=width)
    made = _batches(options, x=_noise(options, samples, tokens, width).to(_floats(model)))
    return replace(made, metadata={"stand_in": "random normal tokens"})


# --- text ---------------------------------------------------------------------------------------------


def _text(loaded: LoadedModel, options: ModelOptions) -> Inputs:
    """Pieces of a text: spread over it with the model's own tokenizer, else the first ones, with one made for the text.

    What is normal at initialisation was measured on the first pieces of Python's manual.
    """
    import torch

    model: Any = loaded.model
    config: Any = getattr(model, "config", None)
    ours = config is None
    most = model.context if ours else _positions(config, loaded.tokenizer, is_random=":" not in options.model)
    usual = options.usual_tokens
    tokens = min(usual, most or usual) if options.tokens is None else options.tokens
    if most is not None and tokens > most:
        raise ValueError(f"expected at most {most} tokens, the model's positions, got --tokens {tokens}")
    width = model.embedding.embedding_dim if ours else getattr(config.get_text_config(), "hidden_size", 1)
    require_pass(model, options, batch=_shape(options)[1], tokens=tokens, width=width)
    text = _read_text(options, tokens)
    vocabulary = model.embedding.num_embeddings if ours else config.get_text_config().vocab_size
    tokenizer = loaded.tokenizer or train_tokenizer(text, vocabulary)
    ids = _ids(text, tokenizer, tokens, options, spread=loaded.tokenizer is not None)
    tensors = {"ids": ids} if ours else {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    made = _batches(options, **tensors)
    metadata: dict[str, Any] = {"text": {"source": text.source, "sha256": text.sha256}}
    if loaded.tokenizer is not None:
        return Inputs(made.batches, made.count, metadata, tokenizer=loaded.tokenizer)
    stand_in = "no tokenizer came with the model, and its ids are those of a WordPiece trained on the text"
    notes = (stand_in,) if options.model.startswith("hf:") else ()
    return Inputs(made.batches, made.count, metadata | {"stand_in": stand_in}, notes)


def _read_text(options: ModelOptions, tokens: int) -> Text:
    text = read_text(options.text)
    require_length(text, tokens, _shape(options)[0])  # before a tokenizer is made for it
    return text


def _ids(text: Text, tokenizer: Any, tokens: int, options: ModelOptions, *, spread: bool = False) -> Tensor:
    import torch

    return torch.tensor(cut(text, tokenizer, tokens, _shape(options)[0], spread=spread))


_ROTARY = ("rope_parameters", "rope_theta")  # where a configuration says how positions turn, in its two spellings


def _positions(config: Any, tokenizer: Any, *, is_random: bool) -> int | None:
    """How many tokens the model has positions for; None if there is no limit.

    Rotary positions have no table: the number in the configuration is what the weights were trained on, and random ones
    were trained on none.
    """
    text_config = config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    if is_random and any(hasattr(text_config, name) for name in _ROTARY):
        positions = None
    if not isinstance(positions, int) or positions < 1:
        positions = None
    elif config.model_type in _OFFSET_POSITIONS:
        positions -= config.pad_token_id + 1
    limits = [positions, getattr(tokenizer, "model_max_length", None)]
    known = [limit for limit in limits if limit is not None and limit < 10**9]  # no limit is a huge number there
    return min(known, default=None)


# --- a model of the user's own, that came without input -------------------------------------------------


def _made_for_a_stranger(loaded: LoadedModel, options: ModelOptions) -> Inputs:
    """Token ids for a model with an embedding, else random tokens of its width; refused if it does not take them."""
    from torch import nn

    from depthscope.hooks import undisturbed
    from depthscope.inputs import batches, call

    _refuse(options, "what it reads is not known; let module:factory return (model, inputs)", "images")
    model = loaded.model
    tokens = options.usual_tokens if options.tokens is None else options.tokens
    embeddings = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    if embeddings:
        text = _read_text(options, tokens)
        made = _batches(options, x=_ids(text, train_tokenizer(text, max(embeddings)), tokens, options))
        metadata = {"text": {"source": text.source, "sha256": text.sha256}}
        what, kind = f"token ids below {max(embeddings)}", "ids of a WordPiece trained on the text"
    else:
        _refuse(options, "it has no embedding of token ids", "text")
        made, metadata = _random_tokens(model, _width(model), options), {}
        what = kind = "random tokens"
    items = [_as_laid_out(model, batch["x"], options) for batch in made.batches]
    try:
        with undisturbed(model):
            call(model, next(batches(model, items)))
    except Exception as error:
        own = error.__cause__ or error  # which `call` has put into words
        raise ValueError(
            f"{options.model} returns a model alone, and it does not take {what} of shape {tuple(items[0].shape)} "
            f"({type(own).__name__}: {own}); give --tokens, or let it return (model, inputs)"
        ) from None
    return Inputs(items, made.count, metadata, (f"{options.model} brings no input: {kind} were made for it",))


def _width(model: nn.Module) -> int:
    """How wide a token is, from the first weights that act on one: a norm's, or a linear layer's."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            return int(module.embed_dim)
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            return int(module.normalized_shape[-1])
        if isinstance(module, nn.Linear):
            return int(module.in_features)
    raise ValueError(f"expected a model that reads tokens, got {type(model).__name__}; return (model, inputs)")


def _as_laid_out(model: nn.Module, x: Tensor, options: ModelOptions) -> Tensor:
    """(n, batch, …) for a model that is known to want it."""
    from depthscope.anatomy import anatomy_of

    return x.transpose(0, 1) if anatomy_of(model, options.blocks).token_axis == 0 else x


# --- images -------------------------------------------------------------------------------------------


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
    if options.images is None:
        pixels = _noise(options, samples, channels, *size)
    else:
        if channels != 3:
            raise ValueError(f"expected a model of colour images for --images, got one with {channels} channels")
        pixels = _read_images(options.images, samples, size)
    made = _batches(options, **{"images" if ours else "pixel_values": pixels.to(_floats(model))})
    noise = "random normal pixels"
    metadata = {"images": noise, "stand_in": noise} if options.images is None else {"images": str(options.images)}
    return Inputs(made.batches, made.count, metadata)


def _read_images(folder: Path, samples: int, size: tuple[int, ...]) -> Tensor:
    """→ (samples, 3, height, width), resized, with mean and deviation ½: from −1 to 1, as ViT was trained."""
    import numpy as np
    import torch

    image_module: Any = require("PIL.Image", "figures")
    if not folder.is_dir():
        raise ValueError(f"expected a folder of images, got {str(folder)!r}, which is no folder")
    found = (path for path in folder.iterdir() if path.suffix.lower() in _IMAGE_ENDINGS)
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
