"""What the summary says of value weights, against the theory."""

import torch

from depthscope.measures.weights import mean_growth, product_eigenvalues
from depthscope.theory import dominance_of
from samples import seeded


def test_what_is_said_is_what_dominates():
    """The rule of the sentence, max |1 + μ| > 1, against the theory with a whole attention matrix, for thin heads."""
    ends = []
    for seed in range(200):
        x = torch.randn(6, 3, generator=seeded(seed), dtype=torch.float64)
        attention = (x @ x.T).softmax(dim=-1)  # similar to a positive matrix: no negative eigenvalue
        value = torch.randn(5, 3, generator=seeded(seed + 1000), dtype=torch.float64)
        inner = torch.randn(3, 3, generator=seeded(seed + 2000), dtype=torch.float64) / 3
        output = (-(seed % 3) * torch.eye(3, dtype=torch.float64) + inner) @ torch.linalg.pinv(value)
        growth = mean_growth(product_eigenvalues(value, output)).item()
        assert (growth > 1) == dominance_of(attention, value @ output).input_convergence
        ends.append(growth > 1)
    assert 40 < sum(ends) < 160
