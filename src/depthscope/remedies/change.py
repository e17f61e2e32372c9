"""A remedy at one place of one block: the tokens that it changes, what it learns, and what it hears elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from depthscope.anatomy import BlockAnatomy, Spot
from depthscope.hooks.staying import Hook, TokenHook, hang
from depthscope.hooks.tokens import tokens_at
from depthscope.models.token_means import accumulator
from depthscope.safety import ByThread

if TYPE_CHECKING:
    from depthscope.remedies.means import MeanAt
    from depthscope.remedies.remedy import Remedy
    from depthscope.remedies.site import Site


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
        shape = self.shape(block)
        like = next(self.owner.parameters())
        for option, name in self.names.items():
            if name not in self.owner._parameters:  # branches may share one
                start = torch.full(shape, self.starts[option], dtype=accumulator(like), device=like.device)
                self.owner.register_parameter(name, nn.Parameter(start))

    def taken_down(self, module: nn.Module) -> None:
        for name in self.names.values() if self.remedy.learns else ():
            self.owner._parameters.pop(name, None)

    def parameters(self) -> dict[str, nn.Parameter]:
        names = self.names.values() if self.remedy.learns else ()
        return {name: getattr(self.owner, name) for name in names}

    def in_force(self, option: str) -> Tensor | float:
        """What has been learned, or the number that was given."""
        found: Tensor | float = getattr(self.owner, self.names[option]) if self.remedy.learns else self.starts[option]
        return found

    def values_in_force(self) -> dict[str, float | list[float]]:
        values = {option: self.in_force(option) for option in self.starts}
        return {option: value.tolist() if isinstance(value, Tensor) else value for option, value in values.items()}

    @property
    def real(self) -> Tensor | None:
        """(batch, n) true for the real tokens of this call; None: all are."""
        return self.running.now.real

    def changed(self, tokens: Tensor) -> Tensor:
        """The new tokens, for tokens (batch, n, d)."""
        found: Tensor = self.remedy.changed(tokens, self)
        return found

    def change(self, tokens: Tensor) -> Tensor:
        x = self.running.batch_first(tokens)
        changed, real = self.changed(x), self.real
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
    """Tokens have come to a spot: they, or their mean, are kept. It hears what all other remedies have made of them."""

    hears_last = True

    def __init__(self, spot: Spot, mean: MeanAt | None = None):
        self.side, self.path, self.mean, self.kept = spot.side, spot.path, mean, Kept()

    def hang(self, site: Site, spot: Spot) -> None:
        """Hangs it up."""
        site.note(None, self, "")
        hang(spot.module, self, spot.side)

    def read(self, tokens: Tensor) -> Tensor:
        """What is kept of the tokens that were heard."""
        return tokens if self.mean is None else self.mean.of(self.mean.running.batch_first(tokens))

    def __call__(self, module: nn.Module, args: Any, last: Any) -> None:
        tokens = tokens_at((args, last) if self.side == "in" else last, self.path)
        assert tokens is not None
        self.kept.found = self.read(tokens)

    def take(self) -> Tensor | None:
        """What was kept, once."""
        found, self.kept.found = self.kept.found, None
        return found
