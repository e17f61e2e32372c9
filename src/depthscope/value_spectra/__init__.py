"""The eigenvalues of W_V W_O, block by block: what the value weights do to tokens (Dovonon et al. 2025)."""

from depthscope.value_spectra.weights import Spectra, spectra

__all__ = ["Spectra", "spectra"]
