"""From MODEL on the command line to a model in memory: a family's name, `hf:NAME_OR_FOLDER`, `module:factory`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthscope.cli.completion import is_a_place, near_folder, unknown_model, unknown_module
from depthscope.cli.options import WeightOptions
from depthscope.cli.values import expanded
from depthscope.extras import MissingExtra, require
from depthscope.files import read_json
from depthscope.half_precision import require_half_precision
from depthscope.interruption import is_signal
from depthscope.naming import did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, and what came with it."""

    model: nn.Module
    inputs: Any = None  # from a factory
    tokenizer: Any = None  # from a folder or the hub
    notes: tuple[str, ...] = ()  # what a reader of the profile must know


def load_model(options: WeightOptions) -> LoadedModel:
    """The model that MODEL names, on the device and in the dtype asked for."""
    from depthscope.models.families import FAMILIES, build_family
    from depthscope.offloading import has_offloaded

    device, dtype = chosen_device(options), chosen_dtype(options)
    if device.type == "cpu" and dtype is not None and dtype.itemsize == 2:
        require_half_precision()
    name = options.model
    if ":" not in name and name in FAMILIES:
        if getattr(FAMILIES[name], "library", "") == "transformers":
            quiet_transformers()
        model = build_family(
            name,
            options.depth,
            options.width,
            options.heads,
            language_model=options.loss == "required"
            or (options.loss == "where there is one" and FAMILIES[name].causal),
            seed=options.seed,
            **({} if dtype is None else {"dtype": dtype}),
        )
        loaded = LoadedModel(model)
    else:
        refuse_a_shape(options)
        if name.startswith("states:"):
            raise ValueError(f"{name!r} has hidden states and no model: `depthscope probe` alone measures these")
        if name.startswith("hf:"):
            loaded = _from_hugging_face(name.removeprefix("hf:"), options)
        elif ":" in name:
            loaded = _from_factory(name, options.seed)
        else:
            raise unknown_model(name, FAMILIES)
    if not has_offloaded(loaded.model):
        loaded.model.to(device=device, dtype=dtype)
    elif dtype is not None:
        raise ValueError(f"expected --dtype with a model that is in memory: the weights of {name!r} are offloaded")
    if any(weights.device.type == "cpu" and weights.dtype.itemsize == 2 for weights in loaded.model.parameters()):
        require_half_precision()
    loaded.model.eval()
    return loaded


def chosen_device(options: WeightOptions) -> torch.device:
    """The device, tried with one number: a name can be right where there is no such machine."""
    import torch

    try:
        device = torch.device(options.device)
        torch.zeros(1, device=device)
    except Exception:  # each kind of device fails in its own way
        device = torch.device("meta")
    if device.type == "meta":
        raise ValueError(f"expected a device of this machine, such as cpu, got {options.device!r}") from None
    return device


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


def quiet_transformers() -> Any:
    """The package, silent: what matters of its warnings becomes notes of the profile."""
    transformers: Any = require("transformers", "huggingface")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


# --- hf: ----------------------------------------------------------------------------------------------


def _from_hugging_face(name: str, options: WeightOptions) -> LoadedModel:
    """A folder, a GGUF file, or a name: from the cache if it is there, else from the hub."""
    folder = expanded(name)
    _refuse_pipes(folder)
    is_gguf, is_folder = folder.is_file() and folder.suffix == ".gguf", bool(name) and folder.is_dir()
    if (folder.exists() or is_a_place(name)) and not (is_gguf or is_folder):
        raise ValueError(
            f"expected hf: with a folder, a GGUF file or a name on the hub, got {name!r}, which is none of them"
        )
    transformers = quiet_transformers()
    if is_gguf:
        _require_gguf()
        file = {"gguf_file": folder.name, "local_files_only": True}
        return _pretrained(transformers, str(folder.parent), options, **file)
    if is_folder:
        inside, notes = _in_sentence_transformer(folder)
        _refuse_pipes(inside)
        if not (inside / "config.json").is_file():
            raise ValueError(f"expected a folder with a config.json, as save_pretrained writes it, got {name!r}")
        loaded = _pretrained(transformers, str(inside), options, local_files_only=True)
        return replace(loaded, notes=(*loaded.notes, *notes))
    try:
        return _pretrained(transformers, name, options, local_files_only=True)
    except OSError:
        _ask_the_hub(name)
    return _pretrained(transformers, name, options, local_files_only=False)


