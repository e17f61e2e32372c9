"""A remedy at one place of one block: the tokens that it changes, what it learns, and the mean that it takes.

The mean is that of all real tokens or, in a causal model, of those so far. Wang et al. 2022 take attention apart into
11ᵀ/n, which every token gets alike, and the rest. In a causal model the uniform attention that sees no later token is
the lower triangular one with 1/i in row i (`Uniform`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from depthscope.anatomy import BlockAnatomy, Spot
from depthscope.hooks.caches import recall, remember
from depthscope.hooks.staying import Hook, TokenHook, hang
from depthscope.hooks.tokens import tokens_at
from depthscope.models.token_means import Full, Prefix, TokenMean, accumulator
from depthscope.remedies.remedy import Mixing, Remedy, Site, leak
from depthscope.safety import ByThread


@dataclass(frozen=True)
class Uniform(Prefix):
    """What causal attention with equal weights makes of tokens: unlike in `Prefix`, the first is its own mean."""

    def divisor(self, weight: Tensor, inside: Tensor) -> Tensor:
        return weight.clamp(min=1)


class RelativeToMean(Remedy):
    """Base of the remedies that compare tokens with a mean. Their field `mixing` says which."""

    mixing: Any

    causal_mean: ClassVar[Prefix] = Uniform()  # what "auto" and "prefix" stand for in a causal model
    without_leak: ClassVar[str] = "use mixing='auto' or 'prefix'"

    def __post_init__(self) -> None:
        self.check_mixing()
        super().__post_init__()

    def check_mixing(self) -> None:
        """Refuses a mean that there is not."""
        if self.mixing not in ("auto", "full", "prefix"):
            raise ValueError(f"expected mixing='auto', 'full' or 'prefix', got {self.mixing!r}")

    def mean_in(self, site: Site) -> TokenMean | None:
        """The mean that it takes in a block; None: each call of the block tells."""
        if self.mixing == "auto" and site.call_decides:
            return None
        return Full() if self.mixing == "full" or (self.mixing == "auto" and site.causal is False) else self.causal_mean

    def mixing_in(self, site: Site) -> Mixing:
        """That of its mean. Where a call decides (PyTorch's encoder layers), a full mean is judged call by call."""
        mean = self.mean_in(site)
        return "by call" if mean is None or (mean.kind == "full" and site.call_decides) else mean.kind


class MeanAt:
    """The mean that a remedy takes at one place of one block, in each call of it; a cache carries it on."""

    def __init__(self, remedy: RelativeToMean, site: Site, place: str, causal: Prefix | None = None):
        self.remedy, self.running, self.block, self.place = remedy, site.running, site.block.name, place
        self.key = (self.block, f"{remedy.name}: {place}")  # in a cache; others may stand at the same place
        self.causal = causal or remedy.causal_mean
        found = remedy.mean_in(site)
        self.settled = found if found is None or found.kind == "full" or causal is None else causal
        self.kind = None if self.settled is None else self.settled.kind  # which tokens count; None: each call decides

    def of_this_call(self) -> TokenMean:
        """The mean itself, or a refusal where it would show tokens that may not be seen, or does not know all."""
        said = self.running.now.bidirectional
        mean = self.settled or (Full() if said else self.causal)
        if mean.kind == "causal":
            self.running.refuse_unknown_past(self.remedy.name)
        elif self.settled is not None and said is False and not self.remedy.allow_leak:
            raise ValueError(f"mixing='full' with a src_mask or tgt_mask, which may be causal: {leak(self.remedy)}")
        return mean

    def of(self, tokens: Tensor) -> Tensor:
        """tokens (batch, n, d) → (batch, 1, d), or (batch, n, d) where it is causal; in float32 or better."""
        return self.of_those(tokens, self.running.now.real)

    def of_those(self, tokens: Tensor, counted: Tensor | None) -> Tensor:
        """The same, with `counted` (batch, n) true for the tokens in the mean."""
        now, mean = self.running.now, self.of_this_call()
        if isinstance(mean, Full) or now.cache is None:
            return mean.mean(tokens, counted)
        if now.shape is not None and tokens.shape[1] != now.size[1]:
            raise ValueError(
                f"{self.block!r} computes the {self.place} of the tokens in its cache anew, so that "
                f"{self.remedy.name} cannot go on from them: call the model, or generate, with use_cache=False"
            )
        before = recall(now.cache, self.key, now.past, now.streams)
        found, after = mean.running_mean(tokens, counted, before)
        remember(now.cache, self.key, now.past + tokens.shape[1], after, now.streams)
        return found


class Change(TokenHook):
    """A remedy at one place of one block. Its formula is the remedy's `changed(tokens, here)`; padding stays as it is.

    The numbers it works with (`starts`, by the names of the remedy's options) are those that were given or, where the
    remedy learns, parameters of the block, which leave it with the hook.
    """

    remedy: Any

    def __init__(self, remedy: Remedy, site: Site, mean: MeanAt | None = None, ending: str = "", **starts: float):
        self.remedy, self.running, self.owner = remedy, site.running, site.block.module
        self.mean: Any = mean  # that the remedy takes here, if it takes one
        self.starts = {option: getattr(remedy, option) for option in remedy.numbers} | starts
        self.names = {option: f"{remedy.name.replace('-', '_')}_{option}{ending}" for option in self.starts}

    def shape(self, block: BlockAnatomy) -> tuple[int, ...]:
        """Of what is learned: one number per feature."""
        return (width_of(block),)

    def learn(self, block: BlockAnatomy) -> None:
        """Gives the block its parameters; in float32 or better, since a step of training is small."""
        shape, like = self.shape(block), next(self.owner.parameters())
        for option, name in self.names.items():
            if name not in self.owner._parameters:  # branches may share one
                start = torch.full(shape, self.starts[option], dtype=accumulator(like), device=like.device)
                self.owner.register_parameter(name, nn.Parameter(start))

    def parameters(self) -> dict[str, nn.Parameter]:
        names = self.names.values() if self.remedy.learns else ()
        return {name: getattr(self.owner, name) for name in names}

    def taken_down(self, module: nn.Module) -> None:
        for name in self.names.values() if self.remedy.learns else ():
            self.owner._parameters.pop(name, None)

    def in_force(self, option: str) -> Tensor | float:
        """What has been learned, or the number that was given."""
        found: Tensor | float = getattr(self.owner, self.names[option]) if self.remedy.learns else self.starts[option]
        return found

    def values_in_force(self) -> dict[str, float | list[float]]:
        values = {option: self.in_force(option) for option in self.starts}
        return {option: value.tolist() if isinstance(value, Tensor) else value for option, value in values.items()}

    def changed(self, tokens: Tensor) -> Tensor:
        """The new tokens, for tokens (batch, n, d)."""
        found: Tensor = self.remedy.changed(tokens, self)
        return found

    def change(self, tokens: Tensor) -> Tensor:
        x = self.running.batch_first(tokens)
        changed, real = self.changed(x), self.running.now.real  # (batch, n), true for real tokens; None: all are
        if real is not None:
            changed = torch.where(real.unsqueeze(-1), changed, x)
        return self.running.as_given(changed, tokens)


def width_of(block: BlockAnatomy) -> int:
    """How wide a token is: as the gains of the norms."""
    inside = [module for module in block.module.modules() if "norm" in type(module).__name__.lower()]
    known, others = (
        [w.numel() for norm in norms if isinstance(w := getattr(norm, "weight", None), Tensor) and w.ndim == 1]
        for norms in (block.norms, inside)
    )
    widths = known or others  # an FFN may have a norm of its own, which is wider
    if not widths and block.projections is not None:
        return block.projections().value.shape[1]  # no norms, as in ReZero: as wide as what W_V reads
    if not widths:
        raise ValueError(f"what is learned needs the width of a token, and {block.name!r} has no norm that shows it")
    return max(widths)  # norms of queries and keys are as narrow as a head


class Kept(ByThread):
    """What was heard in the pass that runs in this thread."""

    found: Tensor | None = None


class Listener(Hook):
    """Tokens have come to a spot: their mean is kept, of what all other remedies have made of them. `cut` takes the
    values out of what a fused layer returns."""

    hears_last = True

    def __init__(self, site: Site, spot: Spot, mean: MeanAt, cut: Callable[[Tensor], Tensor] | None = None):
        self.side, self.path, self.mean, self.cut, self.kept = spot.side, spot.path, mean, cut, Kept()
        site.note(None, self, "")
        hang(spot.module, self, spot.side)

    def __call__(self, module: nn.Module, args: Any, last: Any) -> None:
        tokens = tokens_at((args, last) if self.side == "in" else last, self.path)
        assert tokens is not None
        values = tokens if self.cut is None else self.cut(tokens)
        self.kept.found = self.mean.of(self.mean.running.batch_first(values))

    def take(self) -> Tensor | None:
        """What was kept, once."""
        found, self.kept.found = self.kept.found, None
        return found
