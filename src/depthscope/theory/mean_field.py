"""Both exponents in closed form, as functions of the branch weight α, the de-escalation τ, and depth. Ours.

For **random weights**, many features, nearly uniform attention, and a ReLU FFN. All that is followed through a block
are energies per token: m of the mean over tokens, v of the deviations from it (t_sim = m/(m + v)), and backwards the
same two of the gradient. With A = α²g_a, a = α²g_f (`Gains`), n tokens, s the scores' variance and κ the kernel of
ReLU:

    attention   m → (1 + A)m + α²b_a                     uniform attention carries the mean, and little else:
                v → (1 + Aε)v,  ε = (e^(s·e·v) − 1)/n     e = m + v: what attention reads
    FFN         m + v → (1 + a)(m + v),  cos → (cos + aκ(cos))/(1 + a) between two tokens
    norm        divides by m + v;   de-escalation: m → (1 − τ)²m
    backwards   the norm divides by m + v too. Of the gradient, attention carries the mean by 1 + A and deviations by
                1 + Aν, ν = ε + s·e^(s·e·v)·(v² + e·v)/n (values; queries; keys); the FFN by 1 + a, and of the mean
                the share κ′(cos) stays a mean; de-escalation: (1 − τ)² of the mean, all of the deviations.

So in post-norm the gradient grows where de-escalation takes away what the FFN (κ(0) = 1/π: ReLU's mean) has put into
the mean: the next norm makes up for it, forwards for the tokens and backwards for the gradient. At τ = 1, many
tokens: e^(2λ_g) = 1/(1 − κ(0)·a/(1 + a)), and the collapse is undone in one step. At τ = 0 the collapse goes on with
e^(−2λ_t) = ρ = 1 + A, and the gradient neither grows nor shrinks (λ_g = 0): it is the gradient of one token. In
pre-norm every branch weighs α²/(m + v) of a trunk that grows with depth, and both are powers of depth, not
exponentials.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from depthscope.theory.odds import OddsMap, odds_of

Placement = Literal["post", "pre"]
GROWTH = 10.0  # by how much the gradient may grow or shrink over the whole depth; `remedies.recommend` allows the same
LEVEL = 0.1  # the similarity to hold: of the least that `level_to_hold` asks for


@dataclass(frozen=True)
class Gains:
    """What the branches of a block do to the energy of tokens of mean square 1, at α = 1.

    A matrix of independent elements of variance σ² has the gain fan_in·σ²: 1/3 as `nn.Linear` draws it, 1 for Xavier's
    square ones, 2 for He's.
    """

    attention: float = 1.0  # g_a: gain of W_V times gain of W_O
    ffn: float = 0.5  # g_f: half (ReLU) the product of the gains of its two matrices
    score: float = 1.0  # s: variance of the scores, the product of the gains of W_Q and W_K
    attention_bias: float = 0.0  # b_a: energy that biases add, the same in all tokens
    ffn_bias: float = 0.0  # b_f
    tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("attention", "ffn", "score", "attention_bias", "ffn_bias"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"expected {name}, an energy, to be finite and at least 0, got {value}")
        if not isinstance(self.tokens, int) or self.tokens < 1:
            raise ValueError(f"expected a whole number of tokens, at least 1, got {self.tokens}")

    @staticmethod
    def of_linear(width: int, ffn_width: int, tokens: int) -> Gains:
        """Everything as `nn.Linear` draws it: gain 1/3, biases of variance 1/(3·fan_in)."""
        third = 1 / 3
        return Gains(
            attention=third**2,
            ffn=third**2 / 2,
            score=third**2,
            attention_bias=third**2 / width + third / width,
            ffn_bias=third / ffn_width,
            tokens=tokens,
        )

    @staticmethod
    def of_odds(odds: OddsMap, tokens: int) -> Gains:
        """Gains whose odds map is this one, as it is measured in a model: g_a from ρ, g_f from c. Biases are in both.

        An FFN of any size brings c to 1/(π − 1) = .47 at most; for more, and for ρ below 1, there are no such gains.
        """
        if not odds.rho >= 1 or not odds.feed >= 0 or tokens < 2:
            raise ValueError(f"expected ρ ≥ 1, c ≥ 0 and two tokens at least, got {odds.rho}, {odds.feed}, {tokens}")

        def gains(share: float) -> Gains:  # of what an FFN adds to all that leaves it
            return Gains(attention=odds.rho - 1, ffn=share / (1 - share), tokens=tokens)

        most = 1 - 1e-9
        share = most * _least(lambda part: gains(most * part).odds_map().feed >= odds.feed)
        if not math.isclose(gains(share).odds_map().feed, odds.feed, rel_tol=1e-6, abs_tol=1e-8):
            raise ValueError(f"expected c that a ReLU FFN can bring about, got {odds.feed:.3g} for {tokens} tokens")
        return gains(share)

    def odds_map(self, alpha: float = 1.0) -> OddsMap:
        """ρ and c of `theory.odds`: ρ = (1 + A + α²b_a)(1 + a + α²b_f)/(1 + a), c what deviations alone bring about."""
        if self.tokens == 1:
            raise ValueError("a single token has no odds, as it is its own mean: expected at least 2 tokens")
        weight = alpha**2
        a = weight * self.ffn
        rho = (1 + weight * (self.attention + self.attention_bias)) * (1 + a + weight * self.ffn_bias) / (1 + a)
        (mean, deviations), _ = _through(0.0, 1.0, alpha, self, "post")
        return OddsMap(rho, mean / deviations)


@dataclass(frozen=True)
class Course:
    """What is expected block by block: t_sim after each block and its de-escalation, λ_g and λ_t of each block."""

    similarity: tuple[float, ...]
    gradient: tuple[float, ...]
    odds: tuple[float, ...]  # t_sim/t_div; infinite where nothing is left of the deviations
    tokens: tuple[float, ...]  # λ_t: of tokens that are nearly equal, wherever those at the entrance are

    @property
    def growth(self) -> float:
        """ln of the factor by which the gradient grows from the end of the last block to the input of the first."""
        return math.fsum(self.gradient)


def course(
    depth: int,
    alpha: float = 1.0,
    tau: float = 0.0,
    gains: Gains = Gains(),
    *,
    placement: Placement = "post",
    similarity: float | None = None,
    energy: float = 1.0,
) -> Course:
    """Tokens forwards and a random gradient backwards through `depth` blocks, each with τ at its end.

    `similarity` is that of the tokens at the entrance, by default 1/n (unrelated tokens); `energy` their mean square,
    which matters in pre-norm. λ_t is infinite at τ = 1, where nothing is left of the mean, and nan of a single token,
    which differs from no other. Refused are τ = 1 on equal tokens, of which it leaves nothing, and scores that vary so
    much that uniform attention is no approximation (`_attention`).
    """
    if not isinstance(depth, int) or depth < 1 or not 0 <= tau <= 1 or not 0 <= alpha < math.inf:
        raise ValueError(f"expected whole depth ≥ 1, finite α ≥ 0 and τ in [0, 1], got {depth}, {alpha}, {tau}")
    if similarity is not None and not 0 <= similarity <= 1:
        raise ValueError(f"expected similarity in [0, 1], got {similarity}")
    if placement not in get_args(Placement):  # another word would be taken for one of them
        raise ValueError(f"expected placement to be one of {', '.join(get_args(Placement))}, got {placement!r}")
    if not 0 < energy < math.inf:
        raise ValueError(f"expected tokens of a finite energy above 0, got {energy}")
    entrance = 1 / gains.tokens if similarity is None else similarity
    mean, deviations = energy * entrance, energy * (1 - entrance)
    shares, odds, back = [], [], []
    for _ in range(depth):
        (mean, deviations), backward = _through(mean, deviations, alpha, gains, placement)
        mean *= (1 - tau) ** 2
        if not mean + deviations > 0:
            raise ValueError("τ = 1 leaves nothing of tokens that are all equal: expected τ below 1, or other tokens")
        back.append(backward)
        shares.append(mean / (mean + deviations))
        odds.append(mean / deviations if deviations > 0 else math.inf)
    mean, deviations = 1 / gains.tokens, 1 - 1 / gains.tokens  # of a random gradient
    logs = []
    for of_mean, of_deviations, spread in reversed(back):
        mean *= (1 - tau) ** 2
        mean, deviations = of_mean * mean, of_deviations * deviations + spread * mean
        total = mean + deviations  # what was 1 after the block
        logs.append(0.5 * math.log(total))
        mean, deviations = mean / total, deviations / total
    # λ_t = −½ ln of what a block multiplies the odds of nearly equal tokens by; in post-norm −½ ln((1 − τ)²ρ).
    of_tokens, mean, apart = [math.nan if gains.tokens == 1 else math.inf], energy, 1e-12  # apart: deviations' share
    for _ in range(depth if gains.tokens > 1 else 0):
        (after, moved), _ = _through(mean, mean * apart, alpha, gains, placement)
        before, mean = mean, after * (1 - tau) ** 2
        if mean == 0:
            break
        of_tokens.append(-0.5 * math.log(mean / moved * apart))
        if math.isclose(mean, before):  # as in post-norm from block 2 on: what follows is the same again
            break
    of_tokens = [*of_tokens[1:], *of_tokens[-1:] * (depth - len(of_tokens) + 1)]
    return Course(tuple(shares), tuple(reversed(logs)), tuple(odds), tuple(of_tokens))


def relu_kernel(gap: float) -> float:
    """1 − κ(1 − gap), κ(c) = (√(1 − c²) + c(π − arccos c))/π: 1 − cos after a ReLU layer (Cho & Saul 2009).

    As a function of 1 − cos, so that it is right in the collapse; 1 − 1/π at 1, unrelated tokens.
    """
    angle = _angle(gap)
    small = angle < 1e-2  # where sin θ − θ cos θ would cancel
    bent = angle**3 / 3 - angle**5 / 30 if small else math.sin(angle) - angle * math.cos(angle)
    return gap - bent / math.pi


def relu_slope(gap: float) -> float:
    """κ′ at cos = 1 − gap, which is 1 − θ/π: the share of units that are on in both of two tokens, doubled; ½ at 1."""
    return 1 - _angle(gap) / math.pi


def _angle(gap: float) -> float:
    return 2 * math.asin(math.sqrt(min(max(gap, 0.0), 2.0) / 2))


def _through(
    m: float, v: float, alpha: float, gains: Gains, placement: Placement
) -> tuple[tuple[float, float], tuple[float, float, float]]:
    """The energies of mean and deviations after a block, and what it multiplies those of the gradient by: of the mean,
    of deviations, and from the mean into deviations.

    ε + 1/n is the sum of the squares of a token's attention to others, which cannot be above 1. Where it would be,
    attention looks at single tokens, and what is said here of nearly uniform attention is refused.
    """
    n, s, weight, post = gains.tokens, gains.score, alpha**2, placement == "post"
    first = 1.0 if post else m + v  # attention reads the tokens over the root of it
    e, apart = (m + v) / first, v / first
    if s * e * apart > math.log1p(n):
        raise ValueError(
            f"expected nearly uniform attention, but scores of variance {s * e * apart:.3g} among {n} tokens single "
            f"some out: expected at most ln(n + 1) = {math.log1p(n):.3g}; take a smaller score or energy, more tokens"
        )
    growth = math.exp(s * e * apart)
    forwards = (growth - 1) / n  # ε
    back = forwards + s * growth * (apart * apart + e * apart) / n  # ν
    carried = weight * gains.attention / first
    m, v = m + carried * m + weight * gains.attention_bias, v + carried * forwards * v
    second = m + v
    trunk = 1.0 if post else second  # that the FFN adds to, after the first norm of post-norm
    gap = n / (n - 1) * v / second if n > 1 else 0.0  # 1 − cos of two tokens: t_sim counts each with itself too
    a, slope = weight * gains.ffn, relu_slope(gap)
    whole = trunk + a + weight * gains.ffn_bias
    v = (n - 1) / n * (trunk * gap + a * relu_kernel(gap))
    norm = whole if post else 1.0
    scale, a = (1 / (second * whole) if post else 1.0), a / trunk
    backward = (
        (1 + carried) * (1 + a * slope) * scale,
        (1 + carried * back) * (1 + a) * scale,
        (1 + carried * back) * a * (1 - slope) * scale,
    )
    return ((whole - v) / norm, v / norm), backward


# --- the prescription -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prescription:
    """α and τ for a depth, and what they lead to."""

    alpha: float
    tau: float
    similarity: float  # after the last block
    growth: float  # factor by which the gradient grows over the whole depth

    def __iter__(self) -> Iterator[float]:
        """`alpha, tau = prescribe(100)`."""
        return iter((self.alpha, self.tau))


def prescribe(
    depth: int,
    gains: Gains = Gains(),
    *,
    placement: Placement = "post",
    level: float = LEVEL,
    growth: float = GROWTH,
    energy: float = 1.0,
) -> Prescription:
    """The branch weight α and the de-escalation τ that keep both factors near 1 over `depth` blocks.

    τ holds t_sim at `level` after the last block, at α = 1; 0 if it stays below by itself. In post-norm it is that of
    the odds map's fixed point, whatever the depth: tokens grow neither alike nor apart there (t_sim up to 0.12 for the
    default, as the kernel bends). In pre-norm it is the least; t_sim is higher in the first blocks, where the branches
    weigh most. Of n tokens a level below 1/n, that of unrelated ones, counts as 1/n, but for post-norm's τ. α is the
    greatest, at most 1, with which the gradient grows by at most `growth` over the whole depth; if it must be below 1,
    it is taken so that the gradient grows by √growth, well inside. τ is not lowered for a small α, although the odds
    would allow it: training makes the collapse that such a model does not have when it is new.
    `depthscope.remedies.recommend` asks for it with the ρ and c that it has measured (`Gains.of_odds`), tries α on the
    model, and mends it where the measured gradient says otherwise.
    """
    if not isinstance(depth, int) or depth < 1 or not 0 < level < 1 or not growth > 1:
        raise ValueError(f"expected whole depth ≥ 1, a level in (0, 1) and growth > 1, got {depth}, {level}, {growth}")

    def run(alpha: float, tau: float) -> Course:
        return course(depth, alpha, tau, gains, placement=placement, energy=energy)

    def held(tau: float) -> bool:
        return run(1.0, tau).similarity[-1] <= max(level, 1 / gains.tokens) * (1 + 1e-9)

    if held(0.0):
        tau = 0.0
    elif placement == "post":  # where the odds settle, whatever the depth
        tau = gains.odds_map().tau_for(odds_of(level))
    else:
        tau = _least(held)
    alpha = 1.0
    if abs(run(1.0, tau).growth) > math.log(growth):
        alpha = 1 - _least(lambda less: abs(run(1 - less, tau).growth) <= math.log(growth) / 2)
        if alpha == 0:  # such a model would be new for ever: it has no branches
            raise ValueError(
                f"no α above 0 keeps the gradient's growth over {depth} blocks with τ = {tau:.3g} within √{growth:g}: "
                "allow more growth, or start with smaller weights"
            )
    reached = run(alpha, tau)
    return Prescription(alpha, tau, reached.similarity[-1], math.exp(reached.growth))


def _least(holds: Callable[[float], bool], steps: int = 30) -> float:
    """The least number in [0, 1] for which it holds, if it holds from there on."""
    low, high = 0.0, 1.0
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
