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
from depthscope.anatomy.trained import norms_of_blocks
from depthscope.discovery import Hints, hidden_tokens_reach_others
from depthscope.hooks import Ablation, Head, Listen, ListenToAttention, Machine, Visit, full_precision, open_ablation
from depthscope.hooks.ablation import choose_parts
from depthscope.inputs import Batch, Tokenizer, call
from depthscope.inputs.masks import MaskFinder
from depthscope.measures import MEASURES, choose_measures, only_at_outputs
from depthscope.offloading import device_of
from depthscope.probing.final_norm import FinalNorm, norms_outside
from depthscope.probing.finite import AskedOfWeights, as_records, modules_of_attention, note
from depthscope.probing.gradients import Loss, check_loss, gradient_norms
from depthscope.probing.losses import LossOfGradients
from depthscope.probing.measurement import Measurement
from depthscope.probing.poor_inputs import IdsSeen
from depthscope.probing.profile import Profile
from depthscope.probing.roles import Roles
from depthscope.probing.sharding import Place, gather_heads, processes_of, require_whole
from depthscope.progress import Tick
from depthscope.scope import Scope, scope_of


def probe(
    model: nn.Module | Scope,
    inputs: Any = None,
    *,
    measures: str | Sequence[str] = "verdict",
    stations: str | Sequence[str] = "verdict",
    exclude_tokens: Sequence[int] | None = None,
    gradients: bool | Literal["outputs"] = False,
    loss: Loss | None = None,
    tokenizer: Tokenizer | None = None,
    progress: Tick | None = None,
    without: str | Iterable[str] = (),
    **hints: Unpack[Hints],
) -> Profile:
    """Measures a Transformer block by block, and leaves no trace in it.

    Args:
        model: any model that holds Transformer blocks, or a `Scope` of it.
        inputs: a tensor, a dict batch, strings (with `tokenizer`), or an iterable of these.
        measures: "verdict" (what `diagnose` asks for, as on the command line; ranks and the split of the energy are
            taken at outputs alone), "light" (O(nd)), "spectral" (adds ranks and attention), "all", or names.
        stations: "verdict" (what `diagnose` reads: the trunk, and what attention reads), "output", "trunk", "all", or
            names.
        exclude_tokens: positions among the real tokens of each sequence, negative ones from its end.
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
    names, wanted = choose_measures(measures), at.choose_stations(stations)
    excluded, parts = positions(exclude_tokens), choose_parts(without)
    check_loss(loss)
    scope = scope_of(model, inputs, tokenizer, **hints)
    calls, anatomy, notes = scope.calls(), scope.anatomy, scope.notes
    measurement = Measurement(
        names, wanted, excluded, only_at_outputs(measures), entrances=True, outliers=scope.has_outliers
    )
    passes = _Passes(scope, anatomy, measurement, progress)
    of_gradients, of_loss = [], LossOfGradients(loss)
    roles = Roles(anatomy) if gradients and gradients != "outputs" else None
    surgery = Ablation(scope.model, anatomy, parts) if parts else open_ablation(scope.modules)
    with scope.undisturbed(), surgery if surgery is not None and parts else nullcontext():
        for given in calls:
            batch = scope.one_to_a_row(given)
            first = passes.samples
            passes.run(batch, scope.tokenizer)
            if gradients:
                of_gradients += gradient_norms(scope.model, anatomy, batch, of_loss.of(batch), first, roles)
        metadata = passes.metadata()
        if surgery is not None:
            metadata["without"], notes = list(surgery.parts), notes + surgery.notes
        if anatomy.streams:
            metadata["streams"], notes = measurement.streams.summary, [*notes, measurement.streams.note]
        if gradients:
            metadata["gradients_of"], notes = list(of_loss.said), notes + of_loss.notes()
        metadata["notes"] = notes + passes.notes()
        if roles is not None:
            metadata["notes"] += roles.notes(shared=metadata["shared_weights"])
    # What listens holds `passes`, and this what listens: buffers as large as the tokens would wait for the garbage
    # collector, and the next probe would take new ones.
    del passes.machine, passes.final_norm
    readings = gather_heads(measurement.readings, passes.split_heads) + of_gradients
    return Profile.of_readings(readings, metadata, measurement.sinks)


class _Passes:
    """Runs the batches through the model with everything attached, and remembers what was there."""

    def __init__(self, scope: Scope, anatomy: Anatomy, measurement: Measurement, progress: Tick | None):
        self.scope, self.measurement, self.progress = scope, measurement, progress
        self.model, self.anatomy = scope.model, anatomy
        self.samples = self.batch_size = self.depth = self.past = 0
        self.is_masked = self.leaks_through_mask = False
        self.towers: dict[str, dict[str, Any]] = {}  # what is true of each part, in the order in which they ran
        self.device, self.dtype = torch.device("cpu"), ""
        self.ids = IdsSeen()
        self.weights = AskedOfWeights(self.model, scope.kept(norms_of_blocks), scope.kept(modules_of_attention))
        self.split_heads: dict[Place, Any] = {}  # where tensor parallelism splits them, and among which processes
        self.own_heads = False  # where a block is split, and it is not known whether its heads are
        acts: list[Any] = [Listen(measurement.stations_to_hear(), self._see_tokens)]
        if measurement.wants_attention:
            acts.append(ListenToAttention(self._see_attention))
        masks = scope.kept(MaskFinder)
        self.machine = Machine(self.model, self.anatomy, *acts, on_block_end=self._end_block, masks=masks)
        self.final_norm = FinalNorm(scope.kept(norms_outside), self._see_final_norm)

    def run(self, batch: Batch, tokenizer: Tokenizer | None = None) -> None:
        if self.samples == 0:
            self.anatomy, self.causality = self.scope.causality()
        self._running, self.batch_size = "", 0
        self.measurement.begin(self.samples, batch, tokenizer)
        with self.machine, self.final_norm:
            call(self.model, batch)
        of_ids = self.ids.asked(batch)
        self.measurement.also = of_ids + (self.weights.asked() if self.samples == 0 else [])
        while self.measurement.end(can_look_again=True):
            with self.machine, self.final_norm:
                call(self.model, batch)
        answers = self.measurement.answers
        self.ids.see(tokenizer, answers[: len(of_ids)])
        if self.samples == 0:
            self.weights.read(answers[len(of_ids) :])
        self.scope.has_outliers |= self.measurement.outliers
        if self.depth == 0:
            raise ValueError(
                f"none of the blocks {[b.name for b in self.anatomy.blocks][:4]} ran; name them with blocks="
            )
        if self.samples == 0 and self.is_masked and self.anatomy.family == "unknown":
            self.leaks_through_mask = hidden_tokens_reach_others(self.model, self.anatomy, batch)
        self.samples += self.batch_size

    # --- while the model runs -------------------------------------------------------------------------

    def _see_tokens(self, visit: Visit, station: str, tokens: Tensor, source: Tensor) -> None:
        if station == "input":
            if not self.measurement.again:  # else it was seen the first time
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
        part, block, number = visit.part, visit.block, visit.number
        sequences = tokens.shape[0] // visit.streams
        if number == 1:
            self.device, self.dtype = tokens.device, str(tokens.dtype).removeprefix("torch.")
        self.batch_size = max(self.batch_size, sequences)
        self.past = max(self.past, self.machine.running.now.past)
        self.is_masked |= visit.real is not None
        require_whole(block.module, tokens)
        if (tower := self.towers.get(part)) is None:
            tower = self.towers[part] = {
                "first_block": number,
                "tokens": 0,
                "samples": 0,
                "family": block.family or self.anatomy.family,
                "placement": block.placement,
                "causal": self.anatomy.causal if block.causal is None else block.causal,
                "token_axis": self.anatomy.axis_of(block),
            }
        tower["last_block"] = max(tower.get("last_block", 0), number)
        tower["tokens"] = max(tower["tokens"], tokens.shape[1])
        if number == 1 or part != self._running:
            tower["samples"] += sequences
            tower["width"] = tokens.shape[2]
        self._running = part

    def _see_final_norm(self, visit: Visit, source: Tensor) -> None:
        tokens = self.machine.running.batch_first(source)
        with torch._C.DisableTorchFunction(), torch.no_grad(), full_precision(tokens):
            self.measurement.see_final_norm(visit, tokens, source)

    def _see_attention(self, visit: Visit, kind: str, heads: Iterator[Head], values: Tensor | None) -> None:
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            self.measurement.see_attention(visit, kind, heads, values)
        module = visit.block.cross_attention if kind == "cross_attention" else visit.block.attention
        group = processes_of(module or visit.block.module)
        self.own_heads |= group is not None and module is None
        if group is not None and module is not None:
            self.split_heads[Place(visit.number, kind)] = group

    def _end_block(self, visit: Visit) -> None:
        self.depth = max(self.depth, visit.number)
        if self.progress is not None and not self.measurement.again:
            self.progress()

    # --- afterwards -----------------------------------------------------------------------------------

    def metadata(self) -> dict[str, Any]:
        model, anatomy, measurement = self.model, self.anatomy, self.measurement
        weights, config = walking.weights_in(self.scope.modules), getattr(self.model, "config", None)
        towers = self.towers if len(self.towers) > 1 or len(anatomy.parts) > 1 else {}
        first = next(iter(self.towers.values()))
        placements = {tower["placement"] for tower in self.towers.values()}
        return {
            "model": getattr(config, "name_or_path", "") or type(model).__name__,
            "class": type(model).__name__,
            "family": anatomy.family,
            "blocks": self.depth,
            "parts": {name: tower["last_block"] - tower["first_block"] + 1 for name, tower in towers.items()},
            "towers": towers,
            "shared_weights": len(anatomy.blocks) < self.depth,
            "ids": self.ids.to_dict(),
            "tokens": first["tokens"],
            "width": first["width"],
            "samples": self.samples,
            "token_axis": anatomy.token_axis,
            "placement": placements.pop() if len(placements) == 1 else None,
            "final_norm": self.final_norm.name,
            "causal": self.causality.causal,
            "causal_by": self.causality.by,
            "right_to_left": anatomy.right_to_left,
            "parameters": sum([parameter.numel() for parameter in weights]),
            "weights": self.weights.state,
            "weights_not_finite": self.weights.not_finite(outputs=bool(measurement.not_finite)),
            "dtype": self.dtype,
            "device": str(device_of(model, self.scope.modules)),
            "attention_implementation": getattr(config, "_attn_implementation", None),
            **of_measurement(measurement),
        }

    def notes(self) -> list[str]:
        """What was asked for and not seen, and what a reader must know."""
        anatomy, measurement = self.anatomy, self.measurement
        notes = [*note(measurement.not_finite, self.samples), *anatomy.notes, *anatomy.left_out]
        seen = {station for block in anatomy.blocks for station in block.spots}
        if missing := sorted(measurement.stations & set(at.BLOCK) - seen):
            notes.append(f"stations that this model does not show: {', '.join(missing)}")
        if self.causality.causal:
            notes += self.ids.notes()
        if self.past:
            notes.append(f"the inputs bring a cache of {self.past} tokens: only the new tokens are measured")
        if self.scope.are_apart is not None:
            how = "are measured one by one" if self.scope.are_apart else "see each other, and are measured as one"
            notes.append(f"position_ids begin again within a row: the sequences packed there {how}")
        if self.leaks_through_mask:
            notes.append("tokens that the mask hides change the others: does it mark real tokens? mask= says what does")
        if anatomy.sees_some_later:
            notes.append("tokens see some later ones, but not all (chunks, a look ahead, a window): counted as causal")
        if anatomy.right_to_left:
            notes.append("tokens see later ones and not earlier ones (right to left): no remedy has a mean for that")
        ran = list(self.towers)
        if idle := [part for part in anatomy.parts if part not in ran]:
            notes.append(f"not run with these inputs, and not counted: {', '.join(idle)}")
        elif ran != list(anatomy.parts):
            before = ", ".join(anatomy.parts)
            notes.append(f"blocks are numbered as they ran ({', '.join(ran)}), in apply's blocks= as {before}")
        if between := sorted(measurement.between) if anatomy.between is None else anatomy.between:
            named = ", ".join(map(str, between))
            notes.append(f"something else changes the tokens between the blocks, before block {named}")
        if measurement.wants_attention:
            blind = [n for n in range(1, self.depth + 1) if (n, "attention") not in measurement.attention_seen]
            if blind:
                notes.append(f"attention was not seen in blocks {', '.join(map(str, blind))}")
        if self.own_heads:
            notes.append("the blocks are split among processes: heads are those that this process computes, from 0")
        if unused := sorted(self.machine.running.masks.unused):
            notes.append(f"not used as masks of real tokens: {', '.join(unused)}")
        return notes + self._not_taken()

    def _not_taken(self) -> list[str]:
        """Measures that were asked for, and that this model gives nowhere, with what they lack."""
        measurement = self.measurement
        taken = {reading.measure for reading in measurement.readings}
        lacking: dict[str, list[str]] = {}
        for name in measurement.measures - taken:
            measure = MEASURES[name]
            waits_for_sinks = "sinks" in measure.needs and not measurement.sinks
            if waits_for_sinks or (measure.of == "attention" and not measurement.attention_seen):
                continue  # which is said already
            why = "not seen in this model"
            if measure.of == "attention" and measurement.incomplete and not measure.incomplete:
                why = "attention's rows sum to less than 1 beside its sink, which is no token"
            elif "tokens" in measure.needs:
                why = "what attention reads was not seen (attention_input)"
            elif "values" in measure.needs and not measurement.values_seen:
                why = "values were not seen (eager attention)"
            lacking.setdefault(why, []).append(name)
        order = list(MEASURES)
        return [f"{why}: no {', '.join(sorted(names, key=order.index))}" for why, names in lacking.items()]


_MOST_TOKENS = 2**31


def positions(tokens: Sequence[int] | None) -> tuple[int, ...]:
    """The positions of the tokens that are left out of every measure."""
    if tokens is None:
        return ()
    if isinstance(tokens, str) or not isinstance(tokens, Sequence) or not all(isinstance(i, int) for i in tokens):
        raise ValueError(f"expected exclude_tokens= a list of positions, got {tokens!r}")
    if any(abs(index) > _MOST_TOKENS for index in tokens):
        raise ValueError(f"expected positions that a sequence can have in exclude_tokens=, at most {_MOST_TOKENS}")
    return tuple(int(index) for index in tokens)


def of_measurement(measurement: Measurement) -> dict[str, Any]:
    """The metadata that say what was measured, and by which versions of what."""
    return {
        "not_finite": as_records(measurement.not_finite),
        "arithmetic": list(measurement.formats),
        "measures": [name for name in MEASURES if name in measurement.measures],
        "stations": sorted(measurement.stations),
        "error_bounds": dict(measurement.error_bounds),
        "excluded_tokens": list(measurement.exclude) or None,
        "versions": dict(_versions()),
    }


@cache
def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__, "python": platform.python_version()}
    for package in ("depthscope", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
