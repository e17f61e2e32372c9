"""Reparameterised value weights (Dovonon et al. 2025): H = W_V W_O = V Λ V⁻¹ with the eigenvalues Λ in an interval.

In X ← X + A X H real eigenvalues of H in [−1, 0] sharpen (tokens do not become alike), those in [0, 1] smooth. The
paper clips Λ, and so does this: W_V = V and W_O = clip(Λ) V⁻¹, with V and Λ trained.

*Heads.* The columns of W_V are split over the heads, and so are the rows of W_O: head h has H_h = V_h Λ_h (V⁻¹)_h. The
whole H = Σ_h H_h has the eigenvalues Λ, and the non-zero ones of H_h are those of (W_O)_h (W_V)_h = Λ_h: the spectrum
of each head is its share of Λ, exactly. This is the reading here, where all heads together have one V. (Where all heads
attend alike the whole H acts, else each head's own does; both are in the interval.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from depthscope.anatomy import BlockAnatomy, Spot
from depthscope.hooks.staying import Hook, hooks_in, take_down
from depthscope.models.token_means import accumulator
from depthscope.remedies.eigenform import (
    QUERY_KEY,
    Eigenform,
    Form,
    dealt,
    fresh_form,
    real_form,
    steered_kind,
    symmetric_form,
)
from depthscope.remedies.record import records_of, set_records
from depthscope.remedies.remedy import Remedy, Site, register_remedy

INTERVALS = {"sharpen": (-1.0, 0.0), "smooth": (0.0, 1.0)}
BRANCH = "attention_branch"


@register_remedy
@dataclass(frozen=True)
class Reparameterise(Remedy):
    """H = VΛV⁻¹ in the place of W_V and W_O, with Λ in an interval.

    `interval`: "sharpen" ([−1, 0]), "smooth" ([0, 1]) or (low, high). `vectors`: "free", or "orthogonal" (Q of a free
    matrix's QR decomposition, so that H is symmetric). `start`: "present" takes V and Λ from the weights that are
    there: for a free V the eigenvectors of H with the real parts of its eigenvalues clipped, for an orthogonal one the
    nearest symmetric matrix. A complex spectrum has no real form, so that H changes: `applied(model)` has the relative
    `error` ‖H' − H‖/‖H‖ of each block, and one above `max_error` is refused. The eigenvalues are dealt to the heads in
    turn: the whole H is kept, not which head does what. "fresh" draws an orthogonal V and eigenvalues evenly from the
    interval (`seed`), as for training from the start. The bias of the values, whose meaning lay in the old
    W_V, moves through the old W_O into the output's, and is 0 after it; "fresh" only makes it 0.

    Λ is clipped where it is used: an eigenvalue that training has carried over a bound stays at it, and comes back when
    its gradient leads back (the gradient of a plain clip is 0 there, so that it never would).

    V and Λ are trained in the place of W_V and W_O: make the optimiser after `apply`. `remove` gives back the weights
    and biases that both projections had before; `bake(model)` leaves those that have been reached, as plain weights.
    """

    interval: str | tuple[float, float] = "sharpen"
    vectors: Literal["free", "orthogonal"] = "free"
    start: Literal["present", "fresh"] = "present"
    max_error: float | None = None
    seed: int = 0

    name: ClassVar[str] = "reparameterise"
    always_shown: ClassVar[tuple[str, ...]] = ("interval",)

    def __post_init__(self) -> None:
        if not isinstance(self.interval, str):
            object.__setattr__(self, "interval", _bounds(self.interval))
        elif self.interval not in INTERVALS:
            raise ValueError(f"expected interval='sharpen', 'smooth' or (low, high), got {self.interval!r}")
        if self.vectors not in ("free", "orthogonal"):
            raise ValueError(f"expected vectors='free' or 'orthogonal', got {self.vectors!r}")
        if self.start not in ("present", "fresh"):
            raise ValueError(f"expected start='present' or 'fresh', got {self.start!r}")
        if self.max_error is not None and not self.max_error >= 0:
            raise ValueError(f"expected max_error of at least 0, or None for any, got {self.max_error}")
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
        """Takes the place of the projections of one block, or refuses."""
        layers = _layers(site.block)
        _refuse_tied(site, layers)
        form = self._form(layers, site)
        hook = Steering(self, site, layers, form.error)
        site.put_inside(self, hook, Spot(site.block.module, "out"), BRANCH)  # first: taking it down undoes the rest
        hook.take_over(form)

    def _form(self, layers: Layers, site: Site) -> Form:
        """V and Λ to begin with."""
        low, high = self.bounds
        width, device = layers.width, layers.output.weight.device
        if device.type == "meta":
            return Form(torch.empty(width, width, device=device), torch.empty(width, device=device), math.nan, 0)
        if self.start == "fresh":
            return fresh_form(width, low, high, self.seed + site.number)
        with torch.no_grad():
            value, output = (weight.to(torch.float64) for weight in layers.weights())
        if not (value.isfinite().all() and output.isfinite().all()):
            raise ValueError(f"block {site.number}: expected finite weights, got nan or inf in W_V or W_O")
        try:
            found = (symmetric_form if self.vectors == "orthogonal" else real_form)(value @ output, low, high)
        except ValueError as error:
            raise ValueError(f"block {site.number}: {error}") from None
        if self.max_error is not None and not found.error <= self.max_error:
            raise ValueError(
                f"block {site.number}: {found.complex_eigenvalues} of {width} eigenvalues of H are complex, and its "
                f"form with real ones in [{low:g}, {high:g}] is {found.error:.3g} of its norm away, more than "
                f"max_error={self.max_error:g}; leave that out, or use start='fresh'"
            )
        return dealt(found, layers.heads)


def _bounds(given: Any) -> tuple[float, float]:
    try:
        low, high = (float(bound) for bound in given)
    except (TypeError, ValueError):
        raise ValueError(f"expected interval='sharpen', 'smooth' or (low, high), got {given!r}") from None
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ValueError(f"expected an interval (low, high) of finite numbers with low ≤ high, got ({low:g}, {high:g})")
    return low, high


class Layers(NamedTuple):
    """The layers of a block that have W_V and W_O, acting on row vectors."""

    value: Any  # with a fused layer, its last columns
    output: Any
    is_fused: bool
    heads: int
    width: int

    def weights(self) -> tuple[Tensor, Tensor]:
        """W_V and W_O, (d, d) each."""
        value, output = (w.weight.mT if isinstance(w, nn.Linear) else w.weight for w in (self.value, self.output))
        return value[:, -self.width :], output


def _layers(block: BlockAnatomy) -> Layers:
    """Those of a block, or a refusal by name."""
    what = f"{block.name!r} ({type(block.module).__name__})"
    fused = block.fused_values
    spot = block.values or (fused.spot if fused is not None else None)
    if spot is None or block.context is None or block.projections is None:
        raise ValueError(f"{what} does not show the layers of W_V and W_O, so that H cannot be reparameterised")
    value: Any = spot.module
    output: Any = block.context.module
    cut: Any = None if block.values is not None or fused is None else fused.cut
    known = cut is None or (cut.keywords.get("order") == "stacked" and type(value).__name__ == "Conv1D")
    if not known or steered_kind(value) is None or type(value) is not type(output):
        kinds = f"{type(value).__name__} and {type(output).__name__}"
        raise ValueError(
            f"{what} has W_V and W_O in layers ({kinds}) from which reparameterise cannot tell them apart: it knows "
            "separate nn.Linear layers, and the fused Conv1D of GPT-2"
        )
    if any(not isinstance(layer._parameters.get("weight"), nn.Parameter) for layer in (value, output)):
        raise ValueError(f"{what} has a W_V or W_O that is computed and no parameter (as pruning leaves it): undo that")
    shapes = block.projections()
    heads, width, own = shapes.value.shape
    columns = value.weight.shape[0] if cut is None else heads * own
    if columns != width or heads * own != width:
        raise ValueError(
            f"{what} has W_V ({width} × {columns}) for {heads} heads of width {own}: H = VΛV⁻¹ needs a square V, of "
            "the width of a token (no grouped queries)"
        )
    if value.bias is not None and output.bias is None:
        raise ValueError(f"{what} has a bias on its values and none on its output to take it over")
    return Layers(value, output, cut is not None, heads, width)


def _refuse_tied(site: Site, layers: Layers) -> None:
    """A weight that another module has too would be two from then on."""
    for layer in (layers.value, layers.output):
        for name, module in site.model.named_modules():
            if module is not layer and any(given is layer.weight for given in module._parameters.values()):
                raise ValueError(
                    f"{site.block.name!r} shares a weight of its attention with {name!r}: reparameterise parts the "
                    "two; blocks= chooses others"
                )


class Kept(NamedTuple):
    """A layer as it was."""

    layer: Any
    kind: type[nn.Module]
    weight: nn.Parameter
    bias: Tensor | None  # a copy


class Steering(Hook):
    """The reparameterised H of one block: hangs on the block, so that it is found, copied and taken down."""

    def __init__(self, remedy: Reparameterise, site: Site, layers: Layers, error: float):
        self.remedy, self.layers, self.error = remedy, layers, error
        self.form = Eigenform(site.block.module, site.block.name, remedy.bounds, remedy.vectors == "orthogonal")
        self.kept: list[Kept] = []

    def __call__(self, module: nn.Module, args: Any, last: Any) -> None: ...

    def take_over(self, form: Form) -> None:
        """V and Λ become parameters of the block, and the weights of its layers are computed from them."""
        layers, width = self.layers, self.layers.width
        value, output, weight = layers.value, layers.weights()[1].detach(), layers.output.weight
        for layer, role in ((value, "fused" if layers.is_fused else "vectors"), (layers.output, "output")):
            bias = None if layer.bias is None else layer.bias.detach().clone()
            self.kept.append(Kept(layer, type(layer), layer.weight, bias))
            steered = steered_kind(layer)
            layer._parameters["weight"] = None  # its place is kept
            layer.__class__ = steered
            layer.form, layer.role = self.form, role
        like, trained = {"device": weight.device, "dtype": weight.dtype}, weight.requires_grad
        learned = {
            self.form.vectors_name: (form.vectors.to(**like).contiguous(), trained),
            self.form.eigenvalues_name: (form.eigenvalues.to(weight.device, accumulator(weight)), trained),
        }
        if layers.is_fused:
            fused = self.kept[0].weight
            learned = {QUERY_KEY: (fused.detach()[:, :-width].clone(), fused.requires_grad)} | learned
        for name, (start, requires_grad) in learned.items():
            self.form.owner.register_parameter(name, nn.Parameter(start, requires_grad=requires_grad))
        if value.bias is not None:
            with torch.no_grad():
                if self.remedy.start == "present":
                    layers.output.bias.add_(value.bias[-width:] @ output)
                value.bias[-width:] = 0

    def parameters(self) -> dict[str, nn.Parameter]:
        found = {name: self.form.owner._parameters.get(name) for name in self.form.names}
        found |= {"bias of the values": self.layers.value.bias, "bias of the output": self.layers.output.bias}
        return {name: parameter for name, parameter in found.items() if parameter is not None}

    def values_in_force(self) -> dict[str, float | list[float]]:
        return {
            "eigenvalues": self.form.eigenvalues().tolist(),
            "error": self.error,
            "condition": self.form.condition(),
        }

    def keep_present(self) -> None:
        """What was kept of the layers becomes what they have now."""
        with torch.no_grad():
            now = [(kept, kept.layer.weight.clone(), kept.layer.bias) for kept in self.kept]
            for kept, weight, bias in now:
                kept.weight.data = weight.contiguous()
                if kept.bias is not None:
                    kept.bias.data = bias.detach().clone()

    def taken_down(self, module: nn.Module) -> None:
        learned = [self.form.owner._parameters.pop(name, None) for name in self.form.names]
        vectors = learned[0]
        for kept in self.kept:
            layer: Any = kept.layer
            if layer._parameters["weight"] is not None:
                continue  # it may be taken down again
            layer.__class__ = kept.kind
            for name in ("form", "role"):
                vars(layer).pop(name, None)
            if kept.bias is not None:
                with torch.no_grad():
                    layer.bias.copy_(kept.bias)
            if vectors is not None:  # the model may have been moved since, or frozen
                gradient, like = kept.weight.grad, (vectors.device, vectors.dtype)
                kept.weight.data = kept.weight.data.to(*like)
                kept.weight.grad = None if gradient is None else gradient.to(*like)
                kept.weight.requires_grad_(any(found is not None and found.requires_grad for found in learned[::2]))
            layer._parameters["weight"] = kept.weight


def bake(model: nn.Module) -> nn.Module:
    """Leaves the W_V and W_O that `Reparameterise` has reached as plain weights, and takes only that remedy out.

    The model computes the same as before, and nothing keeps the eigenvalues of H in their interval from then on.
    """
    steering = [hook for _, hook in hooks_in(model) if isinstance(hook, Steering)]
    if not steering:
        raise ValueError("expected a model with reparameterise, whose weights can be baked, got one without")
    for hook in steering:
        hook.keep_present()
    others = [hook for _, hook in hooks_in(model) if not isinstance(hook, Steering)]
    stay = any(hook.remedy is not None for hook in others)
    take_down(model, keep=frozenset(map(id, others)) if stay else frozenset())
    set_records(model, [record for record in records_of(model) if record["remedy"] != Reparameterise.name])
    return model
