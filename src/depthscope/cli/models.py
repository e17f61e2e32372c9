"""From MODEL on the command line to a model in memory: a family's name, `hf:NAME_OR_FOLDER`, `module:factory`."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from depthscope.cli.completion import is_a_place, near_folder, unknown_model
from depthscope.cli.options import WeightOptions
from depthscope.cli.values import expanded
from depthscope.extras import MissingExtra, require
from depthscope.half_precision import require_half_precision
from depthscope.interruption import is_signal
from depthscope.naming import did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import nn

_COUNTS_LAYERS = re.compile(r"layers$|(?:^|_)n(?:um)?_layer$")  # num_hidden_layers, encoder_layers, n_layer
_MOST_LAYERS = 4096  # of a configuration: counting the weights of more takes minutes


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, and what came with it."""

    model: nn.Module
    inputs: Any = None  # from a factory
    tokenizer: Any = None  # from a folder or the hub
    notes: tuple[str, ...] = ()  # what a reader of the profile must know


def load_model(options: WeightOptions) -> LoadedModel:
    """The model that MODEL names, on the device and in the dtype asked for."""
    import torch

    from depthscope.models.families import FAMILIES, build_family
    from depthscope.offloading import has_offloaded

    dtype = chosen_dtype(options)
    try:  # with one number: a name can be right where there is no such machine
        device = torch.zeros(1, device=options.device).device
    except Exception:  # each kind of device fails in its own way
        device = torch.device("meta")
    if device.type == "meta":
        raise ValueError(f"expected a device of this machine, such as cpu, got {options.device!r}")
    if device.type == "cpu" and dtype is not None and dtype.itemsize == 2:
        require_half_precision()
    name = options.model
    if ":" not in name and name in FAMILIES:
        if getattr(FAMILIES[name], "library", "") == "transformers":
            silent_transformers()
        with_head = options.loss == "where there is one" and FAMILIES[name].causal
        shape = options.depth, options.width, options.heads
        more: Any = {} if dtype is None else {"dtype": dtype}
        loaded = LoadedModel(build_family(name, *shape, language_model=with_head, seed=options.seed, **more))
    else:
        refuse_a_shape(options)
        if name.startswith("states:"):
            raise ValueError(f"{name!r} has hidden states and no model: `depthscope probe` alone measures these")
        if ":" not in name:
            raise unknown_model(name, FAMILIES)
        is_hub = name.startswith("hf:")
        loaded = _from_hugging_face(name.removeprefix("hf:"), options) if is_hub else _from_factory(name, options.seed)
    if not has_offloaded(loaded.model):
        loaded.model.to(device=device, dtype=dtype)
    elif dtype is not None:
        raise ValueError(f"expected --dtype with a model that is in memory: the weights of {name!r} are offloaded")
    if any(weights.device.type == "cpu" and weights.dtype.itemsize == 2 for weights in loaded.model.parameters()):
        require_half_precision()
    loaded.model.eval()
    return loaded


def chosen_dtype(options: WeightOptions) -> torch.dtype | None:
    """The dtype asked for; None keeps the model's own."""
    import torch

    return None if options.dtype is None else getattr(torch, options.dtype)


def user_code_failed(what: str, error: BaseException) -> ValueError:
    """One line for an exception from code that is not ours, also for one that would end Python, as `quit()` does.

    The traceback is one variable away. Ctrl-C is not the code's own, and raised again.
    """
    if is_signal(error):
        raise error
    return ValueError(f"{what} failed: {type(error).__name__}: {error} (DEPTHSCOPE_TRACEBACK=1 shows where)")


def refuse_a_shape(options: WeightOptions) -> None:
    for option in ("depth", "width", "heads"):
        if getattr(options, option) is not None:
            raise ValueError(f"expected --{option} with a family's name only: {options.model!r} has a shape of its own")


def silent_transformers() -> Any:
    """The package, silent: what matters of its warnings becomes notes of the profile."""
    transformers: Any = require("transformers", "huggingface")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


# --- hf: ----------------------------------------------------------------------------------------------


def _from_hugging_face(name: str, options: WeightOptions) -> LoadedModel:
    """A folder, or a name: from the cache if it is there, else from the hub."""
    folder = expanded(name)
    is_folder = bool(name) and folder.is_dir()
    if (folder.exists() or is_a_place(name)) and not is_folder:
        raise ValueError(f"expected hf: with a folder or a name on the hub, got {name!r}, which is none of them")
    transformers = silent_transformers()
    if is_folder:
        for path in folder.iterdir():
            if path.exists() and not (path.is_file() or path.is_dir()):
                raise ValueError(f"expected a file in {str(path)!r}, got a pipe or a device")
        if not (folder / "config.json").is_file():
            raise ValueError(f"expected a folder with a config.json, as save_pretrained writes it, got {name!r}")
        return _pretrained(transformers, str(folder), options, local=True)
    try:
        return _pretrained(transformers, name, options, local=True)
    except OSError:  # one question to the hub: `from_pretrained` would try for half a minute and fill the screen
        hub: Any = require("huggingface_hub", "huggingface")
        try:
            hub.HfApi().model_info(name, timeout=10)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise OSError(
                f"cannot get {name!r}: not in the local cache, and the hub says {reason!r}; "
                f"{near_folder(name)}check the name and the network, or give a local folder: hf:FOLDER"
            ) from None
    return _pretrained(transformers, name, options, local=False)


