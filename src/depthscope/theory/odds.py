"""The odds s = t_sim/t_div through depth: what Yu & Zhang leave open. Ours, for **random weights**.

Because P1 = 1, a block maps (energy of the mean, energy of the deviations) triangularly: the mean feeds
only the mean, the diversity feeds both. So the odds follow s → ρs + c, with
ρ = (mean → mean)/(diversity → diversity) and c = (diversity → mean)/(diversity → diversity), and
de-escalation multiplies by (1 − τ)². Measured ξ₁/ξ₂ = ρ + c/s is not ρ: while s is small, c dominates.
In trained weights W aligns with the mean; nothing here then predicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from depthscope.measures import TokenMatrix

# Variance of the log-odds that one block adds, times the width. A dominating mean grows by ‖x(I + αW)‖²/‖x‖², whose
# logarithm has the variance (4a + 2a²)/(1 + a)²/d, a = α²dσ²: 1.5/d at a = 1. Simulated with the FFN: 1.6 ± 0.1.
WALK = 1.5


@dataclass(frozen=True)
class OddsMap:
    """s → (1 − τ)²(ρs + c), one block and one de-escalation of strength τ at its end."""

    rho: float  # ρ ≥ 1 escalates
    feed: float  # c ≥ 0: what diversity feeds into the mean (unequal column sums of P, ReLU's mean, biases)

    @property
    def critical_tau(self) -> float:
        """τ_c = 1 − ρ^(−1/2): below it similarity goes to 1, above it stays bounded. 0.293 for ρ = 2."""
        return max(0.0, 1 - self.rho**-0.5)

    def after(self, odds: float, blocks: int, tau: float = 0.0) -> float:
        """The odds after a number of blocks: qˡs + (1 − τ)²c(qˡ − 1)/(q − 1), q = (1 − τ)²ρ."""
        keep = (1 - tau) ** 2
        q = keep * self.rho
        if blocks * math.log(max(q, 1.0)) > 700:  # beyond what a float holds
            return math.inf
        total = float(blocks) if math.isclose(q, 1) else (q**blocks - 1) / (q - 1)
        return q**blocks * odds + keep * self.feed * total

    def fixed_point(self, tau: float) -> float:
        """s* = (1 − τ)²c / (1 − (1 − τ)²ρ), where the odds settle; infinite at τ ≤ τ_c."""
        keep = (1 - tau) ** 2
        return keep * self.feed / (1 - keep * self.rho) if keep * self.rho < 1 else math.inf

    def tau_for(self, odds: float) -> float:
        """The τ whose fixed point is the wanted odds: 1 − √(s*/(ρs* + c)), just after the operation.

        0 where the odds stay below them by themselves.
        """
        if not odds > 0:
            raise ValueError(f"expected wanted odds above 0, got {odds}; τ = 1 gives 0")
        return max(0.0, 1 - math.sqrt(odds / (self.rho * odds + self.feed)))

    def depth_to(self, similarity: float, odds: float, tau: float = 0.0, most: int = 100_000) -> int | None:
        """The first block after which t_sim exceeds `similarity`; None if it never does."""
        wanted = odds_of(similarity)
        if odds > wanted:
            return 0
        if self.fixed_point(tau) <= wanted:
            return None
        for block in range(1, most + 1):
            odds = (1 - tau) ** 2 * (self.rho * odds + self.feed)
            if odds > wanted:
                return block
        return None


def odds_of(similarity: float) -> float:
    """s = t_sim/(1 − t_sim); infinite at 1."""
    return math.inf if similarity >= 1 else similarity / (1 - similarity)


def similarity_of(odds: float) -> float:
    """t_sim = s/(1 + s)."""
    return 1.0 if math.isinf(odds) else odds / (1 + odds)


def level_to_hold(entrance: float) -> float:
    """The similarity to aim at with a remedy: that of the tokens at the entrance, so that depth takes nothing away.

    Not above ½, where mean and differences weigh the same, nor below 0.1, where τ comes near 1.
    """
    return min(max(entrance, 0.1), 0.5)


def token_odds(tokens: Tensor | TokenMatrix, mask: Tensor | None = None) -> Tensor:
    """s = ‖Π₁X‖²/‖Π⊥X‖², (…); infinite for equal tokens. From norms: right in both limits."""
    x = TokenMatrix.of(tokens, mask)
    return (x.mean_norm / x.deviation_norm).square()


def band(similarity: float, blocks: int, width: int, deviations: float = 2.0) -> tuple[float, float]:
    """Where t_sim lies after `blocks` random blocks if the map alone says `similarity`.

    The log-odds do a random walk of variance about 1.5·L/d (`WALK`); `deviations` standard deviations.
    """
    if similarity in (0.0, 1.0):
        return similarity, similarity
    spread = math.exp(deviations * math.sqrt(WALK * blocks / width))
    centre = odds_of(similarity)
    return similarity_of(centre / spread), similarity_of(centre * spread)


def measure_map(
    block: Callable[[Tensor], Tensor], tokens: Tensor, mask: Tensor | None = None, *, large: float = 1e6
) -> OddsMap:
    """ρ and c of a whole block, measured: the diversity alone goes in for c, a dominating mean for ρ.

    tokens (batch, n, d), mask (batch, n) true for real tokens, are taken apart into deviations and mean.
    c is the odds that come out of the deviations alone (s = 0); ρ is how the odds grow at s = `large`, where
    c/s is nothing. Geometric means over the batch: the map acts on log-odds. Use fresh random blocks and
    several sequences; one block's ρ scatters by about √(1.5/d).
    """
    x = TokenMatrix.of(tokens, mask)
    deviations = x.deviations
    scale = (large**0.5 * x.deviation_norm / x.mean_norm)[..., None, None].to(tokens.dtype)
    feed = token_odds(block(deviations), mask)
    grown = token_odds(block(deviations + scale * x.mean.unsqueeze(-2).to(tokens.dtype)), mask)
    return OddsMap(rho=_geometric_mean(grown / large), feed=_geometric_mean(feed))


def _geometric_mean(numbers: Tensor) -> float:
    """Over those that have one: sequences of a single token have no odds. nan if none has."""
    usable = torch.isfinite(numbers) & (numbers > 0)
    return (torch.where(usable, numbers, 1.0).log().sum() / usable.sum()).exp().item()


# --- the causal case ------------------------------------------------------------------------------


def causal_ratio(alpha: float = 1.0, gain: float = 1.0) -> float:
    """ρ∞ = (1 + α²g)/(1 + α²g/4) of uniform causal attention, whose λ₂ is ½: 1.6 at α = 1, t_div ×0.625 per block.

    1 is still the right eigenvector, but the left one is e₁: tokens collapse onto the *first token*, not
    onto their mean.
    """
    a = alpha**2 * gain
    return (1 + a) / (1 + a / 4)


def causal_ramp(n: int) -> Tensor:
    """The diversity that survives longest under uniform causal attention: v_i ∝ i − 1, Pv = v/2; unit norm, (n)."""
    ramp = torch.arange(n, dtype=torch.float64)
    return ramp / ramp.norm() if n > 1 else ramp


def uniform_causal_attention(n: int) -> Tensor:
    """P_ij = 1/i for j ≤ i: what causal softmax tends to as tokens grow alike; (n, n), float64."""
    return torch.ones(n, n, dtype=torch.float64).tril() / torch.arange(1, n + 1, dtype=torch.float64)[:, None]


# --- pre-norm -------------------------------------------------------------------------------------


def pre_norm_odds(
    odds: float, blocks: int, *, attention: float = 1.0, ffn: float = 0.0, energy: float = 1.0
) -> list[float]:
    """The odds after 0..L pre-norm blocks: no single τ_c, and a power of depth instead of an exponential.

    `energy` is the trunk's mean square at the start; every block adds `attention`·t_sim and `ffn` to it
    (eq. 20). Both branches read normed tokens, so the odds are multiplied by 1 + attention/(energy + ffn),
    which tends to 1: s grows like L^(attention/(attention + ffn)).
    """
    found = [odds]
    for _ in range(blocks):
        share = similarity_of(odds)
        odds *= 1 + attention / (energy + ffn)
        energy += attention * share + ffn
        found.append(odds)
    return found


def pre_norm_exponent(attention: float = 1.0, ffn: float = 0.0) -> float:
    """The power of depth with which pre-norm odds grow in the end: attention/(attention + ffn)."""
    return attention / (attention + ffn)
