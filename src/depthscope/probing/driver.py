"""`probe`: a model and inputs in, a profile out."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch
from torch import Tensor, nn

from depthscope import stations as at
from depthscope.anatomy import Anatomy, anatomy_of
from depthscope.anatomy.look import look_of_weights
from depthscope.measures import MEASURES, choose_measures, only_at_outputs
from depthscope.passes import (
    Batch,
    Head,
    Listen,
    ListenToAttention,
    Machine,
    Tokenizer,
    Visit,
    batches,
    call,
    find_token_axis,
    full_precision,
    is_causal,
    uncompiled,
    undisturbed,
)
from depthscope.probing.gradients import Loss, gradient_norms
from depthscope.probing.profile import Profile, frame_of, sinks_of
from depthscope.probing.reduction import Excluded, Reduction
from depthscope.progress import Tick


def probe(
    model: nn.Module,
    inputs: Any,
    *,
    measures: str | Sequence[str] = "default",
    stations: str | Sequence[str] = "output",
    blocks: str | None = None,
    token_axis: int | None = None,
    exclude_tokens: Literal["outliers"] | Sequence[int] | None = None,
    gradients: bool | Literal["outputs"] = False,
    loss: Loss | None = None,
    tokenizer: Tokenizer | None = None,
    progress: Tick | None = None,
) -> Profile:
    """Measures a Transformer block by block, and leaves no trace in it.

    `inputs`: a tensor, a dict batch, strings (with `tokenizer`), or an iterable of these.
    `measures`: "default" (O(nd)), "verdict" (what `diagnose` asks for; what it adds to the default
    is taken at outputs alone), "spectral" (adds ranks and attention), "all", or names.
    `stations`: "output", "trunk", "all", or names. `blocks`: a glob of module names ("encoder.layer.*")
    for models that are not recognised; `token_axis` says where their tokens stand, 1 for activations (batch, n, d)
    and 0 for (n, batch, d), which is else found by trying. `exclude_tokens`: positions, or "outliers" (norm
    above ten times the median). `gradients` adds the gradient norm per block (with
    "outputs" that of the blocks' outputs alone), of `loss(output)` or, by default, of the
    inner product of the last block's output with a fixed random matrix. `progress` is called after
    every block.
    """
    names = choose_measures(measures)
    wanted = at.choose_stations(stations)
    excluded = _excluded(exclude_tokens)
    model, notes = uncompiled(model)
    anatomy = anatomy_of(model, blocks)
    if token_axis is not None:
        anatomy = replace(anatomy, token_axis=token_axis)
    elif anatomy.family == "unknown" and not isinstance(inputs, Iterator):
        with undisturbed(model):
            anatomy = replace(anatomy, token_axis=_found_axis(model, anatomy, inputs, tokenizer))
    reduction = Reduction(names, wanted, excluded, only_at_outputs(measures))
    passes = _Passes(model, anatomy, reduction, progress)
    gradient_rows = []
    with undisturbed(model):
        for batch in batches(model, inputs, tokenizer):
            if passes.samples == 0 and anatomy.causal is None and not any(b.part for b in anatomy.blocks):
                passes.causal = is_causal(model, anatomy, batch)
            passes.run(batch)
            if gradients:
                first = passes.samples - passes.batch_size
                of_weights = gradients != "outputs"
                gradient_rows += gradient_norms(model, anatomy, batch, loss, first, of_weights=of_weights)
        if passes.samples == 0:
            raise ValueError("expected at least one batch, got none")
        metadata = _describe(model, anatomy, passes, names, wanted, excluded) | {"notes": notes + passes.notes(wanted)}
    return Profile(frame_of(reduction.rows + gradient_rows), metadata, sinks_of(reduction.sinks))


def _found_axis(model: nn.Module, anatomy: Anatomy, inputs: Any, tokenizer: Tokenizer | None) -> int:
    first = next(batches(model, inputs, tokenizer), None)
    return anatomy.token_axis if first is None else find_token_axis(model, anatomy, first)


class _Passes:
    """Runs the batches through the model with everything attached, and remembers what was there."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, reduction: Reduction, progress: Tick | None):
        self.model, self.anatomy, self.reduction, self.progress = model, anatomy, reduction, progress
        self.samples = self.batch_size = self.depth = self.tokens = self.width = self.past = 0
        self.causal: bool | None = anatomy.causal
        self.device = torch.device("cpu")
        self.dtype = ""
        sites: list[Any] = [Listen(reduction.stations_to_hear(), self._see_tokens)]
        if reduction.wants_attention:
            sites.append(ListenToAttention(self._see_attention))
        self.machine = Machine(model, anatomy, *sites, on_block_end=self._end_block)

    def run(self, batch: Batch) -> None:
        self.reduction.begin(self.samples)
        with self.machine:
            call(self.model, batch)
        self.reduction.end()
        if self.depth == 0:
            raise ValueError(
                f"none of the blocks {[b.name for b in self.anatomy.blocks][:4]} ran; name them with blocks="
            )
        self.samples += self.batch_size

    def notes(self, wanted: frozenset[str]) -> list[str]:
        """What was asked for and not seen."""
        notes = list(self.anatomy.notes)
        seen = {station for block in self.anatomy.blocks for station in block.spots}
        if missing := sorted(wanted & set(at.BLOCK) - seen):
            notes.append(f"stations that this model does not show: {', '.join(missing)}")
        if self.past:
            notes.append(f"the inputs bring a cache of {self.past} tokens: only the new tokens are measured")
        if self.anatomy.family == "unknown" and self.reduction.between:
            named = ", ".join(map(str, sorted(self.reduction.between)))
            notes.append(f"something else changes the tokens between the blocks, before block {named}")
        if self.reduction.wants_attention:
            blind = [n for n in range(1, self.depth + 1) if (n, "attention") not in self.reduction.attention_seen]
            if blind:
                notes.append(f"attention was not seen in blocks {', '.join(map(str, blind))}")
        if unused := sorted(self.machine.running.masks.unused):
            notes.append(f"not used as masks of real tokens: {', '.join(unused)}")
        return notes + self._not_taken()

    def _not_taken(self) -> list[str]:
        """Measures that were asked for, and that this model gives nowhere, with what they lack."""
        taken = {row.measure for row in self.reduction.rows}
        lacking: dict[str, list[str]] = {}
        for name, measure in MEASURES.items():
            waits_for_sinks = "sinks" in measure.needs and not self.reduction.sinks
            unseen = measure.of == "attention" and not self.reduction.attention_seen  # which is said already
            if name not in self.reduction.measures - taken or waits_for_sinks or unseen:
                continue
            blind = "values" in measure.needs and not self.reduction.values_seen
            why = "values were not seen (eager attention)" if blind else "not seen in this model"
            if "tokens" in measure.needs:
                why = "what attention reads was not seen (attention_input)"
            lacking.setdefault(why, []).append(name)
        return [f"{why}: no {', '.join(names)}" for why, names in lacking.items()]

    def _see_tokens(self, visit: Visit, station: str, tokens: Tensor, source: Tensor) -> None:
        if station == "input" and visit.number == 1:
            self.batch_size, n, self.width = tokens.shape
            self.tokens, self.device = max(self.tokens, n), tokens.device
            self.dtype = str(tokens.dtype).removeprefix("torch.")
            self.past = max(self.past, self.machine.running.past)
        # Our own arithmetic: unseen by the attention listener, in full precision, without gradients.
        with torch._C.DisableTorchFunction(), torch.no_grad(), full_precision(tokens):
            self.reduction.see_tokens(visit, station, tokens, source)

    def _see_attention(self, visit: Visit, kind: str, heads: Iterator[Head], values: Tensor | None) -> None:
        with torch.no_grad(), torch.autocast(str(self.device.type), enabled=False):
            self.reduction.see_attention(visit, kind, heads, values)

    def _end_block(self, visit: Visit) -> None:
        self.depth = max(self.depth, visit.number)
        if self.progress is not None:
            self.progress()


def _excluded(tokens: Literal["outliers"] | Sequence[int] | None) -> Excluded:
    if tokens is None or (isinstance(tokens, str) and tokens == "outliers"):
        return tokens  # type: ignore[return-value]
    if isinstance(tokens, str) or not isinstance(tokens, Sequence) or not all(isinstance(i, int) for i in tokens):
        raise ValueError(f"expected exclude_tokens=None, 'outliers' or a list of positions, got {tokens!r}")
    return tuple(int(index) for index in tokens)


def _describe(
    model: nn.Module,
    anatomy: Anatomy,
    passes: _Passes,
    names: tuple[str, ...],
    stations: frozenset[str],
    excluded: Excluded,
) -> dict[str, Any]:
    config = getattr(model, "config", None)
    parts: dict[str, int] = {}
    for block in anatomy.blocks:
        parts[block.part] = parts.get(block.part, 0) + 1
    parameters = list(model.parameters())
    return {
        "model": getattr(config, "name_or_path", "") or type(model).__name__,
        "class": type(model).__name__,
        "family": anatomy.family,
        "blocks": passes.depth,
        "parts": parts if len(parts) > 1 else {},
        "shared_weights": len(anatomy.blocks) < passes.depth,
        "tokens": passes.tokens,
        "width": passes.width,
        "samples": passes.samples,
        "token_axis": anatomy.token_axis,
        "placement": anatomy.blocks[0].placement,
        "causal": passes.causal,
        "parameters": sum(p.numel() for p in parameters),
        "weights": look_of_weights(anatomy),
        "dtype": passes.dtype,
        "device": str(parameters[0].device) if parameters else "cpu",
        "attention_implementation": getattr(config, "_attn_implementation", None),
        "measures": list(names),
        "stations": sorted(stations),
        "excluded_tokens": list(excluded) if isinstance(excluded, tuple) else excluded,
        "versions": {name: v for name in ("depthscope", "torch", "transformers") if (v := _version(name))}
        | {"python": platform.python_version()},
    }


@cache
def _version(package: str) -> str | None:
    if package == "torch":
        return torch.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return None