def _pretrained(transformers: Any, name: str, options: WeightOptions, *, local: bool) -> LoadedModel:
    import torch

    from depthscope.memory import count_parameters, counting, require_memory
    from depthscope.models.families import has_causal_loss
    from depthscope.value_spectra.from_disk import require_own_shards

    known = {"trust_remote_code": options.trust_remote_code, "local_files_only": local}
    dtype = chosen_dtype(options) or torch.float32
    try:
        described = transformers.PretrainedConfig.get_config_dict(name, **known)[0]
        depth = require_depth(described, repr(name))
        require_own_shards(name, described.get("transformers_weights"), **known)
        config = transformers.AutoConfig.from_pretrained(name, **known)
        auto = transformers.AutoModel
        causal = options.loss != "no" and has_causal_loss(config)
        if causal:
            auto = transformers.AutoModelForCausalLM
        build: Any = partial(auto.from_config, trust_remote_code=options.trust_remote_code)
        if options.loss == "where there is one" and not causal:  # an encoder's head predicts masked words, or classes
            named = getattr(transformers, str(next(iter(config.architectures or ()), "")), None)
            if getattr(named, "config_class", None) is type(config):
                auto = build = named
        with counting(f"the configuration of {name!r}"), torch.device("meta"):
            parameters = count_parameters(build(config))
        require_memory(parameters, dtype, what=f"{name!r} with {depth} layers", blocks=depth)
        model, info = auto.from_pretrained(
            name, config=config, dtype=dtype, weights_only=True, output_loading_info=True, **known
        )
        tokenizer = _tokenizer(transformers, name, known) if model.main_input_name == "input_ids" else None
    except (OSError, ValueError, MissingExtra):
        raise
    except Exception as error:
        if "ignore_mismatched_sizes" in str(error):
            raise ValueError(
                f"the weights in {name!r} do not fit its config.json: check that they belong together"
            ) from None
        if type(error).__name__ == "SafetensorError":
            raise ValueError(f"the weights in {name!r} are damaged or cut off ({error}): download them again") from None
        raise user_code_failed(f"loading {name!r}", error) from error
    missing = sorted(info["missing_keys"])
    if missing and not {key for key, _ in model.named_parameters(remove_duplicate=False)} - {*missing}:
        raise ValueError(
            f"expected the weights of {type(model).__name__} in {name!r}, got none of them: no name in the checkpoint "
            f"is one of the model's, such as {missing[0]!r}; check that config.json belongs to the weights"
        )
    notes = (f"not in the checkpoint, so random: {', '.join(missing)}",) if missing else ()
    return LoadedModel(model, tokenizer=tokenizer, notes=notes)


def _tokenizer(transformers: Any, name: str, known: dict[str, Any]) -> Any:
    """The model's tokenizer; None if there is none. Without files, a class may come back with special tokens only."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **known)
    except (OSError, ValueError, KeyError):
        return None
    return tokenizer if tokenizer.is_fast and set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) else None


def require_depth(described: Any, name: str) -> int:
    """The number of layers in a configuration file, before anything is made of it; what nobody can load is refused."""
    depth = max(_layers_in(described, name), default=0)
    if depth > _MOST_LAYERS:
        raise ValueError(f"expected a configuration of at most {_MOST_LAYERS} layers, got {name} with {depth} layers")
    return depth


def _layers_in(described: Any, name: str) -> Iterator[int]:
    for key, value in described.items() if isinstance(described, dict) else ():
        if type(value) in (int, float) and _COUNTS_LAYERS.search(key):
            if not math.isfinite(value):
                raise ValueError(f"expected a number of layers as {key} of {name}, got {value}")
            yield int(value)
        yield from _layers_in(value, name)


# --- module:factory -----------------------------------------------------------------------------------


def _from_factory(name: str, seed: int) -> LoadedModel:
    """Calls `factory()` in `module`, found from the current folder, for a model or (model, inputs).

    The global seed is set for the call and put back: `--seed` holds for models that draw from it.
    """
    import torch
    from torch import nn

    module_name, _, factory_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = import_module(module_name)
    except BaseException as error:
        raise user_code_failed(f"importing {module_name!r}", error) from error
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        hint = did_you_mean(factory_name, [key for key, value in vars(module).items() if callable(value)])
        raise ValueError(f"{hint}expected a function in {module_name!r} after the colon, got {factory_name!r}")
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            made = factory()
    except BaseException as error:
        raise user_code_failed(f"{name}()", error) from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected {name}() to return a model or (model, inputs), got {type(made).__name__}")
    return LoadedModel(model, inputs)
