"""Weights of a checkpoint read tensor by tensor, so that one larger than memory can be looked at.

The model is built without weights (PyTorch's meta device); whoever needs some of them has just these read. Files are
read at the place of a tensor and not mapped: a mapped file counts against the limit of a process's address space.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from depthscope.extras import require
from depthscope.files import read_json, require_own_file

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}
_MOST_HEADER = 100 << 20  # bytes: what the format allows


class Checkpoint:
    """The safetensors files of a folder: which weights of a model are there, and one of them at a time."""

    def __init__(self, folder: Path, model: nn.Module):
        self.folder = folder
        self._where: dict[str, tuple[str, Path, dict[str, Any], int]] = {}
        rename = _renaming(model)
        for path in _files_of(folder):
            header, start = _header(path)
            for name, about in header.items():
                if name != "__metadata__":
                    self._where[rename(name)] = name, path, about, start

    def read(self, name: str, shape: torch.Size) -> Tensor:
        """One tensor, by its name in the model."""
        if name not in self._where:
            raise ValueError(
                f"expected {name!r} in the weights of {str(self.folder)!r}, got none of that name; "
                "load the model and pass it instead of its folder"
            )
        known, path, about, start = self._where[name]
        dtype = _DTYPES.get(about["dtype"])
        if dtype is None or list(about["shape"]) != list(shape):
            raise ValueError(
                f"expected {known!r} in {str(path)!r} to be {tuple(shape)} numbers, got {about['dtype']} "
                f"{tuple(about['shape'])}; check that config.json belongs to the weights"
            )
        first, last = about["data_offsets"]
        if last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{str(path)!r} is damaged: {known!r} has {last - first} bytes")
        buffer = bytearray(last - first)
        with path.open("rb") as file:
            file.seek(start + first)
            if file.readinto(buffer) != len(buffer):
                raise ValueError(f"{str(path)!r} ends before {known!r} does: it is damaged")
        return torch.frombuffer(buffer, dtype=dtype).view(shape) if buffer else torch.empty(shape, dtype=dtype)


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
    index = folder / "model.safetensors.index.json"
    if (whole := folder / "model.safetensors").is_file():
        return [whole]
    if index.is_file():
        return files_in_index(index)
    return []


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


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """What stands where in a safetensors file, and where its data begins."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MOST_HEADER:
                raise ValueError
            header = json.loads(file.read(length))
        size = path.stat().st_size - 8 - length
        offsets = [about["data_offsets"] for name, about in header.items() if name != "__metadata__"]
        if any(not 0 <= first <= last <= size for first, last in offsets):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"expected a safetensors file in {str(path)!r}, got one that is damaged or cut off") from None
    return header, 8 + length


def empty_model(folder: Path, *, trust_remote_code: bool = False) -> nn.Module:
    """The model of a folder's configuration without its weights."""
    transformers: Any = require("transformers", "huggingface")
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModel.from_config(config, trust_remote_code=trust_remote_code)
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
