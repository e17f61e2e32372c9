"""Weights of a checkpoint read tensor by tensor, so that one larger than memory can be looked at.

The model is built without weights (PyTorch's meta device); whoever needs some of them has just these read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from depthscope.extras import require
from depthscope.files import read_json, require_own_file


class Checkpoint:
    """The safetensors files of a folder: which weights of a model are there, and one of them at a time."""

    def __init__(self, folder: Path, model: nn.Module):
        self.folder = folder
        self._where: dict[str, tuple[str, Path]] = {}
        rename = _renaming(model)
        for path in _files_of(folder):
            try:
                with safe_open(path, "pt") as file:
                    self._where |= {rename(name): (name, path) for name in file.keys()}  # noqa: SIM118
            except SafetensorError as error:
                raise ValueError(f"expected a safetensors file in {str(path)!r}, got one that is damaged or cut off: "
                                 f"{error}") from None  # fmt: skip

    def read(self, name: str, shape: torch.Size) -> Tensor:
        """One tensor, by its name in the model."""
        if name not in self._where:
            raise ValueError(
                f"expected {name!r} in the weights of {str(self.folder)!r}, got none of that name; "
                "load the model and pass it instead of its folder"
            )
        known, path = self._where[name]
        with safe_open(path, "pt") as file:
            part = file.get_slice(known)
            if list(part.get_shape()) != list(shape):
                raise ValueError(
                    f"expected {known!r} in {str(path)!r} to be {tuple(shape)} numbers, got {part.get_dtype()} "
                    f"{tuple(part.get_shape())}; check that config.json belongs to the weights"
                )
            tensor: Tensor = file.get_tensor(known)
        return tensor


def _renaming(model: nn.Module) -> Callable[[str], str]:
    """From names in a checkpoint to names in the model, as transformers does it when it loads one.

    Checkpoints are saved with and without the name of what stands around a model ("bert.", "model."), and models have
    been renamed since.
    """
    core: Any = require("transformers.core_model_loading", "huggingface")
    mapping: Any = require("transformers.conversion_mapping", "huggingface")
    changes = mapping.get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, core.WeightRenaming)]
    names = dict(model.named_parameters())
    prefix = getattr(model, "base_model_prefix", None)
    return lambda name: str(core.rename_source_key(name, renamings, [], prefix, names)[0])


def is_on_disk(folder: Path) -> bool:
    """Whether there are safetensors and a configuration in a folder."""
    return (folder / "config.json").is_file() and bool(_files_of(folder))


def _files_of(folder: Path) -> list[Path]:
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    return [whole] if whole.is_file() else files_in_index(index) if index.is_file() else []


def files_in_index(index: Path) -> list[Path]:
    """The files that the index of a checkpoint in several files names; refused if one is not a file of its folder.

    What is not there is not refused: it may be about to be downloaded, and whoever reads it says that it is missing.
    """
    try:
        names = list(dict.fromkeys(read_json(index)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"expected a list of weights and their files in {str(index)!r}, got another") from None
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or set("/\\\0") & set(name):
            raise ValueError(f"expected names of files beside it in {str(index)!r}, got {name!r}")
    paths = [index.parent / name for name in names]
    return [require_own_file(path) if os.path.lexists(path) else path for path in paths]


def require_own_shards(name: str, explicit: Any = None, **where: Any) -> None:
    """Refuses a checkpoint whose index names other files than its own: transformers opens what it names, be it
    /dev/zero. `name` is a folder or a name on the hub, `explicit` what the configuration calls its weights."""
    utils: Any = require("transformers.utils", "huggingface")
    usual = (utils.SAFE_WEIGHTS_INDEX_NAME, utils.WEIGHTS_INDEX_NAME)
    for index in (*usual, explicit) if str(explicit).endswith(".index.json") else usual:
        if "/" in index:
            raise ValueError(f"expected an index beside the configuration of {name!r}, got {index!r}")
        found = utils.cached_file(name, index, _raise_exceptions_for_missing_entries=False, **where)
        if found is not None:
            files_in_index(Path(found))


def empty_model(folder: Path, *, trust_remote_code: bool = False) -> nn.Module:
    """The model of a folder's configuration without its weights."""
    transformers: Any = require("transformers", "huggingface")
    own = {"trust_remote_code": trust_remote_code}
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, **own)
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModel.from_config(config, **own)
    except (OSError, ImportError, MemoryError):
        raise
    except Exception as error:  # whatever a configuration that does not fit makes of the library's code
        why = " ".join(str(error).split())
        raise ValueError(f"no model can be made of {str(folder / 'config.json')!r}: {why}") from None
    return model


class _Touched(TorchFunctionMode):
    """Notes the parameters that are used while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, nn.Parameter)}
        return func(*args, **(kwargs or {}))


@contextmanager
def filled(
    block: nn.Module, prefix: str, use: Callable[[], object], also: Iterable[nn.Module], checkpoint: Checkpoint
) -> Iterator[None]:
    """The weights of an empty block that `use` uses, and all of these modules, read from disk; nothing is kept."""
    with _Touched() as touched:
        use()
    wanted = touched.seen | {id(parameter) for module in also for parameter in module.parameters()}
    places = [
        (module, name, f"{prefix}.{path}.{name}" if path else f"{prefix}.{name}", parameter)
        for path, module in block.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and id(parameter) in wanted
    ]
    try:
        for module, name, key, parameter in places:
            module._parameters[name] = nn.Parameter(checkpoint.read(key, parameter.shape), requires_grad=False)
        yield
    finally:
        for module, name, _, parameter in places:
            module._parameters[name] = parameter
