"""How fast attention makes tokens equal, measured: the exponent 3 per layer of Dong et al. 2021, and what changes it.

Thm 2.2 and 2.3 bound the residual e of a pure attention network by e' ≤ c·e³ in every layer. The paper's plots, in
float32, end at 1e-7 of the tokens after two layers; here the residual is carried by itself (`theory.residuals`) down
to 1e-290. §3.3 says that layer normalisation plays no role, Claim 3.1 that skip connections stop the collapse,
Cor. 3.2 that an MLP slows it by its Lipschitz constant λ.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
import torch

from depthscope.drawing import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, legend_below, panels
from depthscope.measures import composite_norm
from depthscope.progress import Share
from depthscope.theory.collapse import LARGEST_RANGE
from depthscope_lab.papers.dong2021.exponent_networks import (
    CASES,
    FLOOR,
    ROUNDED,
    critical_residual,
    first_tokens,
    follow,
    layers,
    layers_until_ended,
    promised_residual,
    rounded,
)
from depthscope_lab.papers.simulation.collapse_rate import allowed
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.vocabulary import Claim, Work, axis, curve, judge, line, rows, table

_LOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    "one head": (BLUE, {"linewidth": 3.0}),
    "several heads": (SKY, {}),
    "LN": (GREEN, {"linestyle": "--"}),
    "MLP": (ORANGE, {}),
    "skip": (PURPLE, {}),
    "skip, LN": (VERMILION, {}),
    "causal": (BLACK, {}),
}
_ROUNDED_LOOKS = {case: (GREY, {"linestyle": dashes}) for case, dashes in zip(ROUNDED, ("-", "--"), strict=True)}


@dataclass(frozen=True)
class Config:
    seed: int = 0
    trials: int = 8
    tokens: int = 32
    width: int = 64
    heads: int = 4
    depth: int = 60  # of the cases that do not end before
    gains: tuple[float, ...] = tuple(4.0**power for power in range(9))  # g of the MLPs
    mlp_depth: int = 24


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows of three parts, with nan where a column has no meaning.

    `depth`: case, trial, layer, the columns of `follow`, and digits: to how many the tokens are equal, −log₁₀ of the
    relative residual. `mlp`: trial, gain, layers (until the residual is below 1e-100; nan: never), never (the depth
    that was tried in vain). `critical`: the same, with the residual of the first tokens, the critical one, the one
    promised by Cor. 3.2, and fitted (the line through the means).
    """
    size: dict[str, Any] = {"trials": config.trials, "width": config.width, "heads": config.heads}
    size["seed"] = (config.seed, 15, 0)
    start = first_tokens(config.trials, config.tokens, config.width, (config.seed, 15, 1))
    work, frames = Work(len(CASES) + len(ROUNDED) + 2, progress), []
    for case in CASES:
        frames.append(follow(case, start, layers(**size), config.depth))
        work()
    for case, dtype in ROUNDED.items():
        relative = rounded(start.tokens.to(dtype), layers(**size), 8)
        frame = table({"relative": relative}, layer=range(len(relative)), trial=range(config.trials))
        frames.append(frame.assign(part="depth", case=case))
        work()
    frames = [frame.assign(digits=-np.log10(frame["relative"].where(frame["relative"] > 0))) for frame in frames]
    stack = list(islice(layers(**size), config.mlp_depth))
    gains = torch.tensor(config.gains, dtype=torch.float64)
    grid = {"trial": range(config.trials), "gain": config.gains}
    frame = table({"layers": layers_until_ended(start, stack, gains)}, **grid)
    never = np.where(frame["layers"].isna(), float(config.mlp_depth), np.nan)
    frames.append(frame.assign(part="mlp", case="sin(g·)", never=never))
    work()
    found = {
        "residual": composite_norm(start.residual).unsqueeze(-1).expand(-1, len(gains)),
        "critical": critical_residual(start, stack[: config.mlp_depth // 2], gains),
        "promised": promised_residual(stack[0], gains, config.tokens),
    }
    frame = table(found, **grid).assign(part="critical", case="sin(g·)")
    frames.append(frame.assign(fitted=_line(frame)))
    work()
    return pd.concat(frames, ignore_index=True)


def _line(frame: pd.DataFrame) -> np.ndarray:
    """The critical residual by least squares in logarithms.

    Over the gains where every trial has one, on average below a third of the first tokens' residual: the law is one of
    small residuals.
    """
    logs = np.log(frame["critical"]).groupby(frame["gain"]).agg(lambda values: values.mean(skipna=False))
    known = logs[logs < np.log(frame["residual"].mean() / 3)]  # nan is not
    if len(known) < 2:
        return np.full(len(frame), np.nan)
    slope, height = np.polyfit(np.log(known.index), known, 1)
    fitted = np.exp(height + slope * np.log(frame["gain"].to_numpy()))
    return np.where(frame["gain"].isin(known.index), fitted, np.nan)


def draw(frame: pd.DataFrame) -> Any:
    figure, (fall, order, until, critical) = panels(2, 2, width=4.9, height=4.1)
    depth = rows(frame, part="depth")
    for case, (colour, look) in {**_LOOKS, **_ROUNDED_LOOKS}.items():
        line(fall, rows(depth, case=case).groupby("layer")["digits"].median(), colour, case, **look)
        if case in _LOOKS:
            line(order, curve(depth, "order", by="layer", case=case), colour, **look)
    own = rows(frame, part="mlp")
    line(until, curve(own, "layers", by="gain"), BLUE, "sin(g·)", marker="o", markersize=4, linewidth=1.2)
    until.plot(own["gain"], own["never"], "x", color=BLUE, markersize=5, label="not in so many")
    own = rows(frame, part="critical")
    critical.plot(own["gain"], own["critical"], "o", color=BLUE, markersize=3, label="sin(g·): collapse below")
    line(critical, curve(own, "fitted", by="gain"), BLUE, "least squares", linewidth=1)
    line(critical, curve(own, "promised", by="gain"), GREY, "promised by Cor. 3.2", linewidth=1.2, linestyle="--")
    critical.axhline(float(own["residual"].mean()), color=BLACK, linewidth=1, linestyle=":", label="N(0, 1) tokens")
    for ax in (until, critical):
        ax.set_xscale("log", base=4)
    title, y = "Digits to which the tokens are equal", "−log₁₀ ‖res(X)‖/‖X‖, median over trials"
    axis(fall, title, "layer", y, log=True, ylim=(0.2, 400), first=0, last=16)
    title = "Order p of the next layer: e' ∝ e^p"
    axis(order, title, "layer", "p, mean over trials", ylim=(-0.2, 3.6), first=0, last=16)
    gain = "gain g of the MLP: λ ∝ g"
    axis(until, "Layers to a residual of 1e-100", gain, "layers", ylim=(0, None))
    axis(critical, "Where the MLP stops the collapse", gain, "‖res(X)‖ of the first tokens", log=True)
    legend_below(fall, columns=3)
    legend_below([until, critical], columns=2)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    depth = rows(frame, part="depth")
    pure = depth[depth["after"] > FLOOR]  # what float64 can hold
    cubes, held = pure[pure["residual"] < 1e-3], pure[pure["largest_range"] <= LARGEST_RANGE]
    off = (cubes["order"] - 3).abs().max()
    above = int((np.log(held["after"]) > held["log_bound"]).sum())
    start, end = rows(pure, layer=0, case="several heads"), _end(depth, "several heads", "residual").max()

    def median(case: str, layer: int) -> float:
        return float(rows(depth, case=case, layer=layer)["relative"].median())

    last = int(rows(depth, case="one head")["layer"].max())
    seen = {case: median(case, last) for case in (*ROUNDED, "one head")}
    plain = median("values / 10", 3) / median("several heads", 3)
    normed = median("values / 10, LN", 3) / median("LN", 3)
    kept = [curve(depth, "residual", by="trial", case="skip", layer=layer) for layer in (0, config.depth)]
    share = (kept[1] / kept[0]).min()
    least, most = min(config.gains), max(config.gains)
    # The mean over trials, nan where one never ends.
    sine = rows(frame, part="mlp").groupby("gain")["layers"].agg(lambda values: values.mean(skipna=False))
    stops = sine[sine.isna()].index
    critical = rows(frame, part="critical").dropna(subset="fitted")
    slope = _slope(np.log(critical["gain"]), np.log(critical["fitted"])) if len(critical) else np.nan
    no_role = "§3.3: layer normalisation plays no role"
    return [
        _exponent(depth, "one head", "with one head, log e grows by the factor 3 per layer", "Thm 2.2: 3^L"),
        _exponent(
            depth,
            "several heads",
            f"with {config.heads} heads, too, log e grows by the factor 3 per layer",
            "Thm 2.3: 3^L",
        ),
        judge(
            "the residual after a layer of pure attention is the cube of the one before, up to a constant",
            "e' ≤ c·e³ (proof of Thm 2.2), a bound",
            f"order 3 to {off:.0e}, by halving R, in {len(cubes)} layers with e < 1e-3",
            "1e-3",
            off < 1e-3,
        ),
        judge(
            "the bound of Thm 2.2 and 2.3 holds in every layer that satisfies D ≤ 1.256, the condition of the proof",
            "c = 4γβH/√d_qk",
            f"{above} of {len(held)} layers exceed the bound; constant at most {held['constant'].max():.0e} "
            f"where the theorem has 4γ, γ to {held['gamma'].max():.2f}",
            "none",
            above == 0,
            "random weights are far from the worst case; around the mean, the largest constant we could construct "
            "is 0.5",
        ),
        judge(
            "tokens collapse of which the theorem promises nothing",
            "not in the paper; ours: the bound contracts only if ‖res(X)‖ < c^(−1/2)",
            f"c^(−1/2) = {start['threshold'].mean():.3f}, ‖res(X)‖ = {start['residual'].mean():.1f} at the "
            f"entrance, {end:.0e} at the end",
            "residual above the threshold at the entrance, below 1e-50 at the end, in all trials",
            (start["residual"] > start["threshold"]).all() and end < 1e-50,
        ),
        judge(
            "whole tokens in float32 or float64 cannot show the exponent",
            "the paper's plots stay at 2e-7; ours: differences end at ε of the tokens",
            ", ".join(f"{case}: {value:.0e}" for case, value in seen.items()) + f" after layer {last}",
            "float32 0 or above 1e-9, float64 0 or above 1e-18, the carried residual below 1e-50",
            not 0 < seen["float32, whole tokens"] < 1e-9
            and not 0 < seen["float64, whole tokens"] < 1e-18
            and seen["one head"] < 1e-50,
        ),
        _exponent(depth, "LN", "layer normalisation leaves the exponent at 3", no_role),
        judge(
            "layer normalisation does not change what the size of the values does",
            no_role,
            f"values / 10 change ‖res(X)‖/‖X‖ after layer 3 by the factor {plain:.0e} without LN, {normed:.3f} with LN",
            "within a factor 2 of each other",
            0.5 < plain / normed < 2,
            "LN divides by the size that the values gave: the theorem's β without it means nothing",
        ),
        judge(
            "skip connections stop the collapse: without LN the residual does not shrink",
            "“skip connections and MLPs stop the output from degeneration” (abstract); Claim 3.1: some never contract",
            f"‖res(X)‖ after layer {config.depth} at least {share:.2f} of the first",
            "0.5, with random weights, in all trials",
            share > 0.5,
            "relative to the tokens, which grow, its square shrinks: times "
            f"{_factor(depth, 'skip', config, 'relative'):.3f} per layer",
        ),
        _rate(
            depth,
            config,
            "skip, LN",
            0.5,
            "with skips and LN, the square of the residual halves in every layer",
            "not in the paper; Yu & Zhang 2024: t_div halves (§2.5)",
        ),
        _rate(
            depth,
            config,
            "causal",
            0.25,
            "with a causal mask and no skips, the residual only halves in every layer",
            "not in the paper, whose attention has no mask; ours: λ₂ = ½",
        ),
        _exponent(depth, "MLP", "an MLP of random weights (ReLU, g = 1) leaves the exponent at 3", "Cor. 3.2: 3^L"),
        judge(
            "an MLP with a large enough Lipschitz constant stops the doubly exponential collapse",
            "Cor. 3.2: nothing is promised above (4γβHλ/√d_qk)^(−1/2)",
            f"φ = sin: {f'from g = {stops.min():g} on' if len(stops) else 'at no g'}; "
            f"collapsed in {sine[least]:.1f} layers at g = {least:g}",
            f"every trial collapsed at g = {least:g}, not every one at g = {most:g}",
            len(stops) and stops.max() == most and not np.isnan(sine[least]),
        ),
        judge(
            "the residual above which an MLP stops the collapse falls with the root of its Lipschitz constant",
            "Cor. 3.2: c^(−1/2), c ∝ λ",
            f"slope {slope:.3f} in logarithms, g = {critical['gain'].min():g} to {critical['gain'].max():g}; at "
            f"least {(critical['critical'] / critical['promised']).min():.0f} times the residual promised",
            "0.05 of −0.5, and never below what is promised",
            abs(slope + 0.5) < 0.05 and (critical["critical"] > critical["promised"]).all(),
            when=not np.isnan(slope),
        ),
    ]


def _end(depth: pd.DataFrame, case: str, column: str) -> pd.Series:
    """Of every trial, at the case's last layer."""
    own = rows(depth, case=case)
    return rows(own, layer=own["layer"].max()).set_index("trial")[column]


def _exponent(depth: pd.DataFrame, case: str, title: str, paper: str) -> Claim:
    """log(e_l/e_{l−1})/log(e_{l−1}/e_{l−2}) at the last layer that float64 can hold."""
    found, ends = _end(depth, case, "exponent"), _end(depth, case, "residual")
    return judge(
        title,
        paper,
        f"{found.mean():.3f} ± {found.std():.3f} at layer {rows(depth, case=case)['layer'].max():.0f}, "
        f"e = {ends.min():.0e}",
        "0.05: if the constants of two layers differ by a factor 10, that is log 10/log 1e40 = 0.025",
        abs(found.mean() - 3) < 0.05,
        when=ends.max() < 1e-50,
    )


def _rate(depth: pd.DataFrame, config: Config, case: str, wanted: float, title: str, paper: str) -> Claim:
    """The factor of e² per layer; the variance of log e² in one layer is 1/(wanted·d)."""
    near = allowed(1 / wanted / config.width, config.depth / 2, config.trials)
    found = _factor(depth, case, config)
    late = rows(depth[depth["layer"] >= config.depth // 2], case=case)
    return judge(
        title,
        paper,
        f"e² times {found:.3f} per layer, order {late['order'].mean():.4f}",
        f"{near:.1%} of {wanted:g}: 3 standard errors of the walk at this width",
        abs(found / wanted - 1) < near,
    )


def _factor(depth: pd.DataFrame, case: str, config: Config, column: str = "residual") -> float:
    """What a layer leaves of e², over the second half of the layers: geometric mean of the trials' slopes."""
    late = rows(depth[depth["layer"] >= config.depth // 2], case=case)
    slopes = [_slope(trial["layer"], 2 * np.log(trial[column])) for _, trial in late.groupby("trial")]
    return float(np.exp(np.mean(slopes)))


def _slope(x: Any, y: Any) -> float:
    return float(np.polyfit(x, y, 1)[0])


GAINS = (1.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0)
QUICK = Config(trials=3, tokens=8, width=32, heads=2, depth=40, gains=GAINS, mlp_depth=16)
STUDY = Study("dong2021-exponent", Config(), QUICK, compute, draw, claims)
