"""What queries and keys can learn: their gradient is a covariance of tokens, and vanishes where tokens are alike.

Ours; Noci et al. 2022 (arXiv 2206.03126) prove that it vanishes where tokens span one direction. One head, row vectors:
P = softmax(s·Q Kᵀ), Q = X W_Q, K = X W_K, V = X W_V, context Y = P V, s = 1/√d_k, G = ∂L/∂Y. The scores' gradient is

    ∂L/∂M_ij = P_ij (g_i·v_j − Σ_k P_ik g_i·v_k),    M = s·Q Kᵀ,

whose rows sum to zero. So a query's gradient is a covariance Cov_i under its own attention, that with weights P_i·:

    ∂L/∂q_i = s·Cov_i(k, v) g_i,    and with C_i = Cov_i(x) (d × d):
    ∂L/∂W_Q = s Σ_i x_i g_iᵀ W_Vᵀ C_i W_K,    ∂L/∂W_K = s Σ_i C_i W_V g_i q_iᵀ.

Both are linear in C_i, whose trace is at most p·t_div·‖X‖² with p the largest entry of P: **the gradient of queries and
keys goes to zero like t_div**, while ∂L/∂W_V = Xᵀ Pᵀ G tends to n x̄ ḡᵀ, and does not.

Where keys are turned by their positions (rotary embeddings), equal tokens have different keys: only the values'
differences vanish then, and the gradient goes like √t_div. Biases and positions that are added to the scores change P,
and nothing else here.

Shapes: tokens (…, n, d), projections (…, d, d_k), context gradients (…, n, d_v), attention (…, n, n).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class QueryKeyGradients(NamedTuple):
    """∂L/∂W_Q and ∂L/∂W_K of one head, (…, d, d_k)."""

    query: Tensor
    key: Tensor


def query_key_gradients(
    tokens: Tensor, query: Tensor, key: Tensor, value: Tensor, context_gradient: Tensor
) -> QueryKeyGradients:
    """∂L/∂W_Q = s Σ_i x_i g_iᵀ W_Vᵀ C_i W_K and ∂L/∂W_K = s Σ_i C_i W_V g_i q_iᵀ of softmax attention without a mask.

    Tokens are centred before anything is multiplied, so that the result is right however alike they are (exactly 0 for
    equal ones); no C_i is formed. One token has no covariance: 0.
    """
    scale = key.shape[-1] ** -0.5
    queries = tokens @ query
    apart = tokens - tokens[..., :1, :]  # exactly 0 where tokens are equal, which a mean of them need not be
    apart = apart - apart.mean(dim=-2, keepdim=True)
    attention = torch.softmax(scale * queries @ (apart @ key).mT, dim=-1)  # a shift of all keys changes no row
    drawn = context_gradient @ (apart @ value).mT  # (…, n, n): g_i·(v_j − v̄)
    scores = attention * (drawn - (attention * drawn).sum(dim=-1, keepdim=True))  # ∂L/∂M
    return QueryKeyGradients(
        scale * tokens.mT @ (scores @ (apart @ key)),
        scale * (scores @ apart).mT @ queries,
    )


def query_key_gradient_bound(
    tokens: Tensor, query: Tensor, key: Tensor, value: Tensor, context_gradient: Tensor, largest: Tensor | float = 1.0
) -> Tensor:
    """‖(∂W_Q, ∂W_K)‖_F ≤ s·p·‖W_V‖₂·√(‖W_Q‖₂² + ‖W_K‖₂²)·‖X‖_F³·‖G‖_F·t_div(X), for any attention whose rows sum to 1.

    p (`largest`) is the largest entry of P, 1 if nothing is known: Σ_j P_ij ‖x_j − x̄‖² ≤ p‖X − 1x̄ᵀ‖² bounds the trace
    of every C_i. It holds for causal and masked attention as well. (…), 0 for equal tokens.
    """
    scale = key.shape[-1] ** -0.5
    apart = tokens - tokens[..., :1, :]
    differences = (apart - apart.mean(dim=-2, keepdim=True)).square().sum(dim=(-2, -1))  # t_div·‖X‖²
    norms = [torch.linalg.matrix_norm(weight, ord=2) for weight in (query, key, value)]
    sizes = torch.linalg.matrix_norm(tokens) * torch.linalg.matrix_norm(context_gradient)
    return scale * largest * norms[2] * torch.hypot(norms[0], norms[1]) * sizes * differences


def expected_gradient_ratio(
    diversity: Tensor | float,
    directions: Tensor | float,
    token_energy: Tensor | float,
    sigmas: tuple[float, float, float, float],
) -> Tensor:
    """‖∂W_Q,K‖/‖∂W_V,O‖ ≈ c·t_div of a block at initialisation, for alike tokens and nearly even attention:

        c = (‖X‖²/n)/√r · σ_V σ_O √((σ_Q² + σ_K²)/(σ_V² + σ_O²)).

    `sigmas` are the standard deviations of the entries of W_Q, W_K, W_V, W_O (independent, mean 0), `token_energy`
    ‖X‖²/n (d after a norm), and r, `directions`, (tr C)²/‖C‖_F² of the tokens' covariance C: over how many directions
    their differences spread, from 1 to min(n − 1, d). With entries of variance 1/d after a norm c = 1/√r, so that the
    ratio lies between t_div/√min(n − 1, d) and t_div, whatever the width.

    Why: even attention makes every C_i = C, and Xᵀ G → n x̄ ḡᵀ, so that ‖∂W_Q‖² = s²n²‖x̄‖²‖W_Kᵀ C W_V ḡ‖², whose mean
    over W_K and W_V is n²‖x̄‖²‖C‖_F² σ_K²σ_V²‖ḡ‖², while ‖∂W_V‖² = n²‖x̄‖²‖ḡ‖²; the others in the same way, and over all
    heads Σ‖ḡ_h‖² = ‖W_O δ̄‖². ‖C‖_F = t_div (‖X‖²/n)/√r. It needs a gradient with a mean (ḡ ≠ 0): where the mean is
    taken out after the branch, the terms of its differences are what is left.
    0 for equal tokens; nan where the values and the output have no gradient, σ_V = σ_O = 0.
    """
    of_query, of_key, of_value, of_output = (torch.as_tensor(sigma, dtype=torch.float64) for sigma in sigmas)
    spread = torch.hypot(of_query, of_key) / torch.hypot(of_value, of_output)
    energy = torch.as_tensor(token_energy, dtype=torch.float64)
    shared = energy / torch.as_tensor(directions, dtype=torch.float64).sqrt()
    return torch.as_tensor(diversity, dtype=torch.float64) * shared * of_value * of_output * spread
