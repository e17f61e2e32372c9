"""What a block is worth: the loss when it, or a run of blocks, is skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import pandas as pd
import torch
from torch import Tensor, nn

from depthscope.discovery import Hints
from depthscope.hooks import Listen, Machine, Visit, leave_out
from depthscope.inputs import Batch, Tokenizer, call
from depthscope.probing.gradients import Loss, check_loss
from depthscope.probing.losses import causal_by_trying, default_loss, with_all_logits
from depthscope.progress import Tick
from depthscope.scope import Scope, scope_of


def skip_loss(
    model: nn.Module | Scope,
    inputs: Any = None,
    *,
    run: int = 1,
    loss: Loss | None = None,
    tokenizer: Tokenizer | None = None,
    progress: Tick | None = None,
    **hints: Unpack[Hints],
) -> pd.DataFrame:
    """The change of the loss when each run of consecutive blocks passes its input on unchanged.

    Costs one pass per row and batch. Block influence alone misleads: a block that turns its tokens little may still
    cost much to skip.

    Args:
        model: any model that holds Transformer blocks, or a `Scope` of it.
        inputs: as for `probe`.
        run: how many consecutive blocks are skipped at a time.
        loss: takes what the model returns, and gives one number; by default it is the model's own if the batch has
            labels, and of any causal model that reads ids and returns logits that of the next token, without padding.
        tokenizer: makes ids of strings.
        progress: is called after every row.
        hints: what you say of the model: `blocks`, `part`, `token_axis`, `mask`, `causal`, as for `Scope`.

    Returns:
        A table with first_block, last_block, loss and change; the first row, 0 to 0, is the whole model.

    Example:
        >>> import torch, depthscope
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
        >>> depthscope.skip_loss(model, torch.randn(2, 5, 16), loss=lambda output: output.square().mean()).shape
        (4, 4)
    """
    scope = scope_of(model, inputs, tokenizer, **hints)
    given = list(scope.calls())
    with scope.undisturbed():
        calls, loss_of = calls_with_loss(scope, given, loss)
        depth, whole = _mean_loss(scope, calls, loss_of)
        if not 1 <= run <= depth:
            raise ValueError(f"expected a run of 1 to {depth} blocks, the model's depth, got {run}")
        rows = [(0, 0, whole, 0.0)]
        for first in range(1, depth - run + 2):
            _, value = _mean_loss(scope, calls, loss_of, frozenset(range(first, first + run)))
            rows.append((first, first + run - 1, value, value - whole))
            if progress is not None:
                progress()
    return pd.DataFrame(rows, columns=["first_block", "last_block", "loss", "change"])


def mean_loss(
    model: nn.Module | Scope,
    inputs: Any = None,
    *,
    loss: Loss | None = None,
    tokenizer: Tokenizer | None = None,
    **hints: Unpack[Hints],
) -> float:
    """The mean loss over the batches, as `skip_loss` takes it, with all blocks. `NoLoss` if there is none."""
    scope = scope_of(model, inputs, tokenizer, **hints)
    given = list(scope.calls())
    with scope.undisturbed():
        return _mean_loss(scope, *calls_with_loss(scope, given, loss))[1]


LossOf = Callable[[Batch, Any, Visit], Tensor]  # of a batch, what the model returned, and the last block that ran


def calls_with_loss(scope: Scope, calls: list[Batch], loss: Loss | None) -> tuple[list[Batch], LossOf]:
    """The calls to make, and what takes the loss of each."""
    check_loss(loss)
    if loss is not None:
        return calls, lambda _batch, returned, _last: loss(returned)
    model, causal = scope.model, causal_by_trying(scope, calls[0])
    asked = [with_all_logits(model, batch) if causal else batch for batch in calls]
    given = {id(new): old for new, old in zip(asked, calls, strict=True)}  # which have answers of the user's
    return asked, lambda batch, returned, last: default_loss(model, given[id(batch)], returned, last, causal=causal)


def _mean_loss(
    scope: Scope, calls: list[Batch], loss_of: LossOf, skipped: frozenset[int] = frozenset()
) -> tuple[int, float]:
    """The number of blocks that ran, and the mean loss over the batches without the skipped ones."""
    last: list[Visit] = []
    remember = Listen({"output"}, lambda visit, *_: last.append(visit))
    values = []
    with Machine(scope.model, scope.anatomy, leave_out(skipped), remember) as machine:
        for batch in calls:
            last.clear()
            returned = call(scope.model, batch)
            if not last:
                names = [block.name for block in scope.anatomy.blocks][:4]
                raise ValueError(f"none of the blocks {names} ran; name them with blocks=")
            values.append(one_number(loss_of(batch, returned, last[-1])))
    return machine.blocks_run, torch.stack(values).mean().item()


def one_number(value: Any) -> Tensor:
    """A loss, in float64; refused if it is none."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError("expected loss to return one number, got " + type(value).__name__)
    return value.double()
