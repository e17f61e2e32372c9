"""H = V Λ V⁻¹ with real Λ in an interval (Dovonon et al. 2025): from a matrix, and from what is trained."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthscope.models.token_means import accumulator

F64 = torch.float64


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


def condition(vectors: Tensor, inverse: Tensor) -> Tensor:
    """‖V‖₁ ‖V⁻¹‖₁, the condition number in the 1-norm: 1 at the least, infinite for a singular V."""
    return torch.linalg.matrix_norm(vectors, 1) * torch.linalg.matrix_norm(inverse, 1)


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

    def __init__(self, owner: nn.Module, block: str, bounds: tuple[float, float], is_orthogonal: bool):
        self.owner, self.block, self.bounds, self.is_orthogonal = owner, block, bounds, is_orthogonal
        self.has_warned = False

    def vectors(self) -> Tensor:
        """V (d, d), in the dtype of the model."""
        free = getattr(self.owner, self.vectors_name)
        return orthogonal(free.to(accumulator(free))).to(free.dtype) if self.is_orthogonal else free

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
        found = condition(vectors, inverse).item()
        if not found <= 0.01 / torch.finfo(vectors.dtype).eps:
            self.has_warned = True
            warnings.warn(
                f"{self.block!r}: V of H = VΛV⁻¹ is nearly singular (condition number {found:.1e} in the 1-norm): "
                "more than a hundredth of H may be rounding; a smaller learning rate helps, or vectors='orthogonal'",
                stacklevel=2,
            )
