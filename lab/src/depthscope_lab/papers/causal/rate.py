"""Causal post-norm blocks collapse too, at another rate, onto another token, in another shape. Ours.

Yu & Zhang 2024 treat attention that sees all tokens. Causal attention keeps 1 as right eigenvector, but its
left one is e₁: tokens tend to the *first token*; λ₂ is ½ instead of 0, so t_div shrinks by
(1 + α²/4)/(1 + α²) per block, .625 at α = 1; what survives is a ramp in position; and δ > 1, so that their
Thm 2.6 does not apply. Float64, all cases through the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from depthscope.drawing import BLACK, BLUE, GREY, ORANGE, VERMILION, legend_below, panels
from depthscope.measures import TokenMatrix, delta, token_diversity
from depthscope.progress import Share
from depthscope.theory import asymptotic_rate, causal_ramp, causal_ratio, uniform_causal_attention
from depthscope_lab.papers.simulation.blocks import attend, attention_half, ffn_half
from depthscope_lab.papers.simulation.collapse_rate import allowed, walk
from depthscope_lab.papers.simulation.size import Size
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.vocabulary import Claim, axis, curve, judge, line, rows, table

CHUNK = 16  # trials at a time: their weights are 0.1 GB at width 256
LOCAL, FLOOR = 1e-4, 1e-27  # the fit's window: nearly equal tokens, well above float64's rounding
CASES = ("causal", "causal + FFN", "bidirectional")
_LOOKS: tuple[tuple[str, dict[str, Any]], ...] = (
    (BLUE, {"linewidth": 2.4}),
    (BLACK, {"linewidth": 1.0, "linestyle": ":"}),
    (VERMILION, {"linewidth": 1.5}),
)


@dataclass(frozen=True)
class Config(Size):
    trials: int = 8
    depth: int = 140
    width: int = 256
    lengths: tuple[int, ...] = (2, 4, 8, 16, 17, 32, 64, 128, 256, 512, 1024)  # n of the curve of δ


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows: case, block, trial, token (of the profile), n (of δ's curve), measure, value; −1 where none.

    After what was measured stand the curves of `_curves`.

    Every case has two streams with the same first token and other tokens after it: `strangers` is how far
    apart they are, ‖X − X′‖²/‖X‖², and goes to 0 only if the first token decides everything.
    """
    frames = []
    for part, trials in (parts := config.parts(CHUNK)):
        sampler = config.sampler("theorem", trials, 11, part, 0, dtype=torch.float64)
        streams = [config.start(trials, 11, part, stream, dtype=torch.float64) for stream in (1, 2)]
        start = torch.cat(streams, dim=1)  # (trials, 2, n, d)
        start[:, 1, 0] = start[:, 0, 0]
        tokens = dict.fromkeys(CASES, start)
        for block in range(config.depth + 1):
            weights = sampler.draw()
            for case, x in tokens.items():
                if block > 0:
                    x = attention_half(weights, x, heads=config.heads, causal=case != "bidirectional")
                    tokens[case] = x = ffn_half(weights, x) if case == "causal + FFN" else x
                frames.append(_tidy(case, block, part, _measure(x)))
            progress((part + block / config.depth) / len(parts))
        _, p = attend(weights, tokens["causal"][:, :1], config.heads, causal=True)
        frames.append(_tidy("causal", config.depth, part, {"delta": delta(p).mean(dim=(-2, -1))}))
        frames.append(_profile(tokens["causal"][:, 0], config.depth))
    lengths = [delta(uniform_causal_attention(n)).item() for n in config.lengths]
    frames.append(pd.DataFrame({"case": "uniform causal", "n": config.lengths, "measure": "delta", "value": lengths}))
    frame = pd.concat(frames, ignore_index=True)
    frame = pd.concat([frame, *_curves(frame, config.tokens)], ignore_index=True)
    for column in ("block", "trial", "token", "n"):
        frame[column] = frame[column].fillna(-1).astype(int)
    return frame


