"""One machine for "this model runs this block of this pass": listen, change, and leave no trace.

`Machine` follows the passes of a model while it is open; hooks that stay in a model (`hooks.py`) follow them in the
same way. Masks, caches, the token axis and what a block was called with are known in one place, `Pass`.
"""

from depthscope.offloading import device_of
from depthscope.passes.attention import Head
from depthscope.passes.causality import hidden_tokens_reach_others, is_causal, with_sight
from depthscope.passes.discovery import depth_of
from depthscope.passes.hints import Hints, anatomy_with_hints, check_hints, refuse_tensor
from depthscope.passes.inputs import Batch, Tokenizer, batches, call
from depthscope.passes.layout import find_token_axis
from depthscope.passes.machine import Change, Listen, ListenToAttention, Machine, Visit
from depthscope.passes.masking import entrance_of, is_wrapped
from depthscope.passes.packing import are_apart, pieces_of, unpacked
from depthscope.passes.quiet import full_precision, uncompiled, undisturbed
from depthscope.passes.running import Pass
from depthscope.passes.surgery import Surgery, leave_out, open_surgery, pass_on, refuse_open_surgery
from depthscope.passes.tokens import batch_first, edit_tokens, exchange, first_tokens

__all__ = [
    "Batch",
    "Change",
    "Head",
    "Hints",
    "Listen",
    "ListenToAttention",
    "Machine",
    "Pass",
    "Surgery",
    "Tokenizer",
    "Visit",
    "anatomy_with_hints",
    "are_apart",
    "batch_first",
    "batches",
    "call",
    "check_hints",
    "depth_of",
    "device_of",
    "edit_tokens",
    "entrance_of",
    "exchange",
    "find_token_axis",
    "first_tokens",
    "full_precision",
    "hidden_tokens_reach_others",
    "is_causal",
    "is_wrapped",
    "leave_out",
    "open_surgery",
    "pass_on",
    "pieces_of",
    "refuse_open_surgery",
    "refuse_tensor",
    "uncompiled",
    "undisturbed",
    "unpacked",
    "with_sight",
]
