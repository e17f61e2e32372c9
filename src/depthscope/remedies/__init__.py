"""What can be done about a collapse: one file per remedy; `apply` and `remove`; `recommend` measures which τ."""

from depthscope.models.token_means import Ema, Full, Prefix
from depthscope.remedies.application import Applied, applied, apply, remove
from depthscope.remedies.attn_scale import AttnScale
from depthscope.remedies.centred_attention import CentredAttention
from depthscope.remedies.contra_norm import ContraNorm, contra_norm
from depthscope.remedies.deescalation import DeEscalate, LearnableTau, deescalate
from depthscope.remedies.feat_scale import FeatScale
from depthscope.remedies.mv_split import MVSplit
from depthscope.remedies.neutreno import NeuTRENO
from depthscope.remedies.pair_norm import PairNorm, pair_norm
from depthscope.remedies.recommendation import Recommendation, recommend
from depthscope.remedies.record import restore
from depthscope.remedies.remedy import REMEDIES, Remedy, list_remedies, register_remedy
from depthscope.remedies.reparameterise import Reparameterise, bake
from depthscope.remedies.residual_weight import LayerScale, ResidualWeight
from depthscope.remedies.site import Site
from depthscope.remedies.value_residual import ValueResidual

__all__ = [
    "REMEDIES",
    "Applied",
    "AttnScale",
    "CentredAttention",
    "ContraNorm",
    "DeEscalate",
    "Ema",
    "FeatScale",
    "Full",
    "LayerScale",
    "LearnableTau",
    "MVSplit",
    "NeuTRENO",
    "PairNorm",
    "Prefix",
    "Recommendation",
    "Remedy",
    "Reparameterise",
    "ResidualWeight",
    "Site",
    "ValueResidual",
    "applied",
    "apply",
    "bake",
    "contra_norm",
    "deescalate",
    "list_remedies",
    "pair_norm",
    "recommend",
    "register_remedy",
    "remove",
    "restore",
]
