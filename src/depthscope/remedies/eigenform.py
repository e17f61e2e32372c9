"""H = V Λ V⁻¹ with real Λ in an interval (Dovonon et al. 2025): from a matrix, and from what is trained; and the layers
whose weights are computed from V and Λ."""

from __future__ import annotations

import warnings
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from depthscope.models.token_means import accumulator

F64 = torch.float64
QUERY_KEY = "reparameterised_query_key"


class Form(NamedTuple):
    """V (d, d) and the diagonal of Λ (d), with what they leave of the matrix that they stand for."""

    vectors: Tensor
    eigenvalues: Tensor
    error: float  # ‖VΛV⁻¹ − H‖_F / ‖H‖_F; nan for H = 0
    complex_eigenvalues: int  # of H, which no real form has


def real_form(matrix: Tensor, low: float, high: float) -> Form:
    """V and Λ from the eigenvectors of H (d, d): the real parts of its eigenvalues, clipped to [low, high]; float64.

    A pair of complex eigenvalues α ± iβ has a plane that H maps to itself, and no real eigenvector in it. The plane is
    kept, spanned by the real and the imaginary part of the eigenvector, turned so that they are orthogonal, and H on it
    becomes α·I: what β did is the error, with what was clipped. Columns have unit length. Refused where a matrix has
    too few eigenvectors.
    """
    h = matrix.to(F64)
    values, found = torch.linalg.eig(h)
    phase = (found * found).sum(dim=0).angle() / 2  # uᵀu becomes real, so that Re u ⊥ Im u
    turned = torch.where(values.imag == 0, found, found * torch.polar(torch.ones_like(phase), -phase))
    vectors = torch.where(values.imag >= 0, turned.real, turned.imag)
    vectors = vectors / vectors.norm(dim=0)
    clipped = values.real.clamp(low, high)
    try:
        made = (vectors * clipped) @ torch.linalg.inv(vectors)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        raise ValueError("H has too few eigenvectors to be written as VΛV⁻¹; use start='fresh'") from None
    return Form(vectors, clipped, _error(made, h), int((values.imag != 0).sum()))


def symmetric_form(matrix: Tensor, low: float, high: float) -> Form:
    """The symmetric matrix with eigenvalues in [low, high] that is nearest to H (d, d): V is orthogonal; float64.

    It is that of (H + Hᵀ)/2 with its eigenvalues clipped: the skew part is orthogonal to all symmetric matrices, and
    the Frobenius norm does not see rotations.
    """
    h = matrix.to(F64)
    values, vectors = torch.linalg.eigh((h + h.mT) / 2)
    clipped = values.clamp(low, high)
    complex_eigenvalues = int((torch.linalg.eigvals(h).imag != 0).sum())
    return Form(vectors, clipped, _error((vectors * clipped) @ vectors.mT, h), complex_eigenvalues)


def fresh_form(width: int, low: float, high: float, seed: int) -> Form:
    """A random orthogonal V, and eigenvalues drawn evenly from [low, high]; float64. It stands for no matrix."""
    generator = torch.Generator().manual_seed(seed)
    vectors = orthogonal(torch.randn(width, width, generator=generator, dtype=F64))
    return Form(vectors, low + (high - low) * torch.rand(width, generator=generator, dtype=F64), float("nan"), 0)


def dealt(form: Form, heads: int) -> Form:
    """The same with its columns in another order: in turn, from the least eigenvalue on, one to each of the heads,
    which have neighbouring columns. So no head gets all that was clipped."""
    order = form.eigenvalues.argsort().unflatten(0, (-1, heads)).T.flatten()
    return form._replace(vectors=form.vectors[:, order], eigenvalues=form.eigenvalues[order])


def orthogonal(free: Tensor) -> Tensor:
    """Q of the QR decomposition of a free matrix (d, d), with R's diagonal positive, which makes it unique."""
    q, r = torch.linalg.qr(free)
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def _error(made: Tensor, matrix: Tensor) -> float:
    return ((made - matrix).norm() / matrix.norm()).item()


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


def clipped(x: Tensor, low: float, high: float) -> Tensor:
    """x in [low, high], with a gradient that leads back into it: see `Clipped`."""
    found: Tensor = Clipped.apply(x, low, high)  # type: ignore[no-untyped-call]
    return found


