"""How the parts of a block are wired: where norms, branches and skips stand. One short function each, by name.

A wiring runs on any block that has the parts of `Wired`: `Block` and Transformer-XL's share them all. The two classic
ones stand here. A new wiring is a function and a line that registers it in `WIRINGS`; another package, such as the lab
with those of other papers, names it in the entry-point group `depthscope.wirings`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from depthscope.registry import Registry
from depthscope.stations import Placement

Norm = Callable[[Tensor], Tensor]


class Wired(Protocol):
    """What a wiring finds in a block. `given` is what a block is called with beside its tokens: a mask, a memory."""

    stations: nn.ModuleDict
    norm1: nn.Module
    norm2: nn.Module
    ffn: nn.Module
    alpha: float  # weight of the attention branch
    number: int  # of the block, from 1
    depth: int  # of the whole stack

    def attend(self, x: Tensor, given: Any, norm: Norm | None = None) -> Tensor:
        """What attention gives, past the station where it reads; `norm` is applied to what it reads."""
        ...

    def enter_ffn(self, x: Tensor, given: Any) -> Tensor:
        """What the FFN reads, past its station."""
        ...


# (block, x, given) → what leaves the block. With a second stream: (block, x, given, beside) → (what leaves, beside).
Forward = Callable[..., Any]
Prepare = Callable[[Any], None]


def no_parts(block: Any) -> None:
    """Most wirings need no parts beyond those that every block has."""


@dataclass(frozen=True)
class Wiring:
    """One way to wire a block.

    `final_norm`: what leaves the last block has not been normed, so that a stack of such blocks ends with a norm.
    `placement`: where the norms stand in the words of `depthscope.stations`; None for a wiring that is neither.
    `prepare` is called with a block that is built and drawn. It adds norms and gains, scales weights, or gives the
    block (`block.wiring`) another wiring than its neighbours, by its `number` and the stack's `depth`.
    `norms`: the names of the block's norms, in the order in which they are called.
    `second_stream`: a second token matrix goes from block to block beside the trunk. It begins as what enters the
    stack, and the stack ends with trunk + final norm(second stream).
    """

    name: str
    forward: Forward
    final_norm: bool
    placement: Placement | None = None
    prepare: Prepare = no_parts
    norms: tuple[str, ...] = ("norm1", "norm2")
    second_stream: bool = False

    @property
    def ffn_reads_trunk(self) -> bool:
        """Whether a change of the FFN's input is a change of the trunk."""
        return self.placement == "post"


def run_post_norm(block: Wired, x: Tensor, given: Any) -> Tensor:
    """Algorithm 1 of Yu & Zhang 2024: the classic Transformer, norms on the trunk."""
    at = block.stations
    x = at["input"](x)  # X
    y1 = at["after_attention"](x + block.alpha * at["attention_branch"](block.attend(x, given)))
    y2 = block.enter_ffn(block.norm1(y1), given)
    y3 = at["after_ffn"](y2 + at["ffn_branch"](block.ffn(y2)))
    return at["output"](block.norm2(y3))  # Y4


def run_pre_norm(block: Wired, x: Tensor, given: Any) -> Tensor:
    """Yu & Zhang 2024, eq. 19: norms on the branches, an untouched trunk."""
    at = block.stations
    x = at["input"](x)
    y = at["after_attention"](x + block.alpha * at["attention_branch"](block.attend(x, given, block.norm1)))
    z = at["after_ffn"](y + at["ffn_branch"](block.ffn(block.enter_ffn(block.norm2(y), given))))
    return at["output"](z)


post_norm = Wiring("post", run_post_norm, final_norm=False, placement="post")
pre_norm = Wiring("pre", run_pre_norm, final_norm=True, placement="pre")

WIRINGS: Registry[Wiring] = Registry("wiring", "depthscope.wirings", [post_norm, pre_norm])


def wiring_of(wiring: Wiring | str) -> Wiring:
    """The wiring itself, or the one of this name."""
    return WIRINGS[wiring] if isinstance(wiring, str) else wiring
