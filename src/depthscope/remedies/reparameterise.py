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
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from depthscope.anatomy import BlockAnatomy, Spot
from depthscope.hooks.staying import Hook, hooks_in, take_down
from depthscope.models.token_means import accumulator
from depthscope.remedies.record import records_of, set_records
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
    and biases that both projections had before; `bake(model)` leaves those that have been reached, as plain weights.
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
        site.put_inside(self, hook, Spot(site.block.module, "out"), BRANCH)  # and takes over, since it learns


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


class Layers(NamedTuple):
    """The layers of a block that have W_V and W_O, acting on row vectors."""

    value: Any  # with a fused layer, its last columns
    output: Any
    width: int


def _layers(site: Site) -> Layers:
    """Those of a block, or a refusal by name."""
    block = site.block
    what = f"{block.name!r} ({type(block.module).__name__})"
    fused = block.fused_values if block.values is None else None
    spot = block.values if fused is None else fused.spot
    if spot is None or block.context is None or block.projections is None:
        raise ValueError(f"{what} does not show the layers of W_V and W_O, so that H cannot be reparameterised")
    value: Any = spot.module
    output: Any = block.context.module
    cut: Any = None if fused is None else fused.cut
    known = cut is None or (cut.keywords.get("order") == "stacked" and type(value).__name__ == "Conv1D")
    if not known or computed_kind(value) is None or type(value) is not type(output):
        kinds = f"{type(value).__name__} and {type(output).__name__}"
        raise ValueError(
            f"{what} has W_V and W_O in layers ({kinds}) from which reparameterise cannot tell them apart: it knows "
            "separate nn.Linear layers, and the fused Conv1D of GPT-2"
        )
    if any(not isinstance(layer._parameters.get("weight"), nn.Parameter) for layer in (value, output)):
        raise ValueError(f"{what} has a W_V or W_O that is computed and no parameter (as pruning leaves it): undo that")
    heads, width, own = block.projections().value.shape
    columns = value.weight.shape[0] if cut is None else heads * own
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
    return Layers(value, output, width)


class Computed:
    """A linear layer whose weight is no parameter but a property: that of the V and Λ of this moment, for forward
    passes, measures of weights and saving alike.

    A state_dict has it under its old key, so that a saved model can be loaded without depthscope; what stands there is
    left alone when V and Λ are loaded. A layer takes an importable class, for copies and pickles.
    """

    form: ComputedOutput
    transposed: bool  # whether the weight is stored (out, in), as in `nn.Linear`

    @property
    def weight(self) -> Tensor:
        """As the layer that it was would have it."""
        found = self.form.output()
        return found.mT if self.transposed else found

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        weight = self.weight
        destination[f"{prefix}weight"] = weight if keep_vars else weight.detach().clone().contiguous()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}weight", None)  # what is computed is not loaded
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]


class ComputedLinear(Computed, nn.Linear):  # type: ignore[override]
    """In the place of PyTorch's."""

    transposed = True


def computed_kind(layer: nn.Module) -> type[nn.Module] | None:
    """The class that a layer can take; None: there is none for it."""
    if type(layer) is nn.Linear:
        return ComputedLinear
    if type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils":
        from depthscope.remedies.computed_conv1d import ComputedConv1D

        return ComputedConv1D
    return None


