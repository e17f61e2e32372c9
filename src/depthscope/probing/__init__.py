"""A model and a batch in, a profile out."""

from depthscope.probing.catalogue import GROUPS, NAMES
from depthscope.probing.driver import probe
from depthscope.probing.profile import Profile, Reference
from depthscope.probing.skipping import skip_loss

__all__ = ["GROUPS", "NAMES", "Profile", "Reference", "probe", "skip_loss"]