def _curves(frame: pd.DataFrame, tokens: int) -> Iterator[pd.DataFrame]:
    """What the picture shows besides: `mean_…`, geometric means over trials by block, and the ramp (i − 1)/(n − 1)."""
    for case, measure in (*((case, "diversity") for case in CASES), ("causal", "strangers")):
        mean = _mean(frame, case, measure)
        yield pd.DataFrame({"case": case, "block": mean.index, "measure": f"mean_{measure}", "value": mean.to_numpy()})
    places = np.arange(1, tokens + 1)
    ramp = (places - 1) / (tokens - 1)
    yield pd.DataFrame({"case": "linear ramp", "token": places, "measure": "linear_ramp", "value": ramp})


def _measure(x: Tensor) -> dict[str, Tensor]:
    """Of the two streams (trials, 2, n, d): (trials) each."""
    first, other = x[:, 0], x[:, 1]
    tokens = TokenMatrix(first)
    ramp = causal_ramp(x.shape[-2])
    ramp = (ramp - ramp.mean()) / torch.linalg.vector_norm(ramp - ramp.mean())
    along = torch.linalg.vector_norm(ramp @ tokens.deviations, dim=-1)  # (n) × (trials, n, d) → (trials)
    strangers = torch.linalg.vector_norm(first - other, dim=(-2, -1)) / tokens.norm
    return {
        "diversity": token_diversity(tokens),
        "ramp_cosine": along / tokens.deviation_norm,
        "strangers": strangers.square(),
    }


def _tidy(case: str, block: int, part: int, found: dict[str, Tensor]) -> pd.DataFrame:
    trials = range(part * CHUNK, part * CHUNK + len(next(iter(found.values()))))
    return table(found, case=[case], block=[block], trial=trials).melt(["case", "block", "trial"], var_name="measure")


def _profile(x: Tensor, depth: int) -> pd.DataFrame:
    """‖x_i − x₁‖ over its largest, per token, mean over trials."""
    distance = torch.linalg.vector_norm(x - x[:, :1], dim=-1)  # (trials, n)
    shape = (distance / distance.amax(dim=-1, keepdim=True)).mean(dim=0).numpy()
    about = {"case": "causal", "block": depth, "token": np.arange(1, len(shape) + 1)}
    return pd.DataFrame({**about, "measure": "distance_to_first", "value": shape})


