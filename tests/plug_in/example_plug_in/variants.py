"""Two variants: our post-norm with the remedy of this package, and its wiring. Read without torch."""

from depthscope_lab.training import Variant
from depthscope_lab.training.notation import Named

VARIANTS = [
    Variant("shrunk", "post-norm, the output of every block shrunk", "post", (Named.of("shrink", factor=0.5),)),
    Variant("parallel", "attention and FFN side by side", "parallel"),
]
