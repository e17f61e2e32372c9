"""A model on inputs, with what is true of the two: settled once, and read by every verb.

    scope = depthscope.Scope(model, batch)
    print(scope)                # 12 blocks of width 768 · pre-norm · causal (by its family) · 4 × 128 tokens
    scope.probe()
    scope.probe(other_batch)    # nothing is settled again

`depthscope.probe(model, batch)` is `Scope(model, batch).probe()`, and so for every verb. What is settled: the opened
(uncompiled) model, its anatomy, its token axis, whether it is causal and how that is known, the mask, and whether
sequences are packed. Each is found out when it is first asked for. A scope holds its model and its inputs as long as
its user holds the scope, and there is no other cache. A module that was exchanged, added or taken away is noticed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from threading import get_ident
from typing import Any, NamedTuple, Self, TypeVar, cast

from torch import Tensor, nn

from depthscope import walking
from depthscope.anatomy import Anatomy
from depthscope.discovery import (
    Hints,
    anatomy_with_hints,
    are_apart,
    check_hints,
    depth_of,
    is_causal,
    is_wrapped,
    pieces_of,
    unpacked,
    with_sight,
)
from depthscope.discovery.causality import Seen, seen
from depthscope.hooks import uncompiled, undisturbed
from depthscope.inputs import Batch, Tokenizer, batches
from depthscope.naming import counted
from depthscope.stations import IN_WORDS
from depthscope.verbs import Verbs

T = TypeVar("T")


class Causality(NamedTuple):
    """Whether tokens are kept from seeing later ones, and how that is known."""

    causal: bool | None  # None: not known, and could not be tried
    by: str  # "user", "tried", or "" where the family says so


class Scope(Verbs):
    """A model on inputs.

    Args:
        model: any `nn.Module` that holds Transformer blocks; of a compiled one, the original is run.
        inputs: a tensor, a dict batch, strings (with `tokenizer`), or an iterable of these. Without inputs only those
            verbs work that need none: `spectra`, `apply`, `remove`, `restore`, `watch`, `ablate`.
        tokenizer: makes ids of strings.
        blocks: a glob of module names ("encoder.layer.*"), for models of no known family.
        part: of a model with several, the only one that is looked at ("encoder", "decoder", …).
        token_axis: 1 for activations (batch, n, d), 0 for (n, batch, d); of an unknown model it is found by trying.
        mask: (batch, n) true for real tokens, or the name of the argument that has it ("~name": true for padding).
        causal: whether no token sees a later one; else known of the family, or found by trying.

    Example:
        >>> import torch, depthscope
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
        >>> scope = depthscope.Scope(model, torch.randn(2, 5, 16))
        >>> scope.depth_of_model
        3
        >>> len(scope.probe().curve("token_similarity"))  # what enters block 1, and the output of each block
        4
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any = None,
        *,
        tokenizer: Tokenizer | None = None,
        blocks: str | None = None,
        part: str | None = None,
        token_axis: int | None = None,
        mask: Tensor | str | None = None,
        causal: bool | None = None,
    ):
        said = {"blocks": blocks, "part": part, "token_axis": token_axis, "mask": mask, "causal": causal}
        self.original = model  # as the user has it: perhaps compiled, perhaps a wrapper
        self.model, notes = uncompiled(model)
        self.tokenizer = tokenizer
        self.hints = cast(Hints, {name: value for name, value in said.items() if value is not None})
        self._notes = notes
        self._measuring: int | None = None  # the thread in which `undisturbed` is open
        self._begin(inputs)
        self._forget()

    def _begin(self, inputs: Any) -> None:
        self.inputs = inputs
        self._first: Batch | None = None
        self._rest: Iterator[Batch] | None = None  # what follows the first batch, until it is read

    def _forget(self) -> None:
        self._anatomy: Anatomy | None = None
        self._settled: list[tuple[nn.Module, dict[str, nn.Module | None], Any]] = []  # as the modules were
        self._kept: dict[Callable[..., Any], Any] = {}
        self._sights: dict[tuple[bool, frozenset[Any]], Anatomy] = {}
        self._causal: Causality | None = None
        self.has_outliers = False  # once a probe has found some, it looks for them from the beginning
        self.are_apart: bool | None = None  # sequences that share a row; None: no row has held several so far
        self._seen: Seen | None = None

    # --- inputs ---------------------------------------------------------------------------------------

    @property
    def first(self) -> Batch | None:
        """The first batch, as the model takes it; None without inputs."""
        if self._first is None and self.inputs is not None:
            self._rest = batches(self.model, self.inputs, self.tokenizer)
            self._first = next(self._rest, None)
            if self._first is None:
                raise ValueError("expected at least one batch, got none")
        return self._first

    @property
    def first_batch(self) -> Batch:
        """The first batch; refused without inputs."""
        if (first := self.first) is None:
            raise ValueError("expected inputs (a tensor, a dict batch, strings, or an iterable of these), got none")
        return first

    def calls(self) -> Iterator[Batch]:
        """The batches, one after the other. An iterator is read once, everything else as often as it is asked for."""
        first, rest = self.first_batch, self._rest
        self._rest = None
        if rest is not None:
            return chain([first], rest)
        if isinstance(self.inputs, Iterator):
            raise ValueError("the inputs are an iterator, which can be read once: pass a list, or scope.probe(inputs)")
        return batches(self.model, self.inputs, self.tokenizer, self.modules if self._anatomy is not None else None)

    def keep_inputs(self) -> Self:
        """Reads the whole of an iterator into memory, for a verb that needs its inputs several times."""
        if isinstance(self.inputs, Iterator):
            self._begin([batch.inputs for batch in self.calls()])
        return self

    @property
    def notes(self) -> list[str]:
        """What a reader must know of everything that is measured here."""
        return list(self._notes)

    def on(self, inputs: Any) -> Scope:
        """The same model on other inputs: what is settled stays settled, of calls with the same arguments."""
        if isinstance(self.hints.get("mask"), Tensor):
            raise ValueError("mask= is a tensor of one batch: for further ones name the argument that has it")
        if self.inputs is not None:
            _ = self.anatomy
        other = copy.copy(self)
        other._begin(inputs)
        other._sights, other._causal, other._seen = dict(self._sights), None, None
        return other

    def first_only(self) -> Scope:
        """The same model on the first batch alone, with one sequence to a row."""
        batch = self.one_to_a_row(self.first_batch)
        other = self.on(batch.inputs)
        other._causal = self._causal
        return other

    # --- what is true of the model --------------------------------------------------------------------

    @property
    def anatomy(self) -> Anatomy:
        """What the model is made of, with what its user says of it."""
        if self._anatomy is not None and self._measuring is None and self._was_exchanged():
            self._forget()
        if self._anatomy is None:
            self._anatomy = anatomy_with_hints(self.model, self.hints, self.first)
            self._settled, self._kept = _settled(self.model), {}
        return self._anatomy

    def _was_exchanged(self) -> bool:
        """Whether a module of the model, or the forward of one, was exchanged, added or taken away since the anatomy
        was settled."""
        for module, children, forward in self._settled:  # a loop: of hundreds of modules, a call each costs more
            own = module.__dict__
            if own["_modules"] != children or own.get("forward") is not forward:
                return True
        return False

    @property
    def modules(self) -> list[nn.Module]:
        """Those of the model, when `anatomy` was asked for last."""
        if self._anatomy is None:
            _ = self.anatomy
        return [module for module, _, _ in self._settled]

    def kept(self, make: Callable[[nn.Module, Anatomy], T]) -> T:
        """`make(model, anatomy)`, which depends on the modules alone: it is made again when `anatomy` has noticed that
        one was exchanged."""
        anatomy = self.anatomy if self._anatomy is None else self._anatomy
        if make not in self._kept:
            self._kept[make] = make(self.model, anatomy)
        return cast(T, self._kept[make])

    @property
    def depth_of_model(self) -> int:  # how many blocks run in a pass
        return depth_of(self.model, self.anatomy)

    def seen_anatomy(self, *, again: bool) -> Anatomy:
        """The anatomy with what the first batch shows of its causality. `again` tries also what is known not to be
        causal: a remedy must not trust a library's word."""
        anatomy, key = self.anatomy, (again, self._way_of_calling())
        if key not in self._sights:
            with self.undisturbed():
                self._sights[key] = with_sight(self.model, anatomy, self.one_to_a_row(self.first_batch), again=again)
        return self._sights[key]

    def _way_of_calling(self) -> frozenset[Any]:
        """The arguments of the first batch without their tensors: with `causal=True`, a call may be another."""
        named = self.first.kwargs if self.first is not None else {}
        return frozenset((name, v if isinstance(v, bool | int | str) else None) for name, v in named.items())

    def causality(self) -> tuple[Anatomy, Causality]:
        """The anatomy and the causality that are true of the first batch. What is not known is tried, and so is what
        somebody's module around a library's model may have changed. Of PyTorch's layers, which each call tells, what
        is found is true of calls such as this one."""
        anatomy, again = self.anatomy, (True, self._way_of_calling())
        anatomy = self._sights.get(again, anatomy)
        if any(block.causal_arguments for block in anatomy.blocks) and anatomy.causal is None:
            if self._causal is None:
                found = None
                if len(anatomy.parts) == 1:
                    with self.undisturbed():
                        found = is_causal(self.model, anatomy, self.one_to_a_row(self.first_batch))
                self._causal = Causality(found, anatomy.causal_by)
            return anatomy, self._causal
        anatomy = self.seen_anatomy(again=again in self._sights or self.kept(is_wrapped))
        return anatomy, Causality(anatomy.causal, anatomy.causal_by)

    def is_causal(self) -> bool | None:
        """Whether no token sees any later one, of calls such as the first batch; None if it cannot be tried."""
        return self.causality()[1].causal

    def one_to_a_row(self, batch: Batch) -> Batch:
        """The batch with sequences that are packed into one row, and do not see each other, each in a row of its
        own."""
        pieces = pieces_of(batch.kwargs)
        if pieces is None:
            return batch
        if self.are_apart is None:
            with self.undisturbed():
                self.are_apart = are_apart(self.model, self.anatomy, batch, pieces)
        return unpacked(batch, pieces) if self.are_apart else batch

    @property
    def apply_hints(self) -> dict[str, Any]:
        """What `apply` must be told of this model: what its user said, and what was tried and cannot be known."""
        anatomy = self.anatomy
        options: dict[str, Any] = dict(self.hints)
        if anatomy.spelled is not None:
            options["blocks"] = anatomy.spelled
        if self.inputs is not None:
            anatomy = self.seen_anatomy(again=True)
        if anatomy.family == "unknown" and anatomy.token_axis == 0:
            options["token_axis"] = 0
        options.pop("causal", None)
        return options | ({"causal": anatomy.causal} if anatomy.causal_by and anatomy.causal is not None else {})

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """The model in eval mode, without gradients, and everything as it was afterwards. May be opened inside itself,
        by the same thread."""
        if self._measuring == get_ident():
            yield
            return
        with undisturbed(self.model, self.modules):
            self._measuring = get_ident()
            try:
                yield
            finally:
                self._measuring = None

    # --- in words -------------------------------------------------------------------------------------

    def __str__(self) -> str:
        anatomy, shape = self.anatomy, ""
        facts = [getattr(getattr(self.model, "config", None), "model_type", "") or type(self.model).__name__]
        blocks = counted(self.depth_of_model, "block")
        causality = Causality(anatomy.causal, anatomy.causal_by) if self.first is None else self.causality()[1]
        if self.first is not None:
            if self._seen is None:
                with self.undisturbed():
                    self._seen = seen(self.model, anatomy, self.one_to_a_row(self.first))
            sequences, tokens, width = self._seen.entrance.shape
            width //= self._seen.streams
            padded = self._seen.real.numel() - int(self._seen.real.sum())
            shape = f"{sequences} × {counted(tokens, 'token')}" + (f", {padded} padded" if padded else "")
            blocks += f" of width {width}"
        placements = {IN_WORDS[block.placement] for block in anatomy.blocks if block.placement}
        facts += [blocks, " and ".join(sorted(placements)), _in_words(causality), shape]
        if self.inputs is not None and self.causality()[0].sees_some_later:
            facts[-2] = "tokens see some later ones, counted as causal (found by trying)"
        if len(anatomy.parts) > 1:
            facts.insert(2, f"parts {', '.join(anatomy.parts)}")
        return " · ".join(fact for fact in facts if fact)


def _settled(model: nn.Module) -> list[tuple[nn.Module, dict[str, nn.Module | None], Any]]:
    """The modules, each with what stands in it, and with what somebody has put in the place of its class's forward."""
    return [(module, dict(module._modules), vars(module).get("forward")) for module in walking.modules(model)]


def scope_of(model: nn.Module | Scope, inputs: Any = None, tokenizer: Tokenizer | None = None, **hints: Any) -> Scope:
    """What a verb is given, as a scope: a model with inputs and hints, or a scope, perhaps with further inputs."""
    check_hints(hints)
    if not isinstance(model, Scope):
        return Scope(model, inputs, tokenizer=tokenizer, **hints)
    if hints := {name: value for name, value in hints.items() if value is not None}:
        raise TypeError(f"a Scope knows its model already: say {', '.join(hints)} where the Scope is made")
    found = model if inputs is None else model.on(inputs)
    if tokenizer is not None:
        found = copy.copy(found)
        found.tokenizer = tokenizer
    return found


def _in_words(found: Causality) -> str:
    how = {"user": "as you say", "tried": "found by trying"}.get(found.by, "by its family")
    if found.causal is None:
        return "not known whether causal"
    return f"{'causal' if found.causal else 'not causal'} ({how})"