def _refuse_pipes(folder: Path) -> None:
    """A pipe or a device has no end: reading it would wait for ever."""
    for path in folder.iterdir() if folder.is_dir() else [folder]:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"expected a file in {str(path)!r}, got a pipe or a device")


def _in_sentence_transformer(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """Where the Transformer is in a folder that sentence-transformers saved, and what follows it; else the folder."""
    if not (folder / "modules.json").is_file():
        return folder, ()
    try:
        modules = read_json(folder / "modules.json")
        paths = {module["type"].rpartition(".")[2]: folder / module["path"] for module in modules}
        if any(not path.resolve().is_relative_to(folder.resolve()) for path in paths.values()):
            raise ValueError
        pooling = paths.get("Pooling", folder) / "config.json"
        how = read_json(pooling) if "Pooling" in paths and pooling.is_file() else {}
        averages = how.get("pooling_mode_mean_tokens") is True or "mean" in how.get("pooling_mode", ())
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(
            f"expected modules.json in {str(folder)!r} as sentence-transformers writes it, got another; remove it to "
            "load the folder as a plain model"
        ) from None
    note = "saved by sentence-transformers, which reads the mean of the last tokens: τ = 1 at the last output erases it"
    return paths.get("Transformer", folder), (note,) if averages else ()


def _require_gguf() -> None:
    try:
        import_module("gguf")
    except ModuleNotFoundError:
        raise MissingExtra("reading a GGUF file needs gguf: pip install 'gguf>=0.10'") from None


def _ask_the_hub(name: str) -> None:
    """One question to the hub: `from_pretrained` would try for half a minute and fill the screen."""
    hub: Any = require("huggingface_hub", "huggingface")
    try:
        hub.HfApi().model_info(name, timeout=10)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OSError(
            f"cannot get {name!r}: not in the local cache, and the hub says {reason!r}; "
            f"{near_folder(name)}check the name and the network, or give a local folder: hf:FOLDER"
        ) from None


def _pretrained(transformers: Any, name: str, options: WeightOptions, **where: Any) -> LoadedModel:
    import torch

    from depthscope.cli.sizes import require_depth, size_of
    from depthscope.memory import require_memory
    from depthscope.models.families import has_causal_loss
    from depthscope.value_spectra.from_disk import require_own_shards

    known = {"trust_remote_code": options.trust_remote_code, **where}
    dtype = chosen_dtype(options) or torch.float32
    try:
        if "gguf_file" not in where:
            described = transformers.PretrainedConfig.get_config_dict(name, **known)[0]
            require_depth(described, repr(name))
            require_own_shards(name, described.get("transformers_weights"), **known)
        config = transformers.AutoConfig.from_pretrained(name, **known)
        auto = transformers.AutoModel
        causal = options.loss != "no" and has_causal_loss(config)
        if options.loss == "required" and not causal:
            raise ValueError(f"expected a causal language model for --skip-loss, got {name!r} ({config.model_type})")
        if causal:
            auto = transformers.AutoModelForCausalLM
        build = partial(auto.from_config, trust_remote_code=options.trust_remote_code)
        if options.loss == "where there is one" and not causal and (named := _named_architecture(transformers, config)):
            auto = build = named
        depth, parameters = size_of(config, build, repr(name))
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


def _named_architecture(transformers: Any, config: Any) -> Any:
    """The class that config.json names, with its head: an encoder's predicts masked words, or classes. None if it
    names none of transformers that this configuration belongs to."""
    found = getattr(transformers, str(next(iter(getattr(config, "architectures", None) or ()), "")), None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model and getattr(found, "config_class", None) is type(config) else None


def _tokenizer(transformers: Any, name: str, known: dict[str, Any]) -> Any:
    """The model's tokenizer; None if there is none. Without files, a class may come back with special tokens only."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **known)
    except (OSError, ValueError, KeyError):
        return None
    return tokenizer if tokenizer.is_fast and set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) else None


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
        module = import_module(module_name) if module_name else None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise user_code_failed(f"importing {module_name!r}", error) from error
        module = None
    except BaseException as error:
        raise user_code_failed(f"importing {module_name!r}", error) from error
    if module is None:
        raise unknown_module(name)
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        meant = did_you_mean(factory_name, public).strip()
        got = f"{factory_name!r}; {meant}" if meant else f"{factory_name!r}"
        raise ValueError(f"expected a function in {module_name!r} after the colon, got {got}")
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
