"""A model and a batch in, a profile out; a model in training in, its depth over time out."""

from depthscope.probing.driver import probe
from depthscope.probing.losses import NoLoss
from depthscope.probing.profile import Profile, Reference
from depthscope.probing.skipping import mean_loss, skip_loss
from depthscope.probing.watching.callbacks import DepthCallback
from depthscope.probing.watching.gate import Alarm, DepthAlarm
from depthscope.probing.watching.options import watch
from depthscope.probing.watching.records import load_records
from depthscope.probing.watching.watcher import Watch
from depthscope.probing.weight_spectra import Spectra, spectra

__all__ = [
    "Alarm",
    "DepthAlarm",
    "DepthCallback",
    "NoLoss",
    "Profile",
    "Reference",
    "Spectra",
    "Watch",
    "load_records",
    "mean_loss",
    "probe",
    "skip_loss",
    "spectra",
    "watch",
]
