"""A profile of hidden states that somebody has saved: no model runs, and one layer is in memory at a time.

A file has one sequence: safetensors or .npz with `hidden_states` [tokens, layers, width] and, if known, `token_ids`
[tokens], as vLLM writes them; or a .npz of one array per layer, whose names end in their numbers. The first layer is
what enters block 1. Pickles are refused: they run code.
"""

from __future__ import annotations

import math
import os
import platform
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from depthscope.anatomy import BlockAnatomy, Spot
from depthscope.files import require_file
from depthscope.hooks import Visit, full_precision
from depthscope.inputs import Batch
from depthscope.measures import MEASURES, choose_measures
from depthscope.memory import require_room
from depthscope.probing.driver import _excluded, _version
from depthscope.probing.finite import as_records, note
from depthscope.probing.measurement import Measurement
from depthscope.probing.poor_inputs import IdsSeen
from depthscope.probing.profile import Profile
from depthscope.progress import Tick

STATES, IDS = "hidden_states", "token_ids"
_LAYOUT = "hidden_states [tokens, layers, width]"
_OF_TOKENS = ("station", "tokens", "batch", "block", "step")  # what can be measured of states alone
_HEADER = 10_000  # characters of a numpy header


@dataclass(frozen=True)
class Layers:
    """The states of one batch: `layer(k)` gives the tokens (batch, n, d) of layer k, read when they are asked for."""

    name: str
    count: int
    layer: Callable[[int], Tensor]
    ids: Tensor | None = None  # (batch, n)
    real: Tensor | None = None  # (batch, n), true for real tokens; None: all are


def profile_of(
    states: Any,
    *,
    mask: Any = None,
    token_ids: Any = None,
    measures: str | Sequence[str] = "verdict",
    exclude_tokens: Any = None,
    causal: bool | None = None,
    tokenizer: Any = None,
    samples: int | None = None,
    progress: Tick | None = None,
) -> Profile:
    """Measures hidden states without their model: all measures of tokens, block by block.

    Args:
        states: a folder or a file of saved states; a list of arrays (n, d) or (batch, n, d), what enters block 1 and
            then the output of each block, of PyTorch, numpy or JAX; or one array [tokens, layers, width], perhaps in a
            dict with `token_ids`.
        mask: (batch, n) true for real tokens, of a list of arrays.
        token_ids: (n,) or (batch, n), of arrays.
        measures: as for `probe`; those of attention and of branches cannot be taken.
        exclude_tokens: positions, or "outliers", as for `probe`.
        causal: whether no token saw a later one, if you know it.
        tokenizer: spells outlier tokens.
        samples: read so many files of a folder, the first ones by name; None: all.
        progress: is called after every layer.

    Returns:
        A `Profile`, as `probe` returns it.

    Example:
        >>> import torch, depthscope
        >>> states = [torch.randn(2, 5, 16) for _ in range(4)]  # what entered, and three blocks
        >>> depthscope.profile_of(states).depth
        3
    """
    names = choose_measures(measures)
    taken = tuple(name for name in names if MEASURES[name].of in _OF_TOKENS)
    if not taken:
        raise ValueError(f"states show tokens alone: expected measures of these, got {', '.join(names)}")
    found, name = _found(states, mask, token_ids, samples)
    seen = _Seen(causal)
    measurement = Measurement(taken, frozenset({"output"}), _excluded(exclude_tokens), outliers=False)
    for layers in found:
        seen.see(layers, tokenizer)
        ids = {} if layers.ids is None else {"input_ids": layers.ids}
        measurement.begin(seen.samples, Batch((), ids), tokenizer)
        seen.samples += _pass(measurement, layers, seen, progress)
    missing = [name for name in names if name not in taken]
    notes = ["hidden states without a model: tokens are measured, and neither attention nor branches nor weights"]
    notes += [f"not seen in states: no {', '.join(missing)}"] if missing else []
    notes += note(measurement.not_finite, seen.samples)
    return Profile.of_readings(
        measurement.readings, seen.metadata(name, taken, measurement, notes, exclude_tokens), measurement.sinks
    )


def _pass(measurement: Measurement, layers: Layers, seen: _Seen, progress: Tick | None) -> int:
    """Goes through the layers, a second time where the first was not enough; returns the number of sequences."""
    while True:
        entered = layers.layer(0)
        batch, tokens, width = entered.shape
        seen.shape(layers.name, tokens, width, entered.dtype)
        for number in range(1, layers.count):
            left = layers.layer(number)
            if left.shape != entered.shape:
                raise ValueError(
                    f"{layers.name}: expected layers of one shape, got {tuple(entered.shape)} and {tuple(left.shape)}"
                )
            visit = Visit(number, _block(number), layers.real, entered.shape, entered, _cannot_run)
            with torch.no_grad(), full_precision(entered):
                if not measurement.has_passed(visit, entered):
                    measurement.see_tokens(visit, "input", entered, entered)
                measurement.see_tokens(visit, "output", left, left)
            entered = left
            if progress is not None and not measurement.again:
                progress()
        if not measurement.end(can_look_again=True):
            return batch