def rates(frame: pd.DataFrame, case: str) -> np.ndarray[Any, Any]:
    """exp(slope of log t_div) per trial, over the second half of the window: the mode of λ = ⅓ dies slowly."""
    own = rows(frame, case=case, measure="diversity")
    found = []
    for _, trial in own[(own["value"] < LOCAL) & (own["value"] > FLOOR)].groupby("trial"):
        late = trial.sort_values("block").iloc[len(trial) // 2 :]
        if len(late) >= 8:
            found.append(np.exp(np.polyfit(late["block"], np.log(late["value"]), 1)[0]))
    return np.array(found)


def draw(frame: pd.DataFrame) -> Any:
    figure, (fall, shape, gap) = panels(3, width=3.7, height=3.9)
    for case, (colour, look) in zip(CASES, _LOOKS, strict=True):
        mean = curve(frame, case=case, measure="mean_diversity")
        line(fall, mean[mean > FLOOR / 1e4], colour, case, **look)
    strangers = curve(frame, case="causal", measure="mean_strangers")
    line(fall, strangers, ORANGE, "causal, same first token", linewidth=1.2, linestyle="--")
    profile = curve(frame, by="token", measure="distance_to_first")
    line(shape, profile, BLUE, f"block {int(frame['block'].max())}")
    line(shape, curve(frame, by="token", case="linear ramp"), BLACK, "linear ramp", linewidth=1.0, linestyle=":")
    lengths = curve(frame, by="n", case="uniform causal")
    line(gap, lengths, BLUE, "uniform causal P", marker="o", markersize=4, linewidth=1.2)
    gap.axhline(1, color=GREY, linewidth=1, linestyle="--", label="Thm 2.6 needs δ < 1")
    gap.set_xscale("log", base=2)
    axis(fall, "Diversity, and two texts apart", "block", "t_div; ‖X − X′‖²/‖X‖²", log=True, xlim=(0, None))
    axis(shape, "What survives", "token i", "‖x_i − x₁‖, largest = 1", ylim=(0, None))
    axis(gap, "δ against length", "tokens n", "δ")
    legend_below(fall, columns=2)
    legend_below([shape, gap], columns=1)
    return figure


def _mean(frame: pd.DataFrame, case: str, measure: str) -> pd.Series:
    """Geometric mean over trials, per block."""
    own = rows(frame, case=case, measure=measure)
    own = own[own["value"] > 0]
    return np.exp(np.log(own["value"]).groupby(own["block"]).mean())


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    causal, fed, both = (rates(frame, case) for case in CASES)
    one_mode = walk(1.0, config.width) + walk(0.5, config.width)  # of the first token, and of the ramp (α λ₂ = ½)
    blocks = config.depth // 3  # about half of the window
    near = 0.01 + allowed(one_mode, blocks, config.trials)
    near_both = allowed(walk(1.0, config.width), blocks, config.trials)
    cosine = _mean(frame, "causal", "ramp_cosine")
    same_first, everyone = (_mean(frame, case, "strangers").iloc[-1] for case in ("causal", "bidirectional"))
    lengths = curve(frame, by="n", case="uniform causal")
    measured = rows(frame, case="causal", measure="delta")["value"].mean()
    known = {n: value for n, value in {64: 1.24, 1024: 1.55}.items() if n in lengths}  # by svdvals of the same
    return [
        judge(
            "t_div shrinks by .625 per causal block, ρ∞ = 1.6",
            "not in the paper; ours: (1 + α²/4)/(1 + α²), λ₂ = ½",
            _say(causal) + (f"; ρ {1 / causal.mean():.3f}" if len(causal) else ""),
            f"{near:.1%}: 3 standard errors of the walk at this width, and 1 % for the mode of λ = ⅓",
            _near(causal, 1 / causal_ratio(), near),
        ),
        judge(
            "with the FFN, too, t_div shrinks by the factor .625 per causal block",
            "not in the paper; “Other Steps Do Not Impact TSE” (§2.3)",
            _say(fed),
            f"{1.5 * near:.1%}: the FFN adds a scatter of its own",
            _near(fed, 1 / causal_ratio(), 1.5 * near),
        ),
        judge(
            "without the causal mask, t_div halves in every block of the same weights",
            "“The asymptotical rate of convergence reaches 1/2 when α = 1” (§2.5)",
            _say(both),
            f"{near_both:.1%}: 3 standard errors of the walk at this width, and its half variance",
            _near(both, asymptotic_rate(), near_both),
        ),
        judge(
            "tokens of causal blocks collapse onto the first token",
            "not in the paper; ours: the left eigenvector is e₁",
            f"two texts with the same first token end {same_first:.0e} apart if causal, {everyone:.2g} if not",
            "below 1e-6, and the other a thousand times more: ‖X − X′‖²/‖X‖², 2 for unrelated texts",
            same_first < 1e-6 and everyone > 1e3 * same_first,
        ),
        judge(
            "the diversity that survives causal blocks is a linear ramp in position",
            "not in the paper; ours: P(i − 1) = ½(i − 1)",
            f"cosine with the ramp {cosine.iloc[0]:.3f} at block 0, {cosine.iloc[-1]:.4f} at block {config.depth}",
            "0.99; random tokens have 1/√n, 0.12 at n = 64",
            cosine.iloc[-1] > 0.99,
            when=config.depth >= 80,
        ),
        judge(
            "δ of causal attention exceeds 1, so Thm 2.6 does not apply",
            "Thm 2.6 asks for ω + δ < 1",
            ", ".join(f"{lengths[n]:.3f} at n = {n}" for n in known)
            + f"; {measured:.3f} in the last block, n = {config.tokens}",
            "above 1 from n = 17 on; 0.01 of 1.24 (n = 64) and 1.55 (n = 1024), found by SVD",
            all(abs(lengths[n] - v) < 0.01 for n, v in known.items()) and (lengths[lengths.index >= 17] > 1).all(),
        ),
    ]


def _say(found: np.ndarray[Any, Any]) -> str:
    if len(found) < 2:
        return "not reached"
    return f"{found.mean():.4f} ± {found.std(ddof=1) / len(found) ** 0.5:.4f}"


def _near(found: np.ndarray[Any, Any], wanted: float, tolerance: float) -> bool | None:
    return bool(abs(found.mean() / wanted - 1) < tolerance) if len(found) >= 2 else None


QUICK = Config(trials=3, depth=100, tokens=16, width=64, heads=4, lengths=(2, 16, 17, 64))
STUDY = Study("causal-rate", Config(), QUICK, compute, draw, claims)
