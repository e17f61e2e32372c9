"""Tensors in, numbers out: pure, batched over leading axes, masked, right in the collapsed limit.

Token matrices X (…, n, d): `similarity`, `energy`, `rank`. Attention matrices P (…, n, n): `attention`, and as
operators: `operators`. `catalogue` has one record for every measure that a probe can take.
"""

from depthscope.measures.attention import attention_entropy, delta, mu, omega, second_eigenvalue
from depthscope.measures.attention_spectra import Bounded, bounded_delta, bounded_second_eigenvalue
from depthscope.measures.branches import against_trunk, median
from depthscope.measures.catalogue import GRADIENTS, MEASURES, Measure, choose_measures, list_measures, only_at_outputs
from depthscope.measures.coherence import mean_coherent_share, token_sum
from depthscope.measures.energy import energy_split, frobenius_norm, largest_feature, largest_token_share
from depthscope.measures.norms import Scratch, TokenNorms
from depthscope.measures.operators import AttentionOperator, DenseAttention, ScoredAttention
from depthscope.measures.parts import OF_OUTLIERS, PARTS, HeadInput, MissingNeed, Summary
from depthscope.measures.rank import (
    composite_norm,
    composite_residual,
    effective_rank,
    ordinary_rank,
    singular_values,
    stable_rank,
)
from depthscope.measures.similarity import (
    ALIKE,
    EQUAL,
    Growth,
    angular_distance,
    cosine_similarity,
    direction_similarity,
    escalation_rate,
    frequency_ratio,
    growth,
    token_diversity,
    token_similarity,
)
from depthscope.measures.sweeps import SINK_MASS, first_token
from depthscope.measures.tokens import OUTLIER_FACTOR, TokenMatrix

__all__ = [
    "ALIKE",
    "EQUAL",
    "GRADIENTS",
    "MEASURES",
    "OF_OUTLIERS",
    "OUTLIER_FACTOR",
    "PARTS",
    "SINK_MASS",
    "AttentionOperator",
    "Bounded",
    "DenseAttention",
    "Growth",
    "HeadInput",
    "Measure",
    "MissingNeed",
    "ScoredAttention",
    "Scratch",
    "Summary",
    "TokenMatrix",
    "TokenNorms",
    "against_trunk",
    "angular_distance",
    "attention_entropy",
    "bounded_delta",
    "bounded_second_eigenvalue",
    "choose_measures",
    "composite_norm",
    "composite_residual",
    "cosine_similarity",
    "delta",
    "direction_similarity",
    "effective_rank",
    "energy_split",
    "escalation_rate",
    "first_token",
    "frequency_ratio",
    "frobenius_norm",
    "growth",
    "largest_feature",
    "largest_token_share",
    "list_measures",
    "mean_coherent_share",
    "median",
    "mu",
    "omega",
    "only_at_outputs",
    "ordinary_rank",
    "second_eigenvalue",
    "singular_values",
    "stable_rank",
    "token_diversity",
    "token_similarity",
    "token_sum",
]