class Eigenform:
    """What V and Λ of one block are now: the parameters that `owner` has, as they are used."""

    vectors_name = "reparameterised_vectors"
    eigenvalues_name = "reparameterised_eigenvalues"
    names = (vectors_name, eigenvalues_name, QUERY_KEY)

    def __init__(self, owner: nn.Module, block: str, bounds: tuple[float, float], is_orthogonal: bool):
        self.owner, self.block, self.bounds, self.is_orthogonal = owner, block, bounds, is_orthogonal
        self.has_warned = False

    def vectors(self) -> Tensor:
        """V (d, d), in the dtype of the model."""
        free = getattr(self.owner, self.vectors_name)
        return orthogonal(free.to(accumulator(free))).to(free.dtype) if self.is_orthogonal else free

    def fused(self) -> Tensor:
        """V beside the weights of queries and keys (d, 3d)."""
        return torch.cat([getattr(self.owner, QUERY_KEY), self.vectors()], dim=1)

    def eigenvalues(self) -> Tensor:
        """The diagonal of Λ (d)."""
        return clipped(getattr(self.owner, self.eigenvalues_name), *self.bounds)

    def output(self) -> Tensor:
        """ΛV⁻¹ (d, d), computed in float32 or better."""
        free = getattr(self.owner, self.vectors_name)
        working = free.to(accumulator(free))
        inverse = orthogonal(working).mT if self.is_orthogonal else self._inverse(working)
        return (self.eigenvalues().unsqueeze(-1) * inverse).to(free.dtype)

    def condition(self) -> float:
        """The condition number of V in the 2-norm, in which an orthogonal one has 1; infinite if it is singular, nan if
        it is not finite."""
        vectors = self.vectors().detach().to(F64)
        if not vectors.isfinite().all():
            return float("nan")
        stretches = torch.linalg.svdvals(vectors)
        return (stretches[0] / stretches[-1]).item() if stretches[-1] > 0 else float("inf")

    def _inverse(self, vectors: Tensor) -> Tensor:
        try:
            inverse = torch.linalg.inv(vectors)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            raise ValueError(f"{self.block!r}: V of H = VΛV⁻¹ is singular; vectors='orthogonal' cannot be") from None
        if not (self.has_warned or torch.compiler.is_compiling() or vectors.is_meta):
            self._watch(vectors.detach(), inverse.detach())
        return inverse

    def _watch(self, vectors: Tensor, inverse: Tensor) -> None:
        """Once: where a hundredth of V⁻¹ or more may be rounding."""
        found = (torch.linalg.matrix_norm(vectors, 1) * torch.linalg.matrix_norm(inverse, 1)).item()
        if not found <= 0.01 / torch.finfo(vectors.dtype).eps:
            self.has_warned = True
            warnings.warn(
                f"{self.block!r}: V of H = VΛV⁻¹ is nearly singular (condition number {found:.1e} in the 1-norm): "
                "more than a hundredth of H may be rounding; a smaller learning rate helps, or vectors='orthogonal'",
                stacklevel=2,
            )


class Steered:
    """A linear layer whose weight is no parameter but a property: that of the V and Λ of this moment, for forward
    passes, measures of weights and saving alike.

    A state_dict has it under its old key besides V and Λ, so that a saved model can be loaded without depthscope; what
    stands there is left alone when V and Λ are loaded. A layer takes an importable class, for copies and pickles.
    """

    form: Eigenform
    role: Literal["vectors", "output", "fused"]  # the method of the form that makes its weight
    transposed: bool  # whether the weight is stored (out, in), as in `nn.Linear`

    @property
    def weight(self) -> Tensor:
        """As the layer that it was would have it."""
        found: Tensor = getattr(self.form, self.role)()
        return found.mT if self.transposed else found

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        weight = self.weight
        destination[f"{prefix}weight"] = weight if keep_vars else weight.detach().clone().contiguous()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}weight", None)  # what is computed is not loaded
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]


class SteeredLinear(Steered, nn.Linear):  # type: ignore[override]
    """In the place of PyTorch's."""

    transposed = True


def steered_kind(layer: nn.Module) -> type[nn.Module] | None:
    """The class that a layer can take; None: there is none for it."""
    if type(layer) is nn.Linear:
        return SteeredLinear
    if type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils":
        from depthscope.remedies.steered_conv1d import SteeredConv1D

        return SteeredConv1D
    return None
