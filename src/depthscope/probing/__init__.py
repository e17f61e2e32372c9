"""A model and a batch in, a profile out."""

from depthscope.probing.ablation import ablate
from depthscope.probing.capturing import Captured, capture
from depthscope.probing.driver import probe
from depthscope.probing.losses import NoLoss
from depthscope.probing.profile import Profile, Reference
from depthscope.probing.skipping import mean_loss, skip_loss
from depthscope.probing.states import profile_of

__all__ = [
    "Captured",
    "NoLoss",
    "Profile",
    "Reference",
    "ablate",
    "capture",
    "mean_loss",
    "probe",
    "profile_of",
    "skip_loss",
]
