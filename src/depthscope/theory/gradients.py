"""What queries and keys can learn: their gradient is a covariance of tokens, and vanishes where tokens are alike.

Ours; Noci et al. 2022 (arXiv 2206.03126) prove that it vanishes where tokens span one direction. One head, row vectors:
P = softmax(s·Q Kᵀ), Q = X W_Q, K = X W_K, V = X W_V, context Y = P V, s = 1/√d_k, G = ∂L/∂Y. The gradient of the scores
M = s·Q Kᵀ, P_ij (g_i·v_j − Σ_k P_ik g_i·v_k), has rows that sum to zero. So with C_i = Cov_i(x) (d × d), the covariance
with weights P_i·,

    ∂L/∂W_Q = s Σ_i x_i g_iᵀ W_Vᵀ C_i W_K,    ∂L/∂W_K = s Σ_i C_i W_V g_i q_iᵀ.

Both are linear in C_i, whose trace is at most p·t_div·‖X‖² with p the largest entry of P: **the gradient of queries and
keys goes to zero like t_div**, while ∂L/∂W_V = Xᵀ Pᵀ G tends to n x̄ ḡᵀ, and does not.

Where keys are turned by their positions (rotary embeddings), equal tokens have different keys: only the values'
differences vanish then, and the gradient goes like √t_div.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
