"""A measure: how unequal the tokens are in size."""

from torch import Tensor

from depthscope.measures import Measure, TokenMatrix


def token_spread(x: TokenMatrix) -> Tensor:
    """The largest token norm over the mean one, (batch)."""
    return x.largest_norm / x.token_norms.mean(dim=-1)


SPREAD = Measure("token_spread", "tokens", token_spread)
