"""Hooks on a running model: listen at stations, change what passes, leave blocks or parts out, and leave no trace."""

from depthscope.hooks.attention import Head
from depthscope.hooks.machine import Change, Listen, ListenToAttention, Machine, Visit
from depthscope.hooks.quiet import full_precision, uncompiled, undisturbed
from depthscope.hooks.running import Pass
from depthscope.hooks.surgery import Surgery, leave_out, open_surgery, pass_on, refuse_open_surgery
from depthscope.hooks.tokens import batch_first, edit_tokens, exchange, first_tokens

__all__ = [
    "Change",
    "Head",
    "Listen",
    "ListenToAttention",
    "Machine",
    "Pass",
    "Surgery",
    "Visit",
    "batch_first",
    "edit_tokens",
    "exchange",
    "first_tokens",
    "full_precision",
    "leave_out",
    "open_surgery",
    "pass_on",
    "refuse_open_surgery",
    "uncompiled",
    "undisturbed",
]
