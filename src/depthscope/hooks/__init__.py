"""Hooks on a running model: listen at stations, change what passes, leave blocks or parts out, and leave no trace."""

from depthscope.hooks.ablation import Ablation, leave_out, open_ablation, pass_on, refuse_ablated
from depthscope.hooks.attention import Head
from depthscope.hooks.machine import Change, Listen, ListenToAttention, Machine, Visit
from depthscope.hooks.running import Pass
from depthscope.hooks.tokens import batch_first, edit_tokens, exchange, first_tokens
from depthscope.safety import full_precision, uncompiled, undisturbed

__all__ = [
    "Ablation",
    "Change",
    "Head",
    "Listen",
    "ListenToAttention",
    "Machine",
    "Pass",
    "Visit",
    "batch_first",
    "edit_tokens",
    "exchange",
    "first_tokens",
    "full_precision",
    "leave_out",
    "open_ablation",
    "pass_on",
    "refuse_ablated",
    "uncompiled",
    "undisturbed",
]
