"""A profile of hidden states that somebody has saved: no model runs, and one layer is in memory at a time.

A file has one sequence: safetensors or .npz with `hidden_states` [tokens, layers, width] and, if known, `token_ids`
[tokens], as vLLM writes them. The first layer is what enters block 1. Pickles are refused: they run code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from depthscope.probing.driver import of_measurement, positions
from depthscope.probing.finite import note
from depthscope.probing.measurement import Measurement
from depthscope.probing.poor_inputs import IdsSeen
from depthscope.probing.profile import Profile
from depthscope.progress import Tick

STATES, IDS = "hidden_states", "token_ids"
_LAYOUT = "hidden_states [tokens, layers, width]"
_OF_TOKENS = ("station", "tokens", "batch", "block", "step")  # what can be measured of states alone
_KINDS = (".safetensors", ".npz")


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
    exclude_tokens: Sequence[int] | None = None,
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
        exclude_tokens: positions, as for `probe`.
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
    measurement = Measurement(taken, frozenset({"output"}), positions(exclude_tokens))
    ids, samples_seen, blocks, tokens = IdsSeen(), 0, 0, 0
    entered = torch.empty(0)
    for layers in found:
        if layers.count < 2 or blocks not in (0, layers.count - 1):
            expected = f"{blocks + 1} layers, as before" if blocks else "two layers or more, what enters block 1 first"
            raise ValueError(f"{layers.name}: expected {expected}, got {layers.count}")
        given = {"input_ids": layers.ids, "attention_mask": layers.real}
        batch = Batch((), {key: value for key, value in given.items() if value is not None})
        if layers.ids is not None:
            ids.see(tokenizer, ids.asked(batch))
        width = entered.shape[-1]
        measurement.begin(samples_seen, batch, tokenizer)
        entered = _run(measurement, layers, progress)
        if blocks and entered.shape[-1] != width:
            raise ValueError(f"{layers.name}: expected tokens of width {width}, as before, got {entered.shape[-1]}")
        blocks, tokens = layers.count - 1, max(tokens, entered.shape[1])
        samples_seen += len(entered)
    notes = ["hidden states without a model: tokens are measured, and neither attention nor branches nor weights"]
    if missing := [name for name in names if name not in taken]:
        notes.append(f"not seen in states: no {', '.join(missing)}")
    metadata = {
        "model": name,
        "class": "states",
        "family": "states",
        "blocks": blocks,
        "parts": {},
        "towers": {},
        "shared_weights": False,
        "ids": ids.to_dict(),
        "tokens": tokens,
        "width": entered.shape[-1],
        "samples": samples_seen,
        "token_axis": 1,
        "placement": None,
        "final_norm": None,
        "causal": causal,
        "causal_by": "" if causal is None else "user",
        "right_to_left": False,
        "weights": {},
        "weights_not_finite": [],
        "dtype": str(entered.dtype).removeprefix("torch."),
        "device": "cpu",
        **of_measurement(measurement),
        "notes": notes + note(measurement.not_finite, samples_seen),
    }
    return Profile.of_readings(measurement.readings, metadata, measurement.sinks)


def _run(measurement: Measurement, layers: Layers, progress: Tick | None) -> Tensor:
    """Goes through the layers, a second time where the first was not enough; returns the last one."""
    while True:
        entered = layers.layer(0)
        for number in range(1, layers.count):
            left, module = layers.layer(number), nn.Identity()
            if left.shape != entered.shape:
                raise ValueError(
                    f"{layers.name}: expected layers of one shape, got {tuple(entered.shape)} and {tuple(left.shape)}"
                )
            spots = {"input": Spot(module, "in"), "output": Spot(module, "out")}
            block = BlockAnatomy(f"layer {number}", module, spots)
            visit = Visit(number, block, layers.real, entered.shape, entered, _cannot_run)
            with torch.no_grad(), full_precision(entered):
                if not measurement.has_passed(visit, entered):
                    measurement.see_tokens(visit, "input", entered, entered)
                measurement.see_tokens(visit, "output", left, left)
            entered = left
            if progress is not None and not measurement.again:
                progress()
        if not measurement.end(can_look_again=True):
            return entered


def _cannot_run(_tokens: Tensor) -> Tensor:
    raise ValueError("these are states without a model: no block can be run again")


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
        ids, states = states.get(IDS) if ids is None else ids, states[STATES]
    if not isinstance(states, list | tuple):
        if getattr(states, "ndim", None) != 3:
            shape = getattr(states, "shape", None)
            got = type(states).__name__ if shape is None else f"an array {tuple(shape)}"
            raise ValueError(f"expected a folder, a list of arrays, or {_LAYOUT}, got {got}")
        states = [states[:, k] for k in range(states.shape[1])]

    def layer(number: int) -> Tensor:
        return _tokens(states[number], f"layer {number}")

    shape = layer(0).shape[:2] if states else (0, 0)
    real = _of_shape(mask, "mask", shape)
    found = Layers("these states", len(states), layer, _of_shape(ids, IDS, shape), None if real is None else real != 0)
    return iter([found]), "states"


def _of_shape(given: Any, name: str, shape: Sequence[int]) -> Tensor | None:
    if given is None:
        return None
    values = torch.as_tensor(np.asarray(given))
    values = values.unsqueeze(0) if values.ndim == 1 else values
    if tuple(values.shape) != tuple(shape):
        raise ValueError(f"expected {name} of shape {tuple(shape)}, one for each token, got {tuple(values.shape)}")
    return values


def _tokens(array: Any, what: str) -> Tensor:
    """An array of any library on the host as (batch, n, d); one sequence may come without its batch axis."""
    if not isinstance(array, Tensor):
        values = np.asarray(array)
        if values.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):  # of ml_dtypes, which JAX uses
            values = values.astype(np.float32)
        if values.dtype.kind != "f":
            raise ValueError(f"expected floating-point states, got {values.dtype}")
        array = torch.from_numpy(np.array(values, dtype=values.dtype.newbyteorder("=")))
    tokens = array.detach().unsqueeze(0) if array.ndim == 2 else array.detach()
    if tokens.ndim != 3 or not tokens.is_floating_point() or 0 in tokens.shape:
        raise ValueError(f"expected {what} as (tokens, width) or (batch, tokens, width), got {tuple(tokens.shape)}")
    return tokens


# --- files -------------------------------------------------------------------------------------------


def files_in(path: Path, samples: int | None = None) -> list[Path]:
    """The files with states in a folder, by name, or the file itself."""
    if not path.exists():
        raise ValueError(f"there is no {str(path)!r}: expected a folder of states (safetensors, npz)")
    found = sorted(file for file in path.iterdir() if file.suffix in _KINDS) if path.is_dir() else [path]
    if not found or found[0].suffix not in _KINDS:
        raise ValueError(f"expected safetensors or .npz files with {_LAYOUT} in {str(path)!r}, got none")
    return found[:samples]


def _of_file(path: Path) -> Layers:
    try:
        require_file(path)
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                found = {name: torch.from_numpy(file[name]) for name in (STATES, IDS) if name in file.files}
                names, states = file.files, found.get(STATES)
            return _of_states(path, names, states, found.get(IDS))
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            states = file.get_slice(STATES) if STATES in names else None
            return _of_states(path, names, states, file.get_tensor(IDS) if IDS in names else None)
    except OSError:
        raise
    except Exception as error:  # of libraries that read what others have sent
        said = " ".join(str(error).split())[:200]
        raise ValueError(said if str(path) in said else f"{str(path)!r} cannot be read as states: {said}") from None


def _of_states(path: Path, names: list[str], states: Any, ids: Tensor | None) -> Layers:
    """`states` is an array, or a slice of a safetensors file, which is opened again for each layer."""
    if states is None:
        raise ValueError(f"expected {_LAYOUT} in it, got {', '.join(sorted(names)[:4]) or 'nothing'}")
    shape = tuple(states.shape if isinstance(states, Tensor) else states.get_shape())
    if len(shape) != 3 or 0 in shape:
        raise ValueError(f"expected {_LAYOUT}, got {shape}")

    def layer(number: int) -> Tensor:
        if isinstance(states, Tensor):
            return _tokens(states[:, number], str(path))
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            return _tokens(file.get_slice(STATES)[:, number], str(path))

    return Layers(str(path), shape[1], layer, _of_shape(ids, IDS, (1, shape[0])))