def _block(number: int) -> BlockAnatomy:
    module = nn.Identity()
    return BlockAnatomy(f"layer {number}", module, {"input": Spot(module, "in"), "output": Spot(module, "out")})


def _cannot_run(_tokens: Tensor) -> Tensor:
    raise ValueError("these are states without a model: no block can be run again")


@dataclass
class _Seen:
    """What is true of all states together."""

    causal: bool | None
    samples: int = 0
    blocks: int = 0
    tokens: int = 0
    width: int = 0
    dtype: str = ""
    ids: IdsSeen = field(default_factory=IdsSeen)

    def see(self, layers: Layers, tokenizer: Any) -> None:
        if layers.count < 2:
            raise ValueError(
                f"{layers.name}: expected two layers or more, what enters block 1 first, got {layers.count}"
            )
        if self.blocks and layers.count - 1 != self.blocks:
            raise ValueError(f"{layers.name}: expected {self.blocks + 1} layers, as before, got {layers.count}")
        self.blocks = layers.count - 1
        if layers.ids is not None:
            mask = {} if layers.real is None else {"attention_mask": layers.real}
            self.ids.see(tokenizer, self.ids.asked(Batch((), {"input_ids": layers.ids, **mask})))

    def shape(self, name: str, tokens: int, width: int, dtype: torch.dtype) -> None:
        if self.width and width != self.width:
            raise ValueError(f"{name}: expected tokens of width {self.width}, as before, got {width}")
        self.tokens, self.width = max(self.tokens, tokens), width
        self.dtype = str(dtype).removeprefix("torch.")

    def metadata(
        self, name: str, measures: tuple[str, ...], measurement: Measurement, notes: list[str], excluded: Any
    ) -> dict[str, Any]:
        """As of a probe, without what only a model has."""
        return {
            "model": name,
            "class": "states",
            "family": "states",
            "blocks": self.blocks,
            "parts": {},
            "towers": {},
            "shared_weights": False,
            "ids": self.ids.to_dict(),
            "tokens": self.tokens,
            "width": self.width,
            "samples": self.samples,
            "token_axis": 1,
            "placement": None,
            "final_norm": None,
            "causal": self.causal,
            "causal_by": "" if self.causal is None else "user",
            "right_to_left": False,
            "weights": {},
            "weights_not_finite": [],
            "not_finite": as_records(measurement.not_finite),
            "dtype": self.dtype,
            "arithmetic": list(measurement.formats),
            "device": "cpu",
            "measures": list(measures),
            "stations": ["output"],
            "error_bounds": dict(measurement.error_bounds),
            "excluded_tokens": list(excluded) if isinstance(excluded, list | tuple) else excluded,
            "versions": {key: v for key in ("depthscope", "torch") if (v := _version(key))}
            | {"python": platform.python_version()},
            "notes": notes,
        }


# --- what is given -----------------------------------------------------------------------------------


def _found(states: Any, mask: Any, ids: Any, samples: int | None) -> tuple[Iterator[Layers], str]:
    """The batches of states, and what to call them."""
    if isinstance(states, str | os.PathLike):
        if mask is not None or ids is not None:
            raise ValueError("a file has one sequence and its own token_ids: leave mask= and token_ids= out")
        path = Path(states).expanduser()
        return map(_of_file, files_in(path, samples)), path.name
    if isinstance(states, Mapping):
        if STATES not in states:
            raise ValueError(f"expected {_LAYOUT!r} in the dict, got {', '.join(map(str, states)) or 'nothing'}")
        ids = states.get(IDS) if ids is None else ids
        states = states[STATES]
    if isinstance(states, list | tuple):
        return iter([_of_list(states, mask, ids)]), "states"
    if getattr(states, "ndim", None) != 3:
        shape = getattr(states, "shape", None)
        got = type(states).__name__ if shape is None else f"an array {tuple(shape)}"
        raise ValueError(f"expected a folder, a list of arrays, or {_LAYOUT}, got {got}")
    return iter([_of_list([states[:, k] for k in range(states.shape[1])], mask, ids)]), "states"


def _of_list(states: Sequence[Any], mask: Any, ids: Any) -> Layers:
    def layer(number: int) -> Tensor:
        return _tokens(_numbers(states[number]), f"layer {number}")

    shape = layer(0).shape[:2] if states else (0, 0)
    found = [_of_shape(given, name, shape) for given, name in ((ids, "token_ids"), (mask, "mask"))]
    return Layers("these states", len(states), layer, found[0], None if found[1] is None else found[1] != 0)


def _of_shape(given: Any, name: str, shape: Sequence[int]) -> Tensor | None:
    if given is None:
        return None
    values = torch.as_tensor(np.asarray(given))
    values = values.unsqueeze(0) if values.ndim == 1 else values
    if tuple(values.shape) != tuple(shape):
        raise ValueError(f"expected {name} of shape {tuple(shape)}, one for each token, got {tuple(values.shape)}")
    return values


