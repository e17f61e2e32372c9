"""The loss of a model that is given nothing but its inputs: its own, or, of a causal model, that of the next token."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.hooks import Visit
from depthscope.inputs import Batch
from depthscope.scope import Scope

ANSWERS = ("labels", "targets")  # what a model is given to take its own loss
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

    If the batch has the answers it is the model's own. Else, of a causal model that reads ids and returns logits
    (batch, n, vocabulary), it is the cross-entropy of each token given those before it; padding does not count.
    """
    answered = any(batch.kwargs.get(name) is not None for name in ANSWERS)
    own = _own_loss(returned) if answered or not causal else None
    if own is not None:
        return own
    ids, logits = ids_in(batch), None
    if causal and ids is not None:
        logits = logits_in(model, returned, ids, last.shape[-1])
    if ids is None or logits is None:
        raise NoLoss(
            "the model returns no loss, and no logits of a causal model to take it from: "
            "pass labels in the batch, or loss="
        )
    return next_token_loss(logits, ids, last.real)


def next_token_loss(logits: Tensor, ids: Tensor, real: Tensor | None = None) -> Tensor:
    """Mean of −log p(token i + 1 | tokens up to i) over pairs of real tokens; logits (batch, n, v), ids (batch, n)."""
    counted = torch.ones_like(ids, dtype=torch.bool) if real is None else real.to(ids.device)
    pairs = counted[:, :-1] & counted[:, 1:]
    if not pairs.any():
        raise NoLoss("no sequence has two real tokens, so that there is no next token to predict")
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits[:, :-1][pairs.to(logits.device)].to(wide), ids[:, 1:][pairs].long().to(logits.device))


def ids_in(batch: Batch) -> Tensor | None:
    """The token ids (batch, n) among the inputs."""
    named = {name: value for name, value in batch.kwargs.items() if not any(part in name for part in _NO_IDS)}
    values = (named.get("input_ids"), *batch.args, *named.values())
    whole = (torch.int64, torch.int32)
    return next((v for v in values if isinstance(v, Tensor) and v.ndim == 2 and v.dtype in whole), None)


def _own_loss(returned: Any) -> Tensor | None:
    """The `.loss` of what was returned, or the one number in it."""
    named = getattr(returned, "loss", None)
    found = [value for value in (named, *_tensors(returned)) if isinstance(value, Tensor) and value.numel() == 1]
    return next((value for value in found if value.is_floating_point()), None)


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