class ComputedOutput(Hook):
    """W_O = ΛV⁻¹ of one block: hangs on the block, so that it is found, copied and taken down."""

    def __init__(self, remedy: Reparameterise, site: Site):
        self.remedy, self.owner, self.layers = remedy, site.block.module, _layers(site)
        self.seed, self.kind = remedy.seed + site.number, type(self.layers.output)
        self.kept: list[tuple[nn.Module, str, nn.Parameter]] = []  # what was where before

    def __call__(self, module: nn.Module, args: Any, last: Any) -> None: ...

    def learn(self, block: BlockAnatomy) -> None:
        """V becomes the weight of the values, and Λ a parameter of the block, from which W_O is computed."""
        value, output, width, (low, high) = *self.layers, self.remedy.bounds
        weight, trained = value.weight.detach().clone(), output.weight.requires_grad
        generator = torch.Generator().manual_seed(self.seed)
        double: Any = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
        q, r = torch.linalg.qr(torch.randn(width, width, **double))
        drawn = low + (high - low) * torch.rand(width, **double)
        columns = weight.mT if isinstance(value, nn.Linear) else weight  # (d, …, d): a view
        columns[:, -width:] = (q * torch.where(r.diagonal() < 0, -1.0, 1.0)).to(weight)
        self._exchange(value, "weight", weight)
        for layer in (value, output):
            if layer.bias is not None:
                bias = layer.bias.detach().clone()
                if layer is value:
                    bias[-width:] = 0
                self._exchange(layer, "bias", bias)
        self._exchange(output, "weight", None)  # its place is kept
        output.__class__, output.form = computed_kind(output), self
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
        weight: Tensor = self.layers.value.weight
        return (weight.mT if isinstance(self.layers.value, nn.Linear) else weight)[:, -self.layers.width :]

    def output(self) -> Tensor:
        """ΛV⁻¹ (d, d), computed in float32 or better."""
        vectors = self.vectors()
        try:
            inverse = torch.linalg.inv(vectors.to(accumulator(vectors)))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            raise ValueError(f"{self.block!r}: V of H = VΛV⁻¹ is singular; a smaller learning rate may help") from None
        return (self.eigenvalues().unsqueeze(-1) * inverse).to(vectors.dtype)

    def parameters(self) -> dict[str, nn.Parameter]:
        value, output = self.layers.value, self.layers.output
        found = {EIGENVALUES: self.owner._parameters.get(EIGENVALUES), "weight of the values": value.weight}
        found |= {"bias of the values": value.bias, "bias of the output": output.bias}
        return {name: parameter for name, parameter in found.items() if parameter is not None}

    def values_in_force(self) -> dict[str, float | list[float]]:
        vectors, condition = self.vectors().detach().double(), math.nan
        if vectors.isfinite().all():  # else training has diverged
            stretches = torch.linalg.svdvals(vectors)
            condition = (stretches[0] / stretches[-1]).item() if stretches[-1] > 0 else math.inf
        return {"eigenvalues": self.eigenvalues().tolist(), "condition": condition}

    def keep_present(self) -> None:
        """What was kept of the layers becomes what they have now."""
        present = [(kept, getattr(layer, name).detach().clone().contiguous()) for layer, name, kept in self.kept]
        for kept, now in present:
            kept.data = now

    def taken_down(self, module: nn.Module) -> None:
        learned = self.owner._parameters.pop(EIGENVALUES, None)
        self.layers.output.__class__ = self.kind
        vars(self.layers.output).pop("form", None)
        for layer, name, kept in self.kept:
            now, gradient = layer._parameters[name], kept.grad
            reached = learned if now is None else now
            if now is kept:
                continue  # it may be taken down again
            like = self.layers.value.weight  # the model may have been moved since, or frozen
            kept.data = kept.data.to(like.device, like.dtype)
            kept.grad = None if gradient is None else gradient.to(like.device, like.dtype)
            if reached is not None:
                kept.requires_grad_(reached.requires_grad)
            layer._parameters[name] = kept


def bake(model: nn.Module) -> nn.Module:
    """Leaves the W_V and W_O that `Reparameterise` has reached as plain weights, and takes only that remedy out.

    The model computes the same as before, and nothing keeps the eigenvalues of H in their interval from then on.
    """
    computed = [hook for _, hook in hooks_in(model) if isinstance(hook, ComputedOutput)]
    if not computed:
        raise ValueError("expected a model with reparameterise, whose weights can be baked, got one without")
    for hook in computed:
        hook.keep_present()
    others = [hook for _, hook in hooks_in(model) if not isinstance(hook, ComputedOutput)]
    stay = any(hook.remedy is not None for hook in others)
    take_down(model, keep=frozenset(map(id, others)) if stay else frozenset())
    set_records(model, [record for record in records_of(model) if record["remedy"] != Reparameterise.name])
    return model
