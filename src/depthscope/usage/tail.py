"""What a model does between its last block and its logits, found by watching a pass and checked against it.

The way is a chain of modules: each reads what the one before returned (final norm, projection, head); the last may be
the product with the weights of an embedding, without a module. A factor may stand between two of them (T5 scales what
its head reads, Cohere what it returns), and a cap behind the last (Gemma 2). Anything else is not understood, and there
is no lens then. The chain is run again on other tokens, so that norms are taken of *these* tokens, never with a scale
that was kept from another block.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.anatomy import Anatomy
from depthscope.hooks import first_tokens
from depthscope.safety import TemporaryHook

_ROUNDING = 256  # machine epsilons of the largest logit: another order of sums, another shape of the product


class _Call(NamedTuple):
    module: nn.Module
    given: Tensor
    returned: Tensor


@dataclass(frozen=True)
class Tail:
    """The modules from the last block to the logits, with the factor before each and behind all, and a cap."""

    modules: tuple[Callable[[Tensor], Any], ...]
    factors: tuple[float, ...]  # one more than modules
    cap: float | None = None  # cap·tanh(logits / cap)

    def logits(self, tokens: Tensor) -> Tensor:
        """Of tokens (k, d) in the model's dtype: (k, vocabulary), in float32 or wider."""
        x = tokens.unsqueeze(0)
        for module, factor in zip(self.modules, self.factors, strict=False):
            found = first_tokens(module(x if factor == 1 else x * factor))
            assert found is not None
            x = found
        x = x.reshape(-1, x.shape[-1])
        wide = x.to(torch.promote_types(x.dtype, torch.float32)) * self.factors[-1]
        return wide if self.cap is None else self.cap * torch.tanh(wide / self.cap)


class TailWatch:
    """While it is open, remembers which modules outside the blocks were called with which tokens, until `forget`."""

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        blocks = {id(block.module) for block in anatomy.blocks}
        inside = {id(module) for block in anatomy.blocks for module in block.module.modules()}
        around = {id(m) for m in model.modules() if any(id(child) in blocks for child in m.modules())}
        self.modules = [m for m in model.modules() if id(m) not in inside | around]
        self.embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
        self.calls: list[_Call] = []
        self._open: ExitStack | None = None

    def __enter__(self) -> TailWatch:
        with ExitStack() as stack:
            for module in self.modules:
                stack.callback(module.register_forward_hook(TemporaryHook(self._see), with_kwargs=True).remove)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    def forget(self) -> None:
        """What was called before the last block is no part of its tail."""
        self.calls.clear()

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        read = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        given, returned = first_tokens((*args, *kwargs.values())), first_tokens(output)
        # What reads more than the tokens, as a decoder does that reads an encoder's, cannot be run again on others.
        if given is not None and returned is not None and len(read) <= 1:
            self.calls.append(_Call(module, given, returned))

    def way(self, tokens: Tensor, logits: Tensor, cap: float | None) -> Tail | None:
        """The shortest chain from the tokens that left the last block to the logits; None if there is none."""
        ways: list[tuple[Tensor, tuple[Callable[[Tensor], Any], ...], tuple[float, ...]]] = [(tokens, (), ())]
        tried: set[int] = set()
        while ways:
            at, modules, factors = ways.pop(0)
            if modules and (factor := _factor(logits, at)) is not None:
                return Tail(modules, (*factors, factor))
            if modules and cap and (factor := _factor_under_cap(logits, at, cap)) is not None:
                return Tail(modules, (*factors, factor), cap)
            if (tied := self._tied(at, logits)) is not None:
                head, factor = tied
                return Tail((*modules, head), (*factors, 1.0, factor))
            for number, call in enumerate(self.calls):
                if number not in tried and (factor := _factor(call.given, at)) is not None:
                    tried.add(number)
                    ways.append((call.returned, (*modules, call.module), (*factors, factor)))
        return None

    def _tied(self, tokens: Tensor, logits: Tensor) -> tuple[Callable[[Tensor], Any], float] | None:
        """The product with the weights of an embedding, if it makes the logits, and the factor behind it."""
        for weight in self.embeddings:
            shape = (*tokens.shape[:-1], weight.shape[0])
            if weight.shape[1] == tokens.shape[-1] and logits.shape == shape:
                head = partial(F.linear, weight=weight)
                if (factor := _factor(logits[:1], head(tokens[:1]))) is not None:
                    return head, factor
        return None


def agrees(tail: Tail, tokens: Tensor, logits: Tensor) -> bool:
    """Whether the tail makes the model's own logits (k, v) of the tokens (k, d) that left its last block."""
    found, expected = tail.logits(tokens), logits.to(torch.promote_types(logits.dtype, torch.float32))
    if found.shape != expected.shape or not bool(expected.isfinite().all()):
        return False
    allowed = _ROUNDING * torch.finfo(logits.dtype).eps * expected.abs().max()
    return bool((found - expected).abs().max() <= allowed)


def _factor_under_cap(logits: Tensor, of: Tensor, cap: float) -> float | None:
    """c with logits = cap·tanh(c·of / cap). 1 is tried as the model does it, since logits that have come near the cap
    have lost the digits from which they could be uncapped."""
    if logits.shape != of.shape:
        return None
    capped = (cap * torch.tanh(of.double() / cap)).to(logits.dtype)
    allowed = 32 * torch.finfo(logits.dtype).eps * torch.linalg.vector_norm(logits.double())
    if bool(torch.linalg.vector_norm(capped.double() - logits.double()) <= allowed):
        return 1.0
    uncapped = cap * torch.atanh((logits.double() / cap).clamp(-1 + 1e-12, 1 - 1e-12))
    return _factor(uncapped, of)


def _factor(x: Tensor, of: Tensor) -> float | None:
    """c with x = c·of, to rounding; None if there is none. The same tensor, or a view of all of it, has 1."""
    if x.shape != of.shape:
        return None
    if 0 != x.data_ptr() == of.data_ptr() and x.stride() == of.stride() and x.dtype == of.dtype:
        return 1.0
    a, b = x.detach().flatten().double(), of.detach().flatten().double()
    energy = torch.dot(b, b)
    if not bool(energy.isfinite() & (energy > 0)):
        return None
    factor = torch.dot(a, b) / energy
    eps = max(torch.finfo(t.dtype).eps for t in (x, of))
    close = torch.linalg.vector_norm(a - factor * b) <= 32 * eps * torch.linalg.vector_norm(a)
    return factor.item() if bool(close & (factor != 0)) else None
