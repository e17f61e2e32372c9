"""`probe`: a model and inputs in, a profile out."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from depthscope import stations as at
from depthscope import walking
from depthscope.anatomy import Anatomy
from depthscope.discovery import Hints, hidden_tokens_reach_others
from depthscope.hooks import (
    Ablation,
    Head,
    Listen,
    ListenToAttention,
    Machine,
    Visit,
    full_precision,
    open_ablation,
)
from depthscope.hooks.ablation import choose_parts
from depthscope.inputs import Batch, Tokenizer, call
from depthscope.measures import MEASURES, choose_measures, only_at_outputs
from depthscope.offloading import device_of
from depthscope.probing.final_norm import FinalNorm
from depthscope.probing.finite import AskedOfWeights, as_records, note
from depthscope.probing.gradients import Loss, check_loss, gradient_norms
from depthscope.probing.losses import LossOfGradients
from depthscope.probing.measurement import Excluded, Measurement
from depthscope.probing.parts import PartSeen
from depthscope.probing.poor_inputs import IdsSeen
from depthscope.probing.profile import Profile
from depthscope.probing.roles import Roles
from depthscope.probing.sharding import Place, gather_heads, processes_of, require_whole
from depthscope.probing.streams import StreamedMeasurement
from depthscope.probing.windows import WindowedMeasurement, without_attention
from depthscope.progress import Tick
from depthscope.scope import Causality, Scope, scope_of
from depthscope.transfers import fetched


def probe(
    model: nn.Module | Scope,
    inputs: Any = None,
    *,
    measures: str | Sequence[str] = "default",
    stations: str | Sequence[str] = "output",
    exclude_tokens: Literal["outliers"] | Sequence[int] | None = None,
    gradients: bool | Literal["outputs"] = False,
    loss: Loss | None = None,
    tokenizer: Tokenizer | None = None,
    progress: Tick | None = None,
    without: str | Iterable[str] = (),
    window: int | None = None,
    **hints: Unpack[Hints],
) -> Profile:
    """Measures a Transformer block by block, and leaves no trace in it.

    Args:
        model: any model that holds Transformer blocks, or a `Scope` of it.
        inputs: a tensor, a dict batch, strings (with `tokenizer`), or an iterable of these.
        measures: "default" (O(nd)), "verdict" (what `diagnose` asks for; what it adds to the default is taken at
            outputs alone), "spectral" (adds ranks and attention), "all", or names.
        stations: "output", "trunk", "all", or names.
        exclude_tokens: positions, or "outliers" (norm above ten times the median).
        gradients: adds the gradient norm per block, also split by what the weights are for (queries_keys_gradient,
            values_output_gradient, ffn_gradient, norms_gradient, other_gradient); with "outputs" that of the blocks'
            outputs alone. It is of `loss(output)`; by default of the model's own loss where it returns one (with
            `labels` in the batch), else of the inner product of the last block's output with a fixed random matrix. The
            metadata say which (`gradients_of`).
        loss: takes what the model returns, and gives one number.
        tokenizer: makes ids of strings.
        progress: is called after every block.
        without: parts that are left out of every block meanwhile, such as ("skips", "ffn", "norms"); all names are in
            `depthscope.hooks.ablation`, and the profile's metadata says what was left out.
        window: measure windows of so many tokens instead of whole sequences, which the model still reads; attention is
            then not measured.
        hints: what you say of the model: `blocks`, `part`, `token_axis`, `mask`, `causal`, as for `Scope`.

    Returns:
        A `Profile`: a tidy table, with what was measured and what was not seen.

    Example:
        >>> import torch, depthscope
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
        >>> profile = depthscope.probe(model, torch.randn(2, 5, 16))
        >>> len(profile.curve("token_similarity"))  # what enters block 1, and the output of each block
        4
    """
    names = choose_measures(measures)
    wanted = at.choose_stations(stations)
    excluded = _excluded(exclude_tokens)
    parts = choose_parts(without)
    check_loss(loss)
    scope = scope_of(model, inputs, tokenizer, **hints)
    model, notes = scope.model, scope.notes
    calls, anatomy = scope.calls(), scope.anatomy
    where: dict[str, Any] = {"only_at_outputs": only_at_outputs(measures), "entrances": True, "progress": progress}
    where["outliers"] = scope.has_outliers
    if window is None:
        kind = StreamedMeasurement if anatomy.streams else Measurement
        measurement = kind(names, wanted, excluded, **where)
    elif anatomy.streams:
        raise ValueError("window= cuts sequences of one trunk, and this model has several streams: leave window= out")
    else:
        names, crossing = without_attention(names)
        measurement = WindowedMeasurement(window, names, wanted, excluded, **where)
        notes = notes + crossing
    passes = _Passes(scope, anatomy, measurement, progress)
    gradient_readings = []
    of_loss = LossOfGradients(loss)
    roles = Roles(anatomy) if gradients and gradients != "outputs" else None
    surgery = Ablation(model, anatomy, parts) if parts else open_ablation(model)
    with scope.undisturbed(), surgery if surgery is not None and parts else nullcontext():
        for given in calls:
            batch = scope.one_to_a_row(given)
            if passes.samples == 0:
                passes.find_causality()
            passes.run(batch, scope.tokenizer)
            if gradients:
                sample = passes.samples - passes.batch_size
                gradient_readings += gradient_norms(model, anatomy, batch, of_loss.of(batch), sample, roles)
        metadata = _describe(model, anatomy, passes, names, wanted, excluded)
        if surgery is not None:
            metadata["without"], notes = list(surgery.parts), notes + surgery.notes
        metadata["window"] = window
        if isinstance(measurement, StreamedMeasurement):
            metadata["streams"] = measurement.summary
            notes = [*notes, measurement.note]
        if gradients:
            metadata["gradients_of"], notes = list(of_loss.said), notes + of_loss.notes()
        metadata["notes"] = notes + passes.notes(wanted) + _notes_on(roles, repeated=metadata["shared_weights"])
    readings = gather_heads(measurement.readings, passes.split_heads)
    return Profile.of_readings(readings + gradient_readings, metadata, measurement.sinks)


def _notes_on(roles: Roles | None, *, repeated: bool) -> list[str]:
    if roles is None:
        return []
    if repeated:
        return ["blocks share their weights, which have one gradient, not one per block: none by block or by role"]
    return roles.notes


class _Passes:
    """Runs the batches through the model with everything attached, and remembers what was there."""

    def __init__(self, scope: Scope, anatomy: Anatomy, measurement: Measurement, progress: Tick | None):
        self.scope, self.anatomy, self.measurement, self.progress = scope, anatomy, measurement, progress
        self.model = model = scope.model
        self.samples = self.batch_size = self.depth = self.past = 0
        self.causality = Causality(anatomy.causal, anatomy.causal_by)
        self.is_masked = self.leaks_through_mask = False
        self.ids = IdsSeen()
        self.parts: dict[str, PartSeen] = {}  # in the order in which they ran
        self._running = ""  # the part that runs
        self.device = torch.device("cpu")
        self.dtype = ""
        self.weights = AskedOfWeights(model, anatomy)
        self.split_heads: dict[Place, Any] = {}  # where tensor parallelism splits them, and among which processes
        self.own_heads = False  # where a block is split, and it is not known whether its heads are
        sites: list[Any] = [Listen(measurement.stations_to_hear(), self._see_tokens)]
        if measurement.wants_attention:
            sites.append(ListenToAttention(self._see_attention))
        self.machine = Machine(model, anatomy, *sites, on_block_end=self._end_block)
        self.final_norm = FinalNorm(model, anatomy, self._see_final_norm)
        self.first_token: str | None = None  # of the tokenizer, where sequences lack it
        self.without_first_token: list[Tensor] = []  # how many, by batch

    def find_causality(self) -> None:
        """As the first batch shows it."""
        self.anatomy, self.causality = self.scope.causality()

    def run(self, batch: Batch, tokenizer: Tokenizer | None = None) -> None:
        self.batch_size = 0
        self.measurement.begin(self.samples, batch, tokenizer)
        with self.machine, self.final_norm:
            call(self.model, batch)
        ids = self.ids.asked(batch)
        self.measurement.also = ids + (self.weights.asked() if self.samples == 0 else [])
        while self.measurement.end(can_look_again=True):
            with self.machine, self.final_norm:
                call(self.model, batch)
        answers = self.measurement.answers
        self.ids.see(tokenizer, answers[: len(ids)])
        if self.samples == 0:
            self.weights.read(answers[len(ids) :])
        self.scope.has_outliers |= self.measurement.outliers
        if self.causality.causal and (missing := without_first_token(tokenizer, batch)) is not None:
            self.first_token = str(getattr(tokenizer, "bos_token", ""))
            self.without_first_token.append(missing)
        if self.depth == 0:
            raise ValueError(
                f"none of the blocks {[b.name for b in self.anatomy.blocks][:4]} ran; name them with blocks="
            )
        if self.samples == 0 and self.is_masked and self.anatomy.family == "unknown":
            self.leaks_through_mask = hidden_tokens_reach_others(self.model, self.anatomy, batch)
        self.samples += self.batch_size

    def notes(self, wanted: frozenset[str]) -> list[str]:
        """What was asked for and not seen."""
        notes = [*note(self.measurement.not_finite, self.samples), *self.anatomy.notes, *self.anatomy.left_out]
        seen = {station for block in self.anatomy.blocks for station in block.spots}
        if missing := sorted(wanted & set(at.BLOCK) - seen):
            notes.append(f"stations that this model does not show: {', '.join(missing)}")
        if missing_first := sum(int(count) for count in fetched(self.without_first_token)):
            notes.append(
                f"{missing_first} of {self.samples} sequences do not begin with {self.first_token!r}, the "
                "tokenizer's first token (BOS): a model that was trained with it may behave differently without"
            )
        if self.past:
            notes.append(f"the inputs bring a cache of {self.past} tokens: only the new tokens are measured")
        if self.scope.are_apart is not None:
            how = "are measured one by one" if self.scope.are_apart else "see each other, and are measured as one"
            notes.append(f"position_ids begin again within a row: the sequences packed there {how}")
        if self.leaks_through_mask:
            notes.append("tokens that the mask hides change the others: does it mark real tokens? mask= says what does")
        if self.anatomy.sees_some_later:
            notes.append("tokens see some later ones, but not all (chunks, a look ahead, a window): counted as causal")
        if self.anatomy.right_to_left:
            notes.append("tokens see later ones and not earlier ones (right to left): no remedy has a mean for that")
        notes += self._order_notes()
        between = sorted(self.measurement.between) if self.anatomy.between is None else self.anatomy.between
        if between:
            named = ", ".join(map(str, between))
            notes.append(f"something else changes the tokens between the blocks, before block {named}")
        if self.measurement.wants_attention:
            blind = [n for n in range(1, self.depth + 1) if (n, "attention") not in self.measurement.attention_seen]
            if blind:
                notes.append(f"attention was not seen in blocks {', '.join(map(str, blind))}")
        if self.own_heads:
            notes.append("the blocks are split among processes: heads are those that this process computes, from 0")
        if unused := sorted(self.machine.running.masks.unused):
            notes.append(f"not used as masks of real tokens: {', '.join(unused)}")
        return notes + self._not_taken()

    def _order_notes(self) -> list[str]:
        """Where the numbers of blocks are not those of `apply`, which has not seen the model run."""
        parts, ran = self.anatomy.parts, list(self.parts)
        if idle := [part for part in parts if part not in ran]:
            return [f"not run with these inputs, and not counted: {', '.join(idle)}"]
        if ran != list(parts):
            return [f"blocks are numbered as they ran ({', '.join(ran)}), in apply's blocks= as {', '.join(parts)}"]
        return []

    def _not_taken(self) -> list[str]:
        """Measures that were asked for, and that this model gives nowhere, with what they lack."""
        taken = {reading.measure for reading in self.measurement.readings}
        lacking: dict[str, list[str]] = {}
        for name, measure in MEASURES.items():
            waits_for_sinks = "sinks" in measure.needs and not self.measurement.sinks
            unseen = measure.of == "attention" and not self.measurement.attention_seen  # which is said already
            if name not in self.measurement.measures - taken or waits_for_sinks or unseen:
                continue
            blind = "values" in measure.needs and not self.measurement.values_seen
            why = "values were not seen (eager attention)" if blind else "not seen in this model"
            if "tokens" in measure.needs:
                why = "what attention reads was not seen (attention_input)"
            if measure.of == "attention" and self.measurement.incomplete and not measure.incomplete:
                why = "attention's rows sum to less than 1 beside its sink, which is no token"
            lacking.setdefault(why, []).append(name)
        return [f"{why}: no {', '.join(names)}" for why, names in lacking.items()]

    def _see_tokens(self, visit: Visit, station: str, tokens: Tensor, source: Tensor) -> None:
        if station == "input":
            self._see_entrance(visit, tokens)
            if self.measurement.has_passed(visit, source):
                return
        if station == "output":
            self.final_norm.remember(visit, source)
        # Our own arithmetic: unseen by the attention listener, in full precision, without gradients.
        with torch._C.DisableTorchFunction(), torch.no_grad(), full_precision(tokens):
            self.measurement.see_tokens(visit, station, tokens, source)

    def _see_entrance(self, visit: Visit, tokens: Tensor) -> None:
        """Tokens enter a block."""
        tokens = tokens[:: visit.streams]
        if self.measurement.again:
            return  # which was seen the first time
        if visit.number == 1:
            self.device, self.dtype = tokens.device, str(tokens.dtype).removeprefix("torch.")
        begins = visit.number == 1 or visit.part != self._running
        self._running = visit.part
        self.batch_size = max(self.batch_size, tokens.shape[0])
        self.past = max(self.past, self.machine.running.now.past)
        if visit.real is not None:
            self.is_masked = True
        require_whole(visit.block.module, tokens)
        if visit.part not in self.parts:
            self.parts[visit.part] = PartSeen(self.anatomy, visit)
        self.parts[visit.part].see(visit.number, tokens, begins=begins)

    def _see_final_norm(self, visit: Visit, source: Tensor) -> None:
        tokens = self.machine.running.batch_first(source)
        with torch._C.DisableTorchFunction(), torch.no_grad(), full_precision(tokens):
            self.measurement.see_final_norm(visit, tokens, source)

    def _see_attention(self, visit: Visit, kind: str, heads: Iterator[Head], values: Tensor | None) -> None:
        with torch.no_grad(), torch.autocast(str(self.device.type), enabled=False):
            self.measurement.see_attention(visit, kind, heads, values)
        module = visit.block.cross_attention if kind == "cross_attention" else visit.block.attention
        group = processes_of(module or visit.block.module)
        if group is not None and module is None:
            self.own_heads = True
        elif group is not None:
            self.split_heads[Place(visit.number, kind)] = group

    def _end_block(self, visit: Visit) -> None:
        self.depth = max(self.depth, visit.number)
        if self.progress is not None and not self.measurement.again:
            self.progress()


def without_first_token(tokenizer: Any, batch: Batch) -> Tensor | None:
    """How many sequences do not begin with the token that the tokenizer has for it (BOS); None if it has none."""
    first, ids = getattr(tokenizer, "bos_token_id", None), batch.kwargs.get("input_ids")
    if first is None or not isinstance(ids, Tensor) or ids.ndim != 2:
        return None
    mask = batch.kwargs.get("attention_mask")
    real = mask != 0 if isinstance(mask, Tensor) and mask.shape == ids.shape else torch.ones_like(ids, dtype=torch.bool)
    begins = ids.gather(1, real.int().argmax(dim=1, keepdim=True).to(ids.device)).squeeze(1)
    return (begins != first).sum()


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
    parts = passes.parts if len(passes.parts) > 1 or len(anatomy.parts) > 1 else {}
    first = next(iter(passes.parts.values()))
    placements = {part.placement for part in passes.parts.values()}
    weights = walking.parameters(model)
    return {
        "model": getattr(config, "name_or_path", "") or type(model).__name__,
        "class": type(model).__name__,
        "family": anatomy.family,
        "blocks": passes.depth,
        "parts": {name: part.blocks for name, part in parts.items()},
        "towers": {name: part.to_dict() for name, part in parts.items()},
        "shared_weights": len(anatomy.blocks) < passes.depth,
        "ids": passes.ids.to_dict(),
        "tokens": first.tokens,
        "width": first.width,
        "samples": passes.samples,
        "token_axis": anatomy.token_axis,
        "placement": placements.pop() if len(placements) == 1 else None,
        "final_norm": passes.final_norm.name,
        "causal": passes.causality.causal,
        "causal_by": passes.causality.by,
        "right_to_left": passes.anatomy.right_to_left,
        "parameters": sum(parameter.numel() for parameter in weights),
        "weights": passes.weights.state,
        "weights_not_finite": passes.weights.not_finite(outputs=bool(passes.measurement.not_finite)),
        "not_finite": as_records(passes.measurement.not_finite),
        "dtype": passes.dtype,
        "arithmetic": list(passes.measurement.formats),
        "device": str(device_of(model, weights)),
        "attention_implementation": getattr(config, "_attn_implementation", None),
        "measures": list(names),
        "stations": sorted(stations),
        "error_bounds": dict(passes.measurement.error_bounds),
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
