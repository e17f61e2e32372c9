"""The logit lens: what the model would predict if a block were its last, against what it predicts.

KL(p_final ‖ p_block) in nats, how often the first choice is the final one, and how many of the five likeliest tokens
are (nostalgebraist 2020; as in Csordás et al. 2025, arXiv 2505.13898).

What a model does between its last block and its logits is found by watching a pass, and checked against it. It is a
chain of modules, each of which reads what the one before returned (final norm, projection, head); the last may be the
product with the weights of an embedding, without a module. A factor may stand between two of them (T5 scales what its
head reads, Cohere what it returns), and a cap at the end (Gemma 2). Anything else is not understood, and there is no
lens then. The chain is run again on other tokens, so that norms are taken of *these* tokens, never with a scale that
was kept from another block.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.anatomy import Anatomy
from depthscope.hooks import first_tokens
from depthscope.inputs import Batch
from depthscope.probing.losses import ids_in, logits_in
from depthscope.safety import TemporaryHook
from depthscope.usage.forward import ForwardPass
from depthscope.usage.sampling import Means

TOP = 5
_CHUNK = 2**23  # logits at a time: 32 MB of float32, whatever the vocabulary
_ROUNDING = 256  # machine epsilons of the largest logit: another order of sums, another shape of the product


class Lens:
    """Of one model: the tail is looked for in every pass, since what modules return is only there."""

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        self.model = model
        self.watch = TailWatch(model, anatomy)
        self.means = Means()
        self.why_not = ""  # where there is no lens

    def see(self, batch: Batch, returned: Any, forward: ForwardPass) -> None:
        """After a pass: every block's sampled tokens through the tail."""
        if self.why_not or forward.last is None:
            return
        visit, tokens, source = forward.last
        own = batch.kwargs.get("decoder_input_ids")  # what the blocks in question read: a decoder has ids of its own
        ids = own if visit.part.startswith("decoder") and isinstance(own, Tensor) else ids_in(batch)
        logits = None if ids is None else logits_in(self.model, returned, ids, visit.shape[-1])
        if logits is None:
            self.why_not = "the model returns no logits for every token: no logit lens (load it with its head)"
            return
        config: Any = getattr(self.model, "config", None)
        tail = self.watch.tail(source, logits, getattr(config, "final_logit_softcapping", None))
        ours = forward.kept[visit.number]
        theirs = forward.sampled.of(logits.reshape(*tokens.shape[:2], -1), visit.real)
        if tail is None or not _agree(tail.logits(ours), theirs):
            self.why_not = (
                "what stands between the last block and the logits is no chain of modules that makes the model's own "
                "logits again: no logit lens"
            )
            return
        for chunk in torch.arange(len(ours), device=ours.device).split(max(1, _CHUNK // logits.shape[-1])):
            self._compare(tail, forward.kept, chunk, visit.number)

    def _compare(self, tail: Tail, kept: dict[int, Tensor], chunk: Tensor, last: int) -> None:
        final = torch.log_softmax(tail.logits(kept[last][chunk]), dim=-1)  # (k, v)
        top = final.topk(min(TOP, final.shape[-1]), dim=-1).indices  # (k, 5)
        p = final.exp()
        for block, tokens in kept.items():
            if tokens.shape != kept[last].shape:
                continue  # tokens that were merged on the way have no counterpart at the end
            lens = final if block == last else torch.log_softmax(tail.logits(tokens[chunk]), dim=-1)
            choice = lens.topk(top.shape[-1], dim=-1).indices
            kl = torch.where(p > 0, p * (final - lens), 0.0).sum(dim=-1, dtype=torch.float64).clamp(min=0)
            both = (choice.unsqueeze(-1) == top.unsqueeze(-2)).any(dim=-1)
            for name, value in (("kl", kl), ("top1", choice[:, 0] == top[:, 0]), ("top5", both)):
                self.means.add(block, f"lens_{name}", value.double().mean(), len(chunk))


@dataclass(frozen=True)
class Tail:
    """The modules from the last block to the logits, with the factor before each and after all, and a cap."""

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
        self.calls: list[tuple[nn.Module, Tensor, Tensor]] = []  # what each was given, and returned
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
        entered, returned = first_tokens((*args, *kwargs.values())), first_tokens(output)
        # What reads more than the tokens, as a decoder does that reads an encoder's, cannot be run again on others.
        if entered is not None and returned is not None and len(read) <= 1:
            self.calls.append((module, entered, returned))

    def tail(self, tokens: Tensor, logits: Tensor, cap: float | None) -> Tail | None:
        """The shortest chain from the tokens that left the last block to the logits; None if there is none."""
        ways: list[tuple[Tensor, tuple[Callable[[Tensor], Any], ...], tuple[float, ...]]] = [(tokens, (), ())]
        tried: set[int] = set()
        while ways:
            at, modules, factors = ways.pop(0)
            if modules and (factor := _factor(logits, at)) is not None:
                return Tail(modules, (*factors, factor))
            if modules and cap and logits.shape == at.shape:
                capped = (cap * torch.tanh(at.double() / cap)).to(logits.dtype)
                if _factor(logits, capped) is not None:
                    return Tail(modules, (*factors, 1.0), cap)
            for weight in self.embeddings:
                head, shape = partial(F.linear, weight=weight), (*at.shape[:-1], weight.shape[0])
                fits = weight.shape[1] == at.shape[-1] and logits.shape == shape
                if fits and (factor := _factor(logits[:1], head(at[:1]))) is not None:
                    return Tail((*modules, head), (*factors, 1.0, factor))
            for number, (module, entered, returned) in enumerate(self.calls):
                if number not in tried and (factor := _factor(entered, at)) is not None:
                    tried.add(number)
                    ways.append((returned, (*modules, module), (*factors, factor)))
        return None


def _agree(found: Tensor, logits: Tensor) -> bool:
    """Whether a tail makes the model's own logits (k, v) of the tokens that left its last block."""
    expected = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if found.shape != expected.shape or not bool(expected.isfinite().all()):
        return False
    allowed = _ROUNDING * torch.finfo(logits.dtype).eps * expected.abs().max()
    return bool((found - expected).abs().max() <= allowed)


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
