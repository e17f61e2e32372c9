"""Reparameterised value weights (Dovonon et al. 2025): H = W_V W_O = V Λ V⁻¹ with the eigenvalues Λ in an interval.

In X ← X + A X H real eigenvalues of H in [−1, 0] sharpen (tokens do not become alike), those in [0, 1] smooth. The
paper clips Λ, and so does this: W_V is V, which stays an ordinary weight, and W_O = clip(Λ) V⁻¹ is computed from it.

*Heads.* The columns of W_V are split over the heads, and so are the rows of W_O: head h has H_h = V_h Λ_h (V⁻¹)_h. The
whole H = Σ_h H_h has the eigenvalues Λ, and the non-zero ones of H_h are those of (W_O)_h (W_V)_h = Λ_h: the spectrum
of each head is its share of Λ, exactly. This is the reading here, where all heads together have one V. (Where all heads
attend alike the whole H acts, else each head's own does; both are in the interval.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from depthscope.anatomy import BlockAnatomy
from depthscope.hooks.staying import Hook, hang
from depthscope.models.token_means import accumulator
from depthscope.remedies.remedy import Remedy, Site, register_remedy

INTERVALS = {"sharpen": (-1.0, 0.0), "smooth": (0.0, 1.0)}
BRANCH = "attention_branch"
EIGENVALUES = "reparameterised_eigenvalues"


@register_remedy
@dataclass(frozen=True)
class Reparameterise(Remedy):
    """H = VΛV⁻¹ in the place of W_V and W_O, with Λ in an interval.

    `interval`: "sharpen" ([−1, 0]), "smooth" ([0, 1]) or (low, high). V starts as a random orthogonal matrix and the
    eigenvalues are drawn evenly from the interval (`seed`), so that attention's values are trained anew; their bias,
    whose meaning lay in the old W_V, starts at 0. `applied(model)` has the `eigenvalues` of this moment and the
    `condition` number of V.

    Λ is clipped where it is used: an eigenvalue that training has carried over a bound stays at it, and comes back when
    its gradient leads back (the gradient of a plain clip is 0 there, so that it never would).

    V and Λ are trained in the place of W_V and W_O: make the optimiser after `apply`. `remove` gives back the weights
    and biases that both projections had before. What is saved are plain weights, those that have been reached.
    """

    interval: str | tuple[float, float] = "sharpen"
    seed: int = 0

    name: ClassVar[str] = "reparameterise"
    always_shown: ClassVar[tuple[str, ...]] = ("interval",)

    def __post_init__(self) -> None:
        if isinstance(self.interval, str):
            if self.interval not in INTERVALS:
                raise ValueError(f"expected interval='sharpen', 'smooth' or (low, high), got {self.interval!r}")
        else:
            object.__setattr__(self, "interval", _bounds(self.interval))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"expected seed to be a whole number, got {self.seed!r}")
        super().__post_init__()

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest eigenvalue."""
        return INTERVALS[self.interval] if isinstance(self.interval, str) else self.interval

    @property
    def learns(self) -> bool:
        return True

    def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
        """It changes how the attention branch is made."""
        return (BRANCH,)

    def install(self, site: Site) -> None:
        hook = ComputedOutput(self, site)
        site.note(self, hook, BRANCH)
        hang(site.block.module, hook, "out")
        hook.take_over()


def _bounds(interval: Any) -> tuple[float, float]:
    try:
        low, high = (float(bound) for bound in interval)
    except (TypeError, ValueError):
        raise ValueError(f"expected interval='sharpen', 'smooth' or (low, high), got {interval!r}") from None
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ValueError(f"expected an interval (low, high) of finite numbers with low ≤ high, got ({low:g}, {high:g})")
    return low, high


