"""What can be done about a collapse: one file per remedy; `apply` and `remove`; `recommend` measures which τ."""

from depthscope.models.token_means import Ema, Full, Prefix
from depthscope.remedies.application import Applied, applied, apply, remove
from depthscope.remedies.branches import LayerScale, MVSplit, ResidualWeight
from depthscope.remedies.deescalation import DeEscalate, LearnableTau, deescalate
from depthscope.remedies.recommendation import Recommendation, recommend
from depthscope.remedies.record import restore
from depthscope.remedies.remedy import REMEDIES, Remedy, Site, list_remedies, register_remedy
from depthscope.remedies.reparameterise import Reparameterise
from depthscope.remedies.trunk import ContraNorm, PairNorm, contra_norm, pair_norm

__all__ = [
    "REMEDIES",
    "Applied",
    "ContraNorm",
    "DeEscalate",
    "Ema",
    "Full",
    "LayerScale",
    "LearnableTau",
    "MVSplit",
    "PairNorm",
    "Prefix",
    "Recommendation",
    "Remedy",
    "Reparameterise",
    "ResidualWeight",
    "Site",
    "applied",
    "apply",
    "contra_norm",
    "deescalate",
    "list_remedies",
    "pair_norm",
    "recommend",
    "register_remedy",
    "remove",
    "restore",
]
