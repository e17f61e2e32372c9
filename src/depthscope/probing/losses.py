"""The loss of a model that is given nothing but its inputs: its own, or, of a causal model, that of the next token."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.hooks import Visit
from depthscope.inputs import Batch
from depthscope.scope import Scope

ANSWERS = ("labels", "targets")  # what a model is given to take its own loss
OWN, PASSED = "the model's own", "loss="  # which loss gradients are of
PRODUCT = "the product of the last output with a random matrix"
_NO_IDS = ("mask", "position", "type", "cache", *ANSWERS)


class NoLoss(ValueError):
    """The model returns no loss, and none can be made of what it returns."""


def causal_by_trying(scope: Scope, batch: Batch) -> bool:
    """Whether tokens are kept from seeing the answer; of a model that does not say so it is found out."""
    anatomy = scope.anatomy
    if anatomy.causal is None and not any(block.part for block in anatomy.blocks) and ids_in(batch) is not None:
        return bool(scope.is_causal())
    return bool(anatomy.causal)


def with_all_logits(model: nn.Module, batch: Batch) -> Batch:
    """The batch with targets, for models (nanoGPT) that give the logits of every position only then."""
    ids = ids_in(batch)
    asks = "targets" in inspect.signature(model.forward).parameters
    if ids is None or not asks or any(name in batch.kwargs for name in ANSWERS):
        return batch
    return Batch(batch.args, batch.kwargs | {"targets": ids})


def default_loss(model: nn.Module, batch: Batch, returned: Any, last: Visit, *, causal: bool) -> Tensor:
    """The loss of what a model returned, where nobody says which.

    If the batch has the answers it is the model's own: the `loss` of what was returned, or the one number in it. Else,
    of a causal model that reads ids and returns logits (batch, n, vocabulary), it is the cross-entropy of each token
    given those before it; padding does not count.
    """
    ids, logits = ids_in(batch), None
    if _has_answers(batch) or not causal:
        numbers = (_named_loss(returned), *filter(_is_number, _tensors(returned)))
        own = next((value for value in numbers if value is not None), None)
        if own is not None:
            return own
    if causal and ids is not None:
        logits = logits_in(model, returned, ids, last.shape[-1])
    if ids is None or logits is None:
        raise NoLoss(
            "the model returns no loss, and no logits of a causal model to take it from: "
            "pass labels in the batch, or loss="
        )
    return next_token_loss(logits, ids, last.real_of_sequences)


class LossOfGradients:
    """Which loss gradients are of: the one that was passed, else the model's own where it returns one. `said` has the
    losses that were taken, in words."""

    def __init__(self, loss: Callable[[Any], Tensor] | None):
        self.loss = loss
        self.said: dict[str, None] = {}
        self.without = False  # a batch had answers, and the model returned no loss of them

    def of(self, batch: Batch) -> Callable[[Any], Tensor | None]:
        """What takes the loss of this batch; it gives None where a product with a random matrix stands in for one."""

        def take(returned: Any) -> Tensor | None:
            if self.loss is not None:
                self.said[PASSED] = None
                return self.loss(returned)
            own = _named_loss(returned)
            if own is None and _has_answers(batch):
                own = next(filter(_is_number, _tensors(returned)), None)
            if own is not None and own.requires_grad:
                self.said[OWN] = None
                return own
            self.without |= _has_answers(batch)
            self.said[PRODUCT] = None
            return None

        return take

    def notes(self) -> list[str]:
        """Where it is not the one that a reader would think of."""
        found = ["gradients are of the model's own loss, which it returned"] if OWN in self.said else []
        if self.without:
            found.append(
                f"the batch has answers ({' or '.join(ANSWERS)}), and the model returned no loss of them: gradients "
                f"are of {PRODUCT}; loss= takes another"
            )
        return found


def next_token_loss(logits: Tensor, ids: Tensor, real: Tensor | None = None) -> Tensor:
    """Mean of −log p(token i + 1 | tokens up to i) over pairs of real tokens; logits (batch, n, v), ids (batch, n)."""
    found, wanted = logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten().to(logits.device)
    if real is not None:
        real = real.to(logits.device)
        pairs = (real[:, :-1] & real[:, 1:]).flatten().nonzero().squeeze(-1)
        found, wanted = found.index_select(0, pairs), wanted.index_select(0, pairs)
    if not len(found):
        raise NoLoss("no sequence has two real tokens, so that there is no next token to predict")
    return F.cross_entropy(found.to(torch.promote_types(logits.dtype, torch.float32)), wanted.long())


def ids_in(batch: Batch) -> Tensor | None:
    """The token ids (batch, n) among the inputs."""
    named = {name: value for name, value in batch.kwargs.items() if not any(part in name for part in _NO_IDS)}
    values = (named.get("input_ids"), *batch.args, *named.values())
    whole = (torch.int64, torch.int32)
    return next((v for v in values if isinstance(v, Tensor) and v.ndim == 2 and v.dtype in whole), None)


def _has_answers(batch: Batch) -> bool:
    return any(batch.kwargs.get(name) is not None for name in ANSWERS)


def _named_loss(returned: Any) -> Tensor | None:
    """The `loss` of what was returned, by its name."""
    named = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    return named if _is_number(named) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


def logits_in(model: nn.Module, returned: Any, ids: Tensor, width: int) -> Tensor | None:
    """Logits (batch, n, vocabulary); what is as wide as a token is taken for tokens."""
    named = getattr(returned, "logits", None)
    if isinstance(named, Tensor):
        return named if named.shape[:-1] == ids.shape else None
    vocabularies = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)} - {width}
    wanted = [torch.Size([*ids.shape, size]) for size in vocabularies]
    return next((tensor for tensor in _tensors(returned) if tensor.shape in wanted), None)


def _tensors(returned: Any) -> Iterator[Tensor]:
    if isinstance(returned, Tensor):
        yield returned
    elif type(returned) in (tuple, list):
        yield from (value for value in returned if isinstance(value, Tensor))
