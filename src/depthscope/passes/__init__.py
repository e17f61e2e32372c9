"""One machine for "this model runs this block of this pass": listen, change, and leave no trace.

`Machine` follows the passes of a model while it is open; hooks that stay in a model (`hooks.py`) follow them in the
same way. Masks, caches, the token axis and what a block was called with are known in one place, `Pass`.
"""

from depthscope.passes.attention import Head
from depthscope.passes.by_structure import seen_by_structure
from depthscope.passes.causality import is_causal
from depthscope.passes.inputs import Batch, Tokenizer, batches, call, device_of
from depthscope.passes.layout import find_token_axis
from depthscope.passes.machine import Change, Listen, ListenToAttention, Machine, Visit
from depthscope.passes.quiet import full_precision, uncompiled, undisturbed
from depthscope.passes.running import Pass
from depthscope.passes.tokens import batch_first, edit_tokens, exchange, first_tokens

__all__ = [
    "Batch",
    "Change",
    "Head",
    "Listen",
    "ListenToAttention",
    "Machine",
    "Pass",
    "Tokenizer",
    "Visit",
    "batch_first",
    "batches",
    "call",
    "device_of",
    "edit_tokens",
    "exchange",
    "find_token_axis",
    "first_tokens",
    "full_precision",
    "is_causal",
    "seen_by_structure",
    "uncompiled",
    "undisturbed",
]
