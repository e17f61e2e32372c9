"""What a user hands in: batches, and which of their tokens are real."""

from depthscope.inputs.batches import Batch, Tokenizer, batches, call

__all__ = [
    "Batch",
    "Tokenizer",
    "batches",
    "call",
]
