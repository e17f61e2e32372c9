"""Gradients of a watched step, reduced to numbers while the backward pass makes them.

Hooks on the blocks' parameters give the norm of each role as its gradient arrives; hooks on what W_O and the FFN's last
layer return give the tokens' mean of its gradient. Nothing of a gradient's size is kept, and nothing is changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthscope.anatomy import BlockAnatomy
from depthscope.hooks import Machine, Visit
from depthscope.measures.coherence import TokenSum, mean_coherent_share, token_sum
from depthscope.probing.roles import COHERENT, MEASURES, Roles, norm_of_norms
from depthscope.safety import unhook
from depthscope.watching.loop import Guard, Writes, guarded

Curves = dict[str, dict[str, list[float]]]  # as in `records`


class Written(NamedTuple):
    """What is kept of a writer until the gradient of its weight comes."""

    station: str
    module: int  # the block's
    read: TokenSum
    gradient: TokenSum
    as_rows: bool  # its weight is (a, d)


class GradientTaps:
    """Open from the beginning of a watched pass until every gradient has come, or `flush` is called.

    `machine` follows the pass; `tell(curves)` gets the numbers, blocks 0..L, once. A gradient is that of the first
    backward pass that reaches it, as autograd hands it over: before it is added to what is there, clipped, unscaled or
    shared with other processes.
    """

    def __init__(self, machine: Machine, tell: Callable[[int, Curves], object], guard: Guard):
        self._machine, self._tell, self._guard = machine, tell, guard
        self._roles = Roles(machine.anatomy)
        if not any(self._roles.of(block)["queries_keys"] for block in machine.anatomy.blocks):
            warnings.warn(
                "which weights of this model are queries and keys is not known: their gradient, and how many blocks' "
                "attention can learn, are left out",
                stacklevel=4,
            )
        self._step: int | None = None
        self._handles: list[Any] = []
        self._forget()

    @property
    def has_come(self) -> bool:
        """Whether the backward pass has reached the blocks."""
        return bool(self._norms)

    def open(self, step: int) -> None:
        """The pass of a step begins: the machine is open."""
        self.close()
        self._step = step
        parameters = {}
        for block in self._machine.anatomy.blocks:
            for role, pieces in self._roles.of(block).items():
                for piece in pieces:
                    key = id(piece.parameter)
                    if piece.parameter.requires_grad and key not in self._roles.shared:
                        parameters[key] = piece.parameter
                        self._waiting.setdefault(key, []).append((id(block.module), role, piece))
        self._handles = [p.register_hook(partial(self._arrive, key)) for key, p in parameters.items()]
        for block in self._machine.anatomy.blocks:
            for station, layers in writers_of(block).items():
                for layer in layers:
                    write = guarded(self._guard, partial(self._write, block, station))
                    layer.register_forward_hook(Writes(self, write))
        self._machine.on_block_end = self._end_block

    def end_pass(self) -> None:
        """The forward pass is over: what it needed is taken down."""
        self._machine.on_block_end = None
        unhook(self._machine.model, lambda hook: isinstance(hook, Writes) and hook.owner is self)

    def flush(self) -> None:
        """Tells what has come, if anything has, and closes."""
        step = self._step
        curves: Curves = {}
        with self._guard():
            curves = self._curves()
        self.close()
        if step is not None and curves:
            self._tell(step, curves)

    def close(self) -> None:
        """Takes every hook down. May be called more than once."""
        self.end_pass()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._forget()
        self._step = None

    def _forget(self) -> None:
        self._waiting: dict[int, list[Any]] = {}  # by parameter: the block, role and piece of each of its uses
        self._norms: dict[int, dict[str, list[Tensor]]] = {}  # by block module and measure
        self._shares: dict[int, dict[str, Tensor]] = {}  # by block module and station
        self._numbers: dict[int, int] = {}  # of block modules, as they ran
        self._repeated = False  # a block ran twice: one gradient, and several blocks
        self._sums: dict[int, Written] = {}  # by the writer's weight
        self._last: dict[tuple[int, str], Any] = {}  # by block module and station: the hook on what was written last

    # --- forward --------------------------------------------------------------------------------------

    def _end_block(self, visit: Visit) -> None:
        self._repeated |= id(visit.block.module) in self._numbers
        self._numbers[id(visit.block.module)] = visit.number

    def _write(self, block: BlockAnatomy, station: str, layer: Any, args: tuple[Any, ...], output: Any) -> None:
        """A layer has written tokens of the residual stream's width; the last one of a branch is the writer."""
        visit = self._machine.visit
        if visit is None or visit.block is not block or not args or not isinstance(output, Tensor):
            return
        read, weight, tokens = args[0], layer.weight, visit.shape[:-1].numel()
        if (
            not (isinstance(read, Tensor) and output.requires_grad)
            or id(weight) not in self._waiting
            or output.shape[-1] != visit.shape[-1]
            or output.shape[:-1].numel() != tokens  # an expert, which reads some of the tokens
            or read.shape[:-1] != output.shape[:-1]
        ):
            return
        place = id(block.module), station
        if place in self._last:
            self._last.pop(place).remove()
        axis, real, shape = self._machine.anatomy.axis_of(block), visit.real, visit.shape[:-1]
        as_rows = not isinstance(layer, nn.Linear)  # Conv1D stores (a, d), a linear layer (d, a)

        def sum_up(part: Tensor) -> TokenSum:
            with torch.no_grad(), torch.autocast(part.device.type, enabled=False):
                whole = part.reshape(*shape, part.shape[-1])
                return token_sum(whole.transpose(0, 1) if axis == 0 else whole.flatten(1, -2), real)

        read_sum = sum_up(read.detach())  # at once: what was read need not be there when the gradient comes

        def reduce(gradient: Tensor) -> None:
            with self._guard():
                self._sums[id(weight)] = Written(station, id(block.module), read_sum, sum_up(gradient), as_rows)

        self._last[place] = output.register_hook(reduce)

    # --- backward -------------------------------------------------------------------------------------

    def _arrive(self, key: int, gradient: Tensor) -> None:
        with self._guard(), torch.no_grad():
            for module, role, piece in self._waiting.pop(key, ()):
                norms = self._norms.setdefault(module, {}).setdefault(MEASURES[role], [])
                norms += self._roles.part_norms(piece, gradient)
            if (found := self._sums.pop(key, None)) is not None:
                share = mean_coherent_share(gradient if found.as_rows else gradient.mT, found.read, found.gradient)
                self._shares.setdefault(found.module, {})[found.station] = share
        if self._step is not None and not self._waiting:
            self.flush()

    def _curves(self) -> Curves:
        if self._repeated:
            return {}
        depth = max(self._numbers.values(), default=0)
        curves: Curves = {}

        def put(station: str, measure: str, module: int, value: float) -> None:
            line = curves.setdefault(station, {}).setdefault(measure, [float("nan")] * (depth + 1))
            line[self._numbers[module]] = value

        for module, by_measure in self._norms.items():
            if module not in self._numbers:
                continue
            for measure, norms in by_measure.items():
                if norms:
                    put("output", measure, module, norm_of_norms(norms))
            for station, share in self._shares.get(module, {}).items():
                put(station, COHERENT, module, float(share))
        return curves


def writers_of(block: BlockAnatomy) -> dict[str, list[nn.Module]]:
    """By branch, the layers that may write it: W_O, and the layers of the FFN, of which the last that runs does.

    W_O is missing where it is no module that is called (PyTorch's own attention, XLNet). Linear layers count, and
    Hugging Face's Conv1D, which stores its weight transposed.
    """

    def is_matrix(layer: nn.Module) -> bool:
        weight = getattr(layer, "weight", None)
        is_known = isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
        return is_known and isinstance(weight, nn.Parameter) and weight.ndim == 2

    output = [] if block.context is None else [block.context.module]
    inner = [layer for module in block.ffn for layer in module.modules()]
    found = {"attention_branch": output, "ffn_branch": inner}
    return {station: [layer for layer in layers if is_matrix(layer)] for station, layers in found.items()}
