"""Whether a model and its input fit into this machine, and into a day, asked before they are made."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from depthscope.cli.options import ModelOptions, ProbeOptions

if TYPE_CHECKING:
    from torch import nn

# num_hidden_layers, encoder_layers, n_layer, and not layer_norm_eps
_COUNTS_LAYERS = re.compile(r"layers$|(?:^|_)n(?:um)?_layer$")
_DEEP = 256  # layers: fewer are built on the meta device in no time
# By arithmetic, each on the low side: what is refused would not have fitted.
_WIDE = 8  # token matrices of a block that are there at once: trunk, q, k, v, branch, and the FFN's, 4 × as wide
_OF_ONE_HEAD = 4  # bytes per entry: the matrix in float32, which a measure that needs it is given
_OF_EAGER_HEADS = 2  # matrices of all heads: scores, and their softmax
# Measures of attention sweep over n² scores about a dozen times: a head of width 32 and 16,384 tokens takes a minute or
# more of one core, and with four times as many tokens sixteen times as long.
_LONGEST_ATTENTION = 65_536


def require_depth(raw: Any, name: str) -> None:
    """Refuses a configuration file with more layers than this machine can hold, whatever their width."""
    from depthscope.memory import require_memory

    depth = max(_layers_in_file(raw, name), default=0)
    require_memory(0, what=f"{name} with {depth} layers", blocks=depth)


def _layers_in_file(raw: Any, owner: str) -> Iterator[int]:
    for name, value in raw.items() if isinstance(raw, dict) else ():
        if type(value) in (int, float) and _COUNTS_LAYERS.search(name):
            if not math.isfinite(value):
                raise ValueError(f"expected a number of layers as {name} of {owner}, got {value}")
            yield int(value)
        yield from _layers_in_file(value, owner)


def size_of(config: Any, build: Callable[[Any], Any], name: str) -> tuple[int, int]:
    """Layers and parameters of the model of a Hugging Face configuration, found out without building all of it.

    Of a deep model from one and two layers: a million would take an hour to build.
    """
    import torch

    from depthscope.memory import count_parameters, counting

    def parameters(config: Any) -> int:
        with torch.device("meta"):
            return count_parameters(build(config))

    depth = max((layers for _, _, layers in _layers(config)), default=0)
    with counting(f"the configuration of {name}"):
        if depth <= _DEEP:
            return depth, parameters(config)
        one, two = (parameters(_with_layers(config, layers)) for layers in (1, 2))
    return depth, one + (depth - 1) * (two - one)


def _layers(config: Any) -> Iterator[tuple[Any, str, int]]:
    """Every number of layers in a configuration and in those inside it: where it stands, its name, the number."""
    for name, value in vars(config).items():
        if type(value) is int and _COUNTS_LAYERS.search(name):
            yield config, name, value
        elif hasattr(value, "model_type"):
            yield from _layers(value)


def _with_layers(config: Any, layers: int) -> Any:
    """The same with `layers` layers wherever it is deep; lists with an entry per layer are cut."""
    shallow = deepcopy(config)
    for place, name, depth in list(_layers(shallow)):
        if depth > _DEEP:
            for other, value in list(vars(place).items()):
                if isinstance(value, list) and len(value) == depth:
                    setattr(place, other, value[:layers])
            setattr(place, name, layers)
    return shallow


def require_pass(model: nn.Module, options: ModelOptions, *, batch: int, tokens: int, width: int) -> None:
    """Refuses what the kernel would kill: one batch through one block, and its attention matrices.

    Our own measures of attention make some rows at a time, in memory that grows with n and not with n². A matrix of one
    head at a time is there if a measure of another package asks for it (`needs` "matrix"); those of all heads are there
    at once in an eager implementation, or where a bias of relative positions is added to them.
    """
    from depthscope.measures import MEASURES, choose_measures
    from depthscope.memory import require_room

    size = next(model.parameters()).element_size()
    what = f"{batch} × {tokens} tokens (--batch, --tokens) of width {width}"
    needed = _WIDE * batch * tokens * width * size
    config: Any = getattr(model, "config", None)
    eager = getattr(config, "_attn_implementation", None) == "eager"
    if eager or getattr(config, "relative_attention_num_buckets", None):
        heads = getattr(config.get_text_config(), "num_attention_heads", 1)
        needed += _OF_EAGER_HEADS * batch * heads * tokens**2 * size
        what += f", with attention matrices of {heads} heads"
    if isinstance(options, ProbeOptions):
        chosen = choose_measures(options.measures)
        swept = [name for name in chosen if MEASURES[name].of == "attention"]
        if swept and tokens > _LONGEST_ATTENTION:
            raise ValueError(
                f"expected at most {_LONGEST_ATTENTION} tokens for {swept[0]} and other measures of attention, whose "
                f"time grows with the square of the tokens, got --tokens {tokens}: give fewer, or --measures default"
            )
        if any("matrix" in MEASURES[name].needs for name in chosen):
            needed += _OF_ONE_HEAD * batch * tokens**2
            what += f", with the attention matrix that --measures {options.measures} reads"
    require_room(needed, what, "give fewer --tokens or a smaller --batch")
