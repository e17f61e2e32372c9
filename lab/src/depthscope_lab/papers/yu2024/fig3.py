"""Yu & Zhang 2024, Fig. 3: ξ₁/ξ₂ − 1 and r of the attention step against Estimates 1 and 2 and our expectation.

X and P of a block are fixed; only W is drawn again, 1000 times. For Gaussian W this needs no matrices W: ξ₁ and ξ₂
are quadratic forms of a Gaussian, and `redraw` samples their joint law itself, exactly, from about d + 2hn numbers
instead of d².
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from depthscope import drawing
from depthscope.measures import ALIKE, Growth, TokenMatrix, token_similarity
from depthscope.progress import Share
from depthscope.theory import expected_rate, lower_bound, spectral_estimate
from depthscope_lab.papers.simulation.blocks import post_norm_block, root
from depthscope_lab.papers.simulation.randomness import chunks, generators
from depthscope_lab.papers.simulation.weights import Size
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.vocabulary import Claim, axis, judge, line

CHUNK = 100  # draws of W at once: they stay in the processor's cache
CURVES = {  # column suffix: (name, colour, line)
    "mean": ("sample mean", drawing.BLUE, "-"),
    "bound": ("Estimate 1, eq. (16)", drawing.ORANGE, "--"),
    "spectral": ("Estimate 2, eq. (17)", drawing.GREEN, "-."),
    "expected": ("our expectation", drawing.BLACK, ":"),
}


@dataclass(frozen=True)
class Config(Size):
    blocks: int = 20
    trials: int = 1000
    setting: str = "theorem"


@torch.no_grad()
def compute(config: Config, progress: Share) -> pd.DataFrame:
    """One row per block: the sample's mean and standard deviation of ξ₁/ξ₂ − 1 and r, and what predicts them.

    `excess_two_errors` is two standard errors of the mean of ξ₁/ξ₂ − 1.
    """
    sampler, x = config.sampler(config.setting, 1, 0), config.start(1, 1)
    (stream,) = generators((config.seed, 2), 1)
    rows = []
    for block in range(1, config.blocks + 1):
        stations = post_norm_block(sampler.draw(), x, heads=config.heads)
        tokens, p = x[0, 0].double(), stations.attention[0, 0].double()
        xi = redraw(p, tokens, config.trials, stream)
        ratio, similarity, bound = xi.mean / xi.diversity, token_similarity(tokens).item(), lower_bound(p, tokens)
        rates = {"bound": bound.rate, "spectral": spectral_estimate(p, tokens), "expected": expected_rate(p, tokens)}
        excess, sd = (ratio.mean() - 1).item(), ratio.std().item()
        row = {"block": block, "trials": config.trials, "similarity": similarity, "excess_mean": excess}
        # r = 1 + (ξ₁/ξ₂ − 1)t_sim (Prop. 2.3), so r's scatter is the ratio's times t_sim.
        row |= {"excess_sd": sd, "rate_mean": 1 + excess * similarity, "rate_sd": sd * similarity}
        row |= {f"excess_{name}": (rate.item() - 1) / similarity for name, rate in rates.items()}
        row |= {f"rate_{name}": rate.item() for name, rate in rates.items()}
        rows.append(row | {"bound_applies": float(bound.applies)})
        x = stations.output
        progress(block / config.blocks)
    frame = pd.DataFrame(rows)
    return frame.assign(excess_two_errors=2 * frame["excess_sd"] / np.sqrt(frame["trials"]))


def redraw(attention: Tensor, tokens: Tensor, trials: int, stream: np.random.Generator) -> Growth:
    """ξ₁ and ξ₂ of Y = X + [P₁XW₁ … P_hXW_h] for `trials` draws of W ~ N(0, 1/d), in law; (trials).

    P (h, n, n), X (n, d), both float64. Per head, with M = P_kX = RVᵀ (R n × n): MW_k has the law of RG, G n × m
    Gaussian, m = d/h. Let q be the unit vector along R's mean row c, and w = Gᵀq: the mean of Y needs w alone. What is
    left of R's deviations is USV'ᵀ with n − 1 singular values, and ‖Π⊥Y‖² is, given w,
    ‖A + rwᵀ‖² + Σ_i [2 s_i‖b_i‖z_i + s_i²(z_i² + χ²_{m−1})], A = Π⊥X, r = (Π⊥R)q, b_i = (A + rwᵀ)ᵀu_i,
    z_i Gaussian: of the m numbers that meet u_i only the one along b_i counts by itself, the others by their squares.
    """
    x, (h, n), d = TokenMatrix(tokens), attention.shape[:2], tokens.shape[-1]
    m, sigma = d // h, d**-0.5
    rooted = root(attention @ tokens)  # R (h, n, k), k = min(n, d)
    centre = rooted.mean(dim=-2)  # c (h, k)
    basis = torch.linalg.qr(centre.unsqueeze(-1), mode="complete").Q  # q first (h, k, k)
    along = (centre * basis[..., 0]).sum(dim=-1)  # c·q, of either sign (h)
    turned = (rooted - centre.unsqueeze(-2)) @ basis
    r = turned[..., 0]  # (h, n)
    u, s, _ = torch.linalg.svd(turned[..., 1:], full_matrices=False)  # (h, n, k − 1), (h, k − 1)
    own = x.deviations.unflatten(-1, (h, m)).transpose(0, 1)  # A, the columns of each head (h, n, m)

    seen, slope = u.mT @ own, (u.mT @ r.unsqueeze(-1)).squeeze(-1)  # UᵀA (h, k − 1, m), Uᵀr (h, k − 1)
    means, spreads = [], []
    for part in chunks(trials, CHUNK):
        w = sigma * torch.from_numpy(stream.standard_normal((part, h, m)))
        z = sigma * torch.from_numpy(stream.standard_normal((part, h, s.shape[-1])))
        rest = 2 * sigma**2 * torch.from_numpy(stream.standard_gamma((m - 1) / 2, z.shape))  # σ²χ²_{m−1}
        energy = w.square().sum(dim=-1)  # ‖w‖² (part, h)
        means.append((x.mean.unflatten(-1, (h, m)) + along[:, None] * w).square().sum(dim=(-2, -1)) * n)
        shifted = own.square().sum(dim=(-2, -1)) + 2 * (w * (r.unsqueeze(-2) @ own).squeeze(-2)).sum(dim=-1)
        shifted = shifted + r.square().sum(dim=-1) * energy  # ‖A + rwᵀ‖² (part, h)
        cross = (w.transpose(0, 1) @ seen.mT).transpose(0, 1)  # (part, h, k − 1)
        b = (seen.square().sum(dim=-1) + 2 * slope * cross + slope.square() * energy.unsqueeze(-1)).clamp(min=0).sqrt()
        added = (2 * s * b * z + s.square() * (z.square() + rest)).sum(dim=-1)
        spreads.append((shifted + added).sum(dim=-1))
    mean, spread = torch.cat(means), torch.cat(spreads)
    return Growth(mean / x.mean_norm.square(), spread / x.deviation_norm.square())


def draw(frame: pd.DataFrame) -> Any:
    figure, (left, middle, right) = drawing.panels(3, width=3.5, height=3.6)
    by_block = frame.set_index("block")
    line(left, by_block["similarity"], drawing.BLUE, "t_sim of the block's input")
    for ax, quantity, band, meaning in (
        (middle, "excess", "excess_two_errors", "± 2 standard errors"),
        (right, "rate", "rate_sd", "± 1 s.d. of the draws"),
    ):
        for suffix, (name, colour, dashes) in CURVES.items():
            of_draws = {"name": f"{name} {meaning}", "spread": by_block[band]} if suffix == "mean" else {"name": name}
            line(ax, by_block[f"{quantity}_{suffix}"], colour, linestyle=dashes, **of_draws)
    last = by_block.index[-1]
    axis(left, "Token similarity", "block", "t_sim(X)", ylim=(0, 1.03), last=last)
    axis(middle, "Attention step, only W redrawn", "block", "ξ₁/ξ₂ − 1", last=last)
    axis(right, "The rate r(X, Y)", "block", "r", last=last)
    drawing.legend_below([left, middle, right], columns=1)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    error = {name: (frame[f"excess_{name}"] - frame["excess_mean"]).abs() for name in ("bound", "spectral")}
    early = frame["similarity"] < ALIKE
    bound, spectral = (error[name][early].mean() for name in ("bound", "spectral"))
    standard_error = frame["excess_sd"] / np.sqrt(frame["trials"])
    below = (frame["excess_mean"] - frame["excess_bound"]) / standard_error
    z = (frame["excess_mean"] - frame["excess_expected"]) / standard_error
    rms = np.sqrt((z**2).mean())
    limit = np.sqrt(1 + 3.5 * np.sqrt(2 / len(frame)))
    return [
        judge(
            "Estimate 2 (17) is closer to the sample mean than Estimate 1 (16)",
            "§2.4: Estimate 2 “actually provides a closer approximation … than the guaranteed lower bound”",
            f"mean |error| of ξ₁/ξ₂ − 1 while t_sim < {ALIKE:g}: {spectral:.4f} against {bound:.4f}",
            f"the smaller mean error, over blocks with t_sim < {ALIKE:g}; later both tend to 1",
            spectral < bound,
        ),
        judge(
            "Estimate 1 (16) is below the sample mean",
            "Thm 2.6: E[r] ≥ the right-hand side of (16)",
            f"mean − bound is {below.min():.1f} standard errors at least; conditions hold at "
            f"{int(frame['bound_applies'].sum())} of {len(frame)} blocks",
            "above −3.5 standard errors of the sample mean at every block: in the collapse the two coincide",
            (below > -3.5).all() and (frame["bound_applies"] == 1).all(),
        ),
        judge(
            "our expectation, with E[η] to second order, is the sample mean",
            "ours; the paper only says that E[η] is small",
            f"root mean square of (mean − expected)/standard error {rms:.2f}; largest {z.abs().max():.2f}",
            f"{limit:.2f}: 3.5 standard deviations above 1, for {len(frame)} blocks, if the mean is right",
            rms < limit,
            f"{config.trials} draws of W per block; standard error {standard_error.mean():.4f}",
        ),
    ]


STUDY = Study("yu2024-fig3", Config(), Config(tokens=32, width=128, heads=4, trials=300), compute, draw, claims)
