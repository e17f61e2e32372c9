"""Models for training: the wirings of other papers, Transformer-XL."""

from depthscope_lab.models import normed_wirings, weighted_wirings
from depthscope_lab.models.carried_mean import CarriedMean
from depthscope_lab.models.transformer_xl import TransformerXL, TransformerXLConfig

PUBLISHED = [*weighted_wirings.WIRINGS, *normed_wirings.WIRINGS]  # what the entry point in `depthscope.wirings` names

__all__ = ["PUBLISHED", "CarriedMean", "TransformerXL", "TransformerXLConfig"]
