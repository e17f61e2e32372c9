"""What can be done about a collapse: one file per remedy; `apply` and `remove`; `recommend` measures which τ."""

from depthscope.models.token_means import Ema, Full, Prefix
from depthscope.remedies.application import Applied, applied, apply, remove
from depthscope.remedies.deescalation import DeEscalate, LearnableTau, deescalate
from depthscope.remedies.recommendation import Recommendation, recommend
from depthscope.remedies.record import REMEDIES, restore
from depthscope.remedies.residual_weight import ResidualWeight

__all__ = [
    "REMEDIES",
    "Applied",
    "DeEscalate",
    "Ema",
    "Full",
    "LearnableTau",
    "Prefix",
    "Recommendation",
    "ResidualWeight",
    "applied",
    "apply",
    "deescalate",
    "recommend",
    "remove",
    "restore",
]
