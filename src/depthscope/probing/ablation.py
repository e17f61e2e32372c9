"""`ablate`: a model without parts of its blocks, or without blocks, for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import nn

from depthscope import walking
from depthscope.discovery import Hints
from depthscope.hooks import Ablation
from depthscope.hooks.ablation import choose_parts
from depthscope.inputs import Tokenizer
from depthscope.safety import undone
from depthscope.scope import Scope, scope_of


@contextmanager
def ablate(
    model: nn.Module | Scope,
    *what: str | int | Iterable[int],
    inputs: Any = None,
    tokenizer: Tokenizer | None = None,
    **hints: Unpack[Hints],
) -> Iterator[nn.Module]:
    """The model without parts of its blocks, or without blocks, as long as the context is open.

    Its weights, its mode and its other hooks stay as they are, also after an exception; a pass inside may have
    gradients.

    Args:
        model: the model, or a `Scope` of it.
        what: "skips", "ffn", "norms", … (`hooks.ablation` has the table), which are left out of every block; numbers
            of blocks, from 1, and runs of them (`range(3, 6)`), which pass their input on.
        inputs: a batch, as for `probe`: settles what the blocks of a model of no known family are.
        tokenizer: makes ids of strings.
        hints: what you may say of the model, as for `probe`.

    Returns:
        A context, in which the model is without these.

    Example:
        >>> import torch, depthscope
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3).eval()
        >>> x = torch.randn(2, 5, 16)
        >>> with depthscope.ablate(model, 1, 2, 3):
        ...     torch.equal(model(x), x)
        True
    """
    scope = scope_of(model, inputs, tokenizer, **hints)
    if scope.model is not scope.original or any(
        getattr(m, "_compiled_call_impl", None) is not None or hasattr(m, "_orig_mod")
        for m in walking.modules(scope.model)
    ):
        raise ValueError("the model is compiled, and its graph would pass by what is changed: use it uncompiled")
    parts = choose_parts([name for item in what if isinstance(item, str) for name in item.split(",")])
    others: list[Any] = [item if isinstance(item, Iterable) else [item] for item in what if not isinstance(item, str)]
    blocks = frozenset(number for numbers in others for number in numbers)
    for number in blocks:
        if type(number) is not int or not 1 <= number <= scope.depth_of_model:
            raise ValueError(
                f"expected numbers of blocks from 1 to {scope.depth_of_model}, the model's depth, got {number!r}"
            )
    if not parts and not blocks:
        raise ValueError('expected what to leave out, such as ablate(model, "skips") or ablate(model, 3), got nothing')
    fast = torch.backends.mha.get_fastpath_enabled()
    ablation = Ablation(scope.model, scope.anatomy, parts, blocks)
    with undone(lambda: torch.backends.mha.set_fastpath_enabled(fast)), ablation:
        torch.backends.mha.set_fastpath_enabled(False)  # PyTorch's fused layers call no module of theirs
        yield scope.model