class Clipped(torch.autograd.Function):
    """x clipped to [low, high]. Beyond a bound the gradient of a clip is 0, and what a step of training has carried
    over it would stay there for ever: here it passes where descending would lead back, and is 0 where it would lead
    further out. So x is at rest beyond a bound only where the best point of the interval is that bound (the condition
    of Karush, Kuhn and Tucker).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, low: float, high: float) -> Tensor:  # type: ignore[override]
        return x.clamp(low, high)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
        x, ctx.low, ctx.high = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        outward = ((x < ctx.low) & (gradient > 0)) | ((x > ctx.high) & (gradient < 0))
        return torch.where(outward, 0.0, gradient), None, None


def _layers(site: Site) -> tuple[Any, Any]:
    """The layers of a block that have W_V and W_O, or a refusal by name."""
    block = site.block
    what = f"{block.name!r} ({type(block.module).__name__})"
    spot = block.values or (None if block.fused_values is None else block.fused_values.spot)
    if spot is None or block.context is None or block.projections is None:
        raise ValueError(f"{what} does not show the layers of W_V and W_O, so that H cannot be reparameterised")
    value: Any = spot.module
    output: Any = block.context.module
    if block.values is None or not type(value) is type(output) is nn.Linear:
        kinds = f"{type(value).__name__} and {type(output).__name__}"
        raise ValueError(f"{what} has W_V and W_O in {kinds}: reparameterise needs separate layers, each nn.Linear")
    if any(not isinstance(layer._parameters.get("weight"), nn.Parameter) for layer in (value, output)):
        raise ValueError(f"{what} has a W_V or W_O that is computed and no parameter (as pruning leaves it): undo that")
    heads, width, own = block.projections().value.shape
    columns = value.weight.shape[0]
    if columns != width or heads * own != width:
        raise ValueError(
            f"{what} has W_V ({width} × {columns}) for {heads} heads of width {own}: H = VΛV⁻¹ needs a square V, of "
            "the width of a token (no grouped queries)"
        )
    for layer in (value, output):  # a weight that another module has too would be two from then on
        for name, module in site.model.named_modules():
            if module is not layer and any(shared is layer.weight for shared in module._parameters.values()):
                raise ValueError(
                    f"{block.name!r} shares a weight of its attention with {name!r}: reparameterise parts the two; "
                    "blocks= chooses others"
                )
    return value, output


class ComputedLinear(nn.Linear):
    """A linear layer whose weight is no parameter but a property: that of the V and Λ of this moment, for forward
    passes, measures of weights and saving alike.

    A state_dict has it under its old key, so that a saved model can be loaded without depthscope; what stands there is
    left alone when V and Λ are loaded. A layer takes an importable class, for copies and pickles.
    """

    form: ComputedOutput

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """As the layer that it was would have it, (out, in)."""
        return self.form.output().mT

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = self.weight
        destination[f"{prefix}weight"] = weight if keep_vars else weight.detach().clone().contiguous()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}weight", None)  # what is computed is not loaded
        super()._load_from_state_dict(state_dict, prefix, *args)


class ComputedOutput(Hook):
    """W_O = ΛV⁻¹ of one block: hangs on the block, so that it is found, copied and taken down."""

    def __init__(self, remedy: Reparameterise, site: Site):
        self.remedy, self.owner, self.seed = remedy, site.block.module, remedy.seed + site.number
        self.value_layer, self.output_layer = _layers(site)
        self.kept: list[tuple[nn.Module, str, nn.Parameter]] = []  # what was where before

    def __call__(self, module: nn.Module, args: Any, last: Any) -> None: ...

    def take_over(self) -> None:
        """V becomes the weight of the values, and Λ a parameter of the block, from which W_O is computed."""
        value, output, (low, high) = self.value_layer, self.output_layer, self.remedy.bounds
        weight, trained, width = value.weight.detach().clone(), output.weight.requires_grad, len(value.weight)
        generator = torch.Generator().manual_seed(self.seed)
        double: Any = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
        q, r = torch.linalg.qr(torch.randn(width, width, **double))
        drawn = low + (high - low) * torch.rand(width, **double)
        weight.copy_((q * torch.where(r.diagonal() < 0, -1.0, 1.0)).mT)
        self._exchange(value, "weight", weight)
        for layer in (value, output):
            if layer.bias is not None:
                bias = layer.bias.detach()
                self._exchange(layer, "bias", torch.zeros_like(bias) if layer is value else bias.clone())
        self._exchange(output, "weight", None)  # its place is kept
        output.__class__, output.form = ComputedLinear, self
        eigenvalues = nn.Parameter(drawn.to(weight.device, accumulator(weight)), requires_grad=trained)
        self.owner.register_parameter(EIGENVALUES, eigenvalues)

    def _exchange(self, layer: nn.Module, name: str, new: Tensor | None) -> None:
        before: Any = layer._parameters[name]
        self.kept.append((layer, name, before))
        layer._parameters[name] = None if new is None else nn.Parameter(new, requires_grad=before.requires_grad)

    def eigenvalues(self) -> Tensor:
        """The diagonal of Λ (d)."""
        found: Tensor = Clipped.apply(getattr(self.owner, EIGENVALUES), *self.remedy.bounds)  # type: ignore[no-untyped-call]
        return found

    def vectors(self) -> Tensor:
        """V (d, d)."""
        weight: Tensor = self.value_layer.weight
        return weight.mT

    def output(self) -> Tensor:
        """ΛV⁻¹ (d, d), computed in float32 or better."""
        vectors = self.vectors()
        try:
            inverse = torch.linalg.inv(vectors.to(accumulator(vectors)))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            raise ValueError(f"{self.block!r}: V of H = VΛV⁻¹ is singular; a smaller learning rate may help") from None
        return (self.eigenvalues().unsqueeze(-1) * inverse).to(vectors.dtype)

    def parameters(self) -> dict[str, nn.Parameter]:
        value, output = self.value_layer, self.output_layer
        found = {EIGENVALUES: self.owner._parameters.get(EIGENVALUES), "weight of the values": value.weight}
        found |= {"bias of the values": value.bias, "bias of the output": output.bias}
        return {name: parameter for name, parameter in found.items() if parameter is not None}

    def values_in_force(self) -> dict[str, float | list[float]]:
        vectors, condition = self.vectors().detach().double(), math.nan
        if vectors.isfinite().all():  # else training has diverged
            stretches = torch.linalg.svdvals(vectors)
            condition = (stretches[0] / stretches[-1]).item() if stretches[-1] > 0 else math.inf
        return {"eigenvalues": self.eigenvalues().tolist(), "condition": condition}

    def taken_down(self, module: nn.Module) -> None:
        learned = self.owner._parameters.pop(EIGENVALUES, None)
        self.output_layer.__class__ = nn.Linear
        vars(self.output_layer).pop("form", None)
        for layer, name, kept in self.kept:
            now, gradient = layer._parameters[name], kept.grad
            reached = learned if now is None else now
            if now is kept:
                continue  # it may be taken down again
            like = self.value_layer.weight  # the model may have been moved since, or frozen
            kept.data = kept.data.to(like.device, like.dtype)
            kept.grad = None if gradient is None else gradient.to(like.device, like.dtype)
            if reached is not None:
                kept.requires_grad_(reached.requires_grad)
            layer._parameters[name] = kept
