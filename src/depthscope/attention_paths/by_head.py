"""Which heads carry the short paths: exactly, for all heads at once, by the adjoint of the frozen blocks.

Frozen, block l makes A_k ← S A_k + T A_{k−1} of its terms, where T = Σ_h leads through its heads. What paths of length
k through head h of block l are of the output Y, along Y, is

    Σ_j ⟨R_{k−1−j} T_h A_j, Y⟩/‖Y‖² = Σ_j ⟨T_h A_j, U_{k−1−j}⟩,   U_m = R_mᵀ Y/‖Y‖²,

with R_m all that the blocks behind it make of a tensor on m more steps through attention. U is found as A is, from the
last block to the first: U_m ← Sᵀ U_m + Tᵀ U_{m−1}. One tensor that is followed with gradients through each block
has S and T, and autograd transposes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from depthscope.attention_paths.path_tensor import Log, NotFollowed, carrying, terms_of
from depthscope.attention_paths.shares import rows_of
from depthscope.attention_paths.terms import Terms
from depthscope.hooks import Visit


@dataclass(frozen=True)
class Segment:
    """One block: what its heads give of the tokens' terms, and one tensor that was followed through it."""

    block: int
    contexts: Terms  # P_h V_h of A_j, (1 + lengths, batch, h, n, d_v)
    entered: Tensor  # 0, with gradients (batch, n, d)
    passing: Tensor  # S of it: what the block makes of it past attention
    attending: Tensor  # T of it: through attention
    context: Tensor  # P_h V_h of it, (2, batch, h, n, d_v)


def segment_of(visit: Visit, entered: Tensor, log: Log) -> Segment:
    """Runs the block that has just run once more, with a tensor whose gradients can be asked for."""
    if log.contexts is None or len(log.contexts) != 1:
        count = len(log.contexts or [])
        raise NotFollowed(f"expected one self-attention whose heads can be separated, found {count}")
    probe = torch.zeros_like(entered, requires_grad=True)
    own = Log(log.batch, contexts=[])
    with torch.enable_grad():
        try:
            again = visit.again(carrying(entered, Terms.entering(probe), own))
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise NotFollowed(
                f"it cannot be run once more, which by_head=True needs ({why}); if it keeps a cache of keys and "
                "values, add use_cache=False to the inputs"
            ) from None
        _, passing, attending = terms_of(again).spanning(0, 2).values
    assert own.contexts is not None
    return Segment(visit.number, log.contexts[0], probe, passing, attending, own.contexts[0].values)


class Adjoint:
    """From the output back to the first block."""

    def __init__(self, segments: list[Segment], whole: Tensor, real: Tensor | None):
        self.segments = segments
        along = whole if real is None else whole * real.unsqueeze(-1)
        energy = torch.linalg.vector_norm(along, dim=(-2, -1), dtype=torch.float64).square()
        self.along = along / energy.to(along.dtype)[:, None, None]  # Y/‖Y‖²

    def rows(self, first_sample: int) -> list[pd.DataFrame]:
        """`projection_share` by block, head and length, of the lengths that take a head."""
        found: list[pd.DataFrame] = []
        behind = self.along.unsqueeze(0)  # U_0, …, U_m (m + 1, batch, n, d)
        depth = len(self.segments)
        while self.segments:
            segment = self.segments.pop()
            behind, at_context = _transposed(segment, behind)
            shares = _by_length(segment.contexts, at_context, depth)  # (batch, h, 1 + L)
            for head in range(shares.shape[1]):
                share = {"projection_share": shares[:, head].T}
                found.append(rows_of(share, first_sample, block=segment.block, head=head).query("length > 0"))
        return found


def _transposed(segment: Segment, behind: Tensor) -> tuple[Tensor, Tensor]:
    """Sᵀ U_m + Tᵀ U_{m−1} for every m, and U_m taken back to what the heads give: (m, batch, h, n, d_v)."""
    nothing = torch.zeros_like(behind[:1])
    here, at_context = torch.autograd.grad(
        [segment.passing, segment.attending],
        [segment.entered, segment.context],
        [torch.cat([behind, nothing]), torch.cat([nothing, behind])],
        is_grads_batched=True,
    )
    return here, at_context[1:, 1]


def _by_length(contexts: Terms, at_context: Tensor, depth: int) -> Tensor:
    """Σ_j ⟨context of A_j, U_{k−1−j}⟩ by sample, head and length k = 0, …, L: (batch, h, 1 + L), the constant first."""
    lengths = contexts.values[1:]
    products = torch.einsum("jbhnv,mbhnv->bhjm", lengths, at_context).double()
    shares = products.new_zeros(*products.shape[:2], depth + 1)
    for j in range(products.shape[2]):
        for m in range(products.shape[3]):
            shares[:, :, contexts.start + j + 1 + m] += products[:, :, j, m]
    return torch.cat([torch.zeros_like(shares[..., :1]), shares], dim=-1)
