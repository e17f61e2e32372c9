"""Whether a pass fits into this machine, and into a day, asked before its input is made: what grows with n and n²."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from depthscope.cli.options import ModelOptions, ProbeOptions, chosen_measures

if TYPE_CHECKING:
    from torch import nn

# By arithmetic, each on the low side: what is refused would not have fitted.
_WIDE = 8  # token matrices of a block that are there at once: trunk, q, k, v, branch, and the FFN's, 4 × as wide
_OF_ONE_HEAD = 4  # bytes per entry: the matrix in float32, which a measure that needs it is given
_OF_EAGER_HEADS = 2  # matrices of all heads: scores, and their softmax
# Measures of attention sweep over n² scores about a dozen times: a head of width 32 and 16,384 tokens takes a minute or
# more of one core, and with four times as many tokens sixteen times as long.
_LONGEST_ATTENTION = 65_536


def require_pass(model: nn.Module, options: ModelOptions, *, batch: int, tokens: int, width: int) -> None:
    """Refuses what the kernel's killer would end: one batch through one block, and its attention matrices.

    Our own measures of attention make some rows at a time, in memory that grows with n and not with n². A matrix of one
    head at a time is there if a measure of another package asks for it (`needs` "matrix"); those of all heads are there
    at once in an eager implementation, or where a bias of relative positions is added to them.
    """
    from depthscope.machine import require_room
    from depthscope.measures import MEASURES, choose_measures

    size = next(model.parameters()).element_size()
    what = f"{batch} × {tokens} tokens (--batch, --tokens) of width {width}"
    instead = "give fewer --tokens or a smaller --batch"
    needed = _WIDE * batch * tokens * width * size
    config: Any = getattr(model, "config", None)
    eager = getattr(config, "_attn_implementation", None) == "eager"
    if eager or getattr(config, "relative_attention_num_buckets", None):
        heads = getattr(config.get_text_config(), "num_attention_heads", 1)
        needed += _OF_EAGER_HEADS * batch * heads * tokens**2 * size
        what += f", with attention matrices of {heads} heads"
    if isinstance(options, ProbeOptions):
        chosen = choose_measures(chosen_measures(options))
        names = [name for name in chosen if "matrix" in MEASURES[name].needs]
        swept = [name for name in chosen if MEASURES[name].of == "attention"]
        if swept and options.window is None and tokens > _LONGEST_ATTENTION:
            raise ValueError(
                f"expected at most {_LONGEST_ATTENTION} tokens for {swept[0]} and other measures of attention, whose "
                f"time grows with the square of the tokens, got --tokens {tokens}: give fewer, or --measures default"
            )
        if names:
            needed += _OF_ONE_HEAD * batch * tokens**2
            what += f", with the attention matrix that --measures {options.measures} reads"
    require_room(needed, what, instead)