def _numbers(array: Any) -> Tensor:
    """An array of any library on the host, in a format of PyTorch."""
    if isinstance(array, Tensor):
        return array.detach()
    values = np.asarray(array)
    if values.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):  # of ml_dtypes, which JAX uses
        values = values.astype(np.float32)
    if values.dtype.kind != "f":
        raise ValueError(f"expected floating-point states, got {values.dtype}")
    return torch.from_numpy(np.array(values, dtype=values.dtype.newbyteorder("=")))


def _tokens(values: Tensor, what: str) -> Tensor:
    """(batch, n, d); one sequence may come without its batch axis."""
    values = values.unsqueeze(0) if values.ndim == 2 else values
    if values.ndim != 3 or not values.is_floating_point() or 0 in values.shape:
        raise ValueError(f"expected {what} as (tokens, width) or (batch, tokens, width), got {tuple(values.shape)}")
    return values


# --- files -------------------------------------------------------------------------------------------


def files_in(path: Path, samples: int | None = None) -> list[Path]:
    """The files with states in a folder, by name, or the file itself."""
    if not path.exists():
        raise ValueError(f"there is no {str(path)!r}: expected a folder of states (safetensors, npz)")
    kinds = (".safetensors", ".npz")
    found = sorted(file for file in path.iterdir() if file.suffix in kinds) if path.is_dir() else [path]
    if not found or found[0].suffix not in kinds:
        raise ValueError(f"expected safetensors or .npz files with {_LAYOUT} in {str(path)!r}, got none")
    return found[:samples]


def _of_file(path: Path) -> Layers:
    try:
        require_file(path)
        return _of_safetensors(path) if path.suffix == ".safetensors" else _of_npz(path)
    except OSError:
        raise
    except Exception as error:  # of libraries that read what others have sent
        said = " ".join(str(error).split())[:200]
        raise ValueError(said if str(path) in said else f"{str(path)!r} cannot be read as states: {said}") from None


def _of_safetensors(path: Path) -> Layers:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        if STATES not in names:
            raise ValueError(f"expected {_LAYOUT} in it, got {', '.join(sorted(names)[:4]) or 'nothing'}")
        shape = file.get_slice(STATES).get_shape()
        ids = file.get_tensor(IDS) if IDS in names else None
    _require_layout(shape)

    def layer(number: int) -> Tensor:
        with safe_open(path, framework="pt") as file:
            return _tokens(file.get_slice(STATES)[:, number], str(path))

    return Layers(str(path), shape[1], layer, None if ids is None else _of_shape(ids, IDS, (1, shape[0])))


def _require_layout(shape: Sequence[int]) -> None:
    if len(shape) != 3 or 0 in shape:
        raise ValueError(f"expected {_LAYOUT}, got {tuple(shape)}")


def _of_npz(path: Path) -> Layers:
    with zipfile.ZipFile(path) as file:
        names = {name.removesuffix(".npy") for name in file.namelist()}
    if STATES in names:
        values, ids = _member(path, STATES), _member(path, IDS) if IDS in names else None
        _require_layout(values.shape)
        found = _numbers(values)
        return Layers(
            str(path),
            found.shape[1],
            lambda number: _tokens(found[:, number], str(path)),
            None if ids is None else _of_shape(ids, IDS, (1, len(found))),
        )
    numbered = {int(match[0]): name for name in names if (match := re.search(r"\d+$", name))}
    layers = [numbered[number] for number in sorted(numbered)]
    if len(layers) < 2:
        raise ValueError(f"expected {_LAYOUT} in it, or one array per layer, got {', '.join(sorted(names)[:4])}")
    ids = _member(path, IDS) if IDS in names else None
    shape = _tokens(_numbers(_member(path, layers[0])), str(path)).shape[:2]
    return Layers(
        str(path),
        len(layers),
        lambda number: _tokens(_numbers(_member(path, layers[number])), str(path)),
        None if ids is None else _of_shape(ids, IDS, shape),
    )


def _member(path: Path, name: str) -> np.ndarray[Any, Any]:
    """One array of a .npz: what its header says of its size must be true before there is room made for it."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"{name}.npy")
        with archive.open(info) as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file, max_header_size=_HEADER)
        if dtype.hasobject:
            raise ValueError(f"{name} holds Python objects, which only a pickle could bring: it is not read")
        size = math.prod(shape) * dtype.itemsize
        if size > info.file_size:
            raise ValueError(f"{name} says it has {size} bytes, and brings {info.file_size}: it is damaged")
        require_room(size, f"{name} {tuple(shape)} in {path.name}", "save one array per layer, or safetensors")
        with archive.open(info) as file:
            return np.lib.format.read_array(file, allow_pickle=False, max_header_size=_HEADER)
