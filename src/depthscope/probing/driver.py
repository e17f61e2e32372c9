"""`probe`: a model and inputs in, a profile out."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy, anatomy_of
from depthscope.models.block import STATIONS
from depthscope.probing.attention import AttentionListener, Head
from depthscope.probing.catalogue import choose, only_at_outputs
from depthscope.probing.causality import is_causal
from depthscope.probing.gradients import Loss, gradient_norms
from depthscope.probing.inputs import Tokenizer, batches
from depthscope.probing.profile import Profile, frame_of, sinks_of
from depthscope.probing.quiet import full_precision, uncompiled, undisturbed
from depthscope.probing.reduction import Excluded, Reduction
from depthscope.probing.stations import choose_stations, stations_to_hear
from depthscope.probing.taps import Taps, Visit
from depthscope.probing.weights import look_of_weights


def probe(
    model: nn.Module,
    inputs: Any,
    *,
    measures: str | Sequence[str] = "default",
    stations: str | Sequence[str] = "output",
    blocks: str | None = None,
    exclude_tokens: Literal["outliers"] | Sequence[int] | None = None,
    gradients: bool = False,
    loss: Loss | None = None,
    tokenizer: Tokenizer | None = None,
    progress: Callable[[], object] | None = None,
) -> Profile:
    """Measures a Transformer block by block, and leaves no trace in it.

    `inputs`: a tensor, a dict batch, strings (with `tokenizer`), or an iterable of these.
    `measures`: "default" (O(nd)), "verdict" (what `diagnose` asks for; what it adds to the default
    is taken at outputs alone), "spectral" (adds ranks and attention), "all", or names.
    `stations`: "output", "trunk", "all", or names. `blocks`: a glob of module names ("encoder.layer.*")
    for models that are not recognised. `exclude_tokens`: positions, or "outliers" (norm above ten times
    the median). `gradients` adds the gradient norm per block, of `loss(output)` or, by default, of the
    inner product of the last block's output with a fixed random matrix. `progress` is called after
    every block.
    """
    names = choose(measures)
    wanted = choose_stations(stations)
    excluded = _excluded(exclude_tokens)
    model, notes = uncompiled(model)
    anatomy = anatomy_of(model, blocks)
    reduction = Reduction(names, wanted, excluded, only_at_outputs(measures))
    passes = _Passes(model, anatomy, reduction, progress)
    gradient_rows = []
    with undisturbed(model):
        for batch in batches(model, inputs, tokenizer):
            if passes.samples == 0 and anatomy.causal is None and not any(b.part for b in anatomy.blocks):
                passes.causal = is_causal(model, anatomy, batch)
            passes.run(batch)
            if gradients:
                gradient_rows += gradient_norms(model, anatomy, batch, loss, passes.samples - passes.batch_size)
    if passes.samples == 0:
        raise ValueError("expected at least one batch, got none")
    metadata = _describe(model, anatomy, passes, names, wanted, excluded) | {"notes": notes + passes.notes(wanted)}
    return Profile(frame_of(reduction.rows + gradient_rows), metadata, sinks_of(reduction.sinks))


class _Passes:
    """Runs the batches through the model with everything attached, and remembers what was there."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, reduction: Reduction, progress: Callable[[], object] | None):
        self.model, self.anatomy, self.reduction, self.progress = model, anatomy, reduction, progress
        self.samples = self.batch_size = self.depth = self.tokens = self.width = 0
        self.causal: bool | None = anatomy.causal
        self.device = torch.device("cpu")
        self.dtype = ""
        self.taps = Taps(model, anatomy, stations_to_hear(reduction), self._see_tokens, self._end_block)

    def run(self, batch: Any) -> None:
        self.reduction.begin(self.samples)
        with ExitStack() as stack:
            stack.enter_context(self.taps)
            if self.reduction.wants_attention:
                stack.enter_context(AttentionListener(self._is_attention, self._see_attention))
            self.model(*batch.args, **batch.kwargs)
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
        if missing := sorted(wanted & set(STATIONS) - seen):
            notes.append(f"stations that this model does not show: {', '.join(missing)}")
        if self.reduction.wants_attention:
            blind = [n for n in range(1, self.depth + 1) if (n, "attention") not in self.reduction.attention_seen]
            if blind:
                notes.append(f"attention was not seen in blocks {', '.join(map(str, blind))}")
        if unused := sorted(self.taps.masks.unused):
            notes.append(f"not used as masks of real tokens: {', '.join(unused)}")
        if self.reduction.sinks and self.reduction.wants_values and not self.reduction.values_seen:
            notes.append("values were not seen (eager attention): no sink_value_norm")
        return notes

    def _see_tokens(self, visit: Visit, station: str, tokens: Tensor, source: Tensor) -> None:
        if station == "input" and visit.number == 1:
            self.batch_size, n, self.width = tokens.shape
            self.tokens, self.device = max(self.tokens, n), tokens.device
            self.dtype = str(tokens.dtype).removeprefix("torch.")
        # Our own arithmetic: unseen by the attention listener, in full precision, without gradients.
        with torch._C.DisableTorchFunction(), torch.no_grad(), full_precision(tokens):
            self.reduction.see_tokens(visit, station, tokens, source)

    def _end_block(self, visit: Visit) -> None:
        self.depth = max(self.depth, visit.number)
        if self.progress is not None:
            self.progress()

    def _is_attention(self, shape: tuple[int, ...]) -> bool:
        """Whether a softmax of this shape, (batch, h, n, m), is over the tokens of the running block."""
        visit = self.taps.visit
        if visit is None or visit.shape is None or len(shape) != 4:
            return False
        batch, n = visit.shape[:2] if self.anatomy.token_axis == 1 else (visit.shape[1], visit.shape[0])
        if visit.block.attention is not None and self.taps.inside is None:
            return False
        return shape[0] == batch and shape[2] == n and (shape[3] == n or self.taps.inside == "cross_attention")

    def _see_attention(self, heads: Iterator[Head], values: Tensor | None) -> None:
        visit = self.taps.visit
        assert visit is not None
        with torch.no_grad(), torch.autocast(str(self.device.type), enabled=False):
            self.reduction.see_attention(visit, self.taps.inside or "attention", heads, values)


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
