"""What `dong2021.exponent` says, judged: pure attention, norms and skips, MLPs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from depthscope.theory.collapse import LARGEST_RANGE
from depthscope_lab.papers.dong2021.exponent_runs import FLOOR, ROUNDED, Config
from depthscope_lab.papers.simulation.collapse_rate import allowed
from depthscope_lab.papers.study import Claim, curve, judge, rows

STOP = "“skip connections and MLPs stop the output from degeneration” (abstract)"
BLIND_LAYER = 12  # twice as deep as the other tokens need


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    depth = rows(frame, part="depth")
    return [*_pure(depth, config), *_norms_and_skips(depth, config), *_mlps(frame, depth, config)]


def _pure(depth: pd.DataFrame, config: Config) -> list[Claim]:
    pure = depth[depth["after"] > FLOOR]  # what float64 can hold
    cubes = pure[pure["residual"] < 1e-3]
    off = (cubes["order"] - 3).abs().max()
    held = pure[pure["largest_range"] <= LARGEST_RANGE]
    above = int((np.log(held["after"]) > held["log_bound"]).sum())
    start = rows(pure, layer=0, case="several heads")
    end = _end(depth, "several heads", "residual").max()
    last = int(rows(depth, case="one head")["layer"].max())
    seen = {case: _median(depth, case, last) for case in (*ROUNDED, "one head")}
    return [
        _exponent(depth, "one head", "with one head, log e grows by the factor 3 per layer", "Thm 2.2: 3^L"),
        _exponent(
            depth,
            "several heads",
            f"with {config.heads} heads, too, log e grows by the factor 3 per layer",
            "Thm 2.3: 3^L",
        ),
        judge(
            "the residual behind a layer of pure attention is the cube of the one before, up to a constant",
            paper="e' ≤ c·e³ (proof of Thm 2.2), a bound",
            ours=f"order 3 to {off:.0e}, by halving R, in {len(cubes)} layers with e < 1e-3",
            tolerance="1e-3",
            holds=bool(off < 1e-3),
        ),
        judge(
            "the bound of Thm 2.2 and 2.3 holds in every layer that satisfies D ≤ 1.256, the condition of the proof",
            paper="c = 4γβH/√d_qk",
            ours=f"{above} of {len(held)} layers exceed the bound; constant at most {held['constant'].max():.0e} "
            f"where the theorem has 4γ, γ to {held['gamma'].max():.2f}",
            tolerance="none",
            holds=above == 0,
            note="random weights are far from the worst case; around the mean, the largest constant we could construct "
            "is 0.5",
        ),
        judge(
            "tokens collapse of which the theorem promises nothing",
            paper="not in the paper; ours: the bound contracts only if ‖res(X)‖ < c^(−1/2)",
            ours=f"c^(−1/2) = {start['threshold'].mean():.3f}, ‖res(X)‖ = {start['residual'].mean():.1f} at the "
            f"entrance, {end:.0e} at the end",
            tolerance="residual above the threshold at the entrance, below 1e-50 at the end, in all trials",
            holds=bool((start["residual"] > start["threshold"]).all() and end < 1e-50),
        ),
        judge(
            "whole tokens in float32 or float64 cannot show the exponent",
            paper="the paper's plots stay at 2e-7; ours: differences end at ε of the tokens",
            ours=", ".join(f"{case}: {value:.0e}" for case, value in seen.items()) + f" behind layer {last}",
            tolerance="float32 0 or above 1e-9, float64 0 or above 1e-18, the carried residual below 1e-50",
            holds=not 0 < seen["float32, whole tokens"] < 1e-9
            and not 0 < seen["float64, whole tokens"] < 1e-18
            and seen["one head"] < 1e-50,
        ),
    ]


def _norms_and_skips(depth: pd.DataFrame, config: Config) -> list[Claim]:
    plain = _median(depth, "values / 10", 3) / _median(depth, "several heads", 3)
    normed = _median(depth, "values / 10, LN", 3) / _median(depth, "LN", 3)
    blind = rows(depth, case="blind, LN", layer=BLIND_LAYER)
    first, last = (curve(depth, "trial", "residual", case="skip", layer=layer) for layer in (0, config.depth))
    share = (last / first).min()
    no_role = "§3.3: layer normalisation plays no role"
    return [
        _exponent(depth, "LN", "layer normalisation leaves the exponent at 3", no_role),
        judge(
            "layer normalisation does not change what the size of the values does",
            paper=no_role,
            ours=f"values / 10 change ‖res(X)‖/‖X‖ behind layer 3 by the factor {plain:.0e} without LN, "
            f"{normed:.3f} with LN",
            tolerance="within a factor 2 of each other",
            holds=bool(0.5 < plain / normed < 2),
            note="LN divides by the size that the values gave: the theorem's β without it means nothing",
        ),
        judge(
            "with layer normalisation, too, all tokens become equal, whatever the weights",
            paper=no_role,
            ours="queries and values that do not see the shared token: "
            f"‖res(X)‖/‖X‖ ≥ {blind['relative'].min():.2f} behind layer {BLIND_LAYER}",
            tolerance="1e-3, reached by all trials",
            holds=bool(blind["relative"].max() < 1e-3) if config.depth >= BLIND_LAYER else None,
            note="such tokens lose rank all the same, into opposite directions: effective rank "
            f"{blind['rank'].mean():.1f} there",
        ),
        judge(
            "skip connections stop the collapse: without LN the residual does not shrink",
            paper=f"{STOP}; Claim 3.1: some never contract",
            ours=f"‖res(X)‖ behind layer {config.depth} at least {share:.2f} of the first",
            tolerance="0.5, with random weights, in all trials",
            holds=bool(share > 0.5),
            note="relative to the tokens, which grow, its square shrinks: times "
            f"{_factor(depth, 'skip', config, 'relative'):.3f} per layer",
        ),
        _rate(
            depth,
            config,
            "skip, LN",
            0.5,
            2 / config.width,
            "with skips and LN, the square of the residual halves in every layer",
            "not in the paper; Yu & Zhang 2024: t_div halves (§2.5)",
        ),
        _rate(
            depth,
            config,
            "causal",
            0.25,
            4 / config.width,
            "with a causal mask and no skips, the residual only halves in every layer",
            "not in the paper, whose attention has no mask; ours: λ₂ = ½",
        ),
    ]


def _mlps(frame: pd.DataFrame, depth: pd.DataFrame, config: Config) -> list[Claim]:
    needed = {  # mean over trials, nan where one never ends
        str(case): own.groupby("gain")["layers"].agg(lambda values: values.mean(skipna=False))
        for case, own in rows(frame, part="mlp").groupby("case")
    }
    least, most = min(config.gains), max(config.gains)
    sine = needed["sin(g·)"]
    stops = sine[sine.isna()].index
    critical = rows(frame, part="critical").dropna(subset="fitted")
    slope = _slope(np.log(critical["gain"]), np.log(critical["fitted"])) if len(critical) else np.nan
    return [
        _exponent(depth, "MLP", "an MLP of random weights (ReLU, g = 1) leaves the exponent at 3", "Cor. 3.2: 3^L"),
        judge(
            "an MLP with a large enough Lipschitz constant stops the doubly exponential collapse",
            paper="Cor. 3.2: nothing is promised above (4γβHλ/√d_qk)^(−1/2)",
            ours=f"φ = sin: {f'from g = {stops.min():g} on' if len(stops) else 'at no g'}; "
            f"collapsed in {_said(sine[least])} layers at g = {least:g}",
            tolerance=f"every trial collapsed at g = {least:g}, not every one at g = {most:g}",
            holds=bool(len(stops) and stops.max() == most and not np.isnan(sine[least])),
        ),
        judge(
            "the residual above which an MLP stops the collapse falls with the root of its Lipschitz constant",
            paper="Cor. 3.2: c^(−1/2), c ∝ λ",
            ours=f"slope {slope:.3f} in logarithms, g = {critical['gain'].min():g} to {critical['gain'].max():g}; at "
            f"least {(critical['critical'] / critical['promised']).min():.0f} times the residual promised",
            tolerance="0.05 of −0.5, and never below what is promised",
            holds=None
            if np.isnan(slope)
            else bool(abs(slope + 0.5) < 0.05 and (critical["critical"] > critical["promised"]).all()),
        ),
        judge(
            "a larger Lipschitz constant of the MLP slows the collapse, whatever the MLP",
            paper=f"{STOP}; Cor. 3.2",
            ours="; ".join(f"{case}: {_said(own[least])} → {_said(own[most])}" for case, own in needed.items())
            + f" layers to 1e-100, g = {least:g} → {most:g}",
            tolerance="more layers at the largest g than at the smallest, for each of the four",
            holds=all(not own[most] <= own[least] for own in needed.values()),
            note="ReLU: scores grow with the tokens, rows that attend to the same token become equal, and the groups "
            "of equal tokens become fewer; LN divides by g; tanh saturates, and makes such groups too",
        ),
    ]


def _said(layers_needed: float) -> str:
    return "never" if np.isnan(layers_needed) else f"{layers_needed:.1f}"


def _end(depth: pd.DataFrame, case: str, column: str) -> pd.Series:
    """Of every trial, at the case's last layer."""
    own = rows(depth, case=case)
    return rows(own, layer=own["layer"].max()).set_index("trial")[column]


def _median(depth: pd.DataFrame, case: str, layer: int) -> float:
    return float(rows(depth, case=case, layer=layer)["relative"].median())


def _exponent(depth: pd.DataFrame, case: str, title: str, paper: str) -> Claim:
    """log(e_l/e_{l−1})/log(e_{l−1}/e_{l−2}) at the last layer that float64 can hold."""
    found, least = _end(depth, case, "exponent"), _end(depth, case, "residual").min()
    reached = _end(depth, case, "residual").max() < 1e-50
    return judge(
        title,
        paper=paper,
        ours=f"{found.mean():.3f} ± {found.std():.3f} at layer {rows(depth, case=case)['layer'].max():.0f}, "
        f"e = {least:.0e}",
        tolerance="0.05: if the constants of two layers differ by a factor 10, that is log 10/log 1e40 = 0.025",
        holds=bool(abs(found.mean() - 3) < 0.05) if reached else None,
    )


def _rate(
    depth: pd.DataFrame, config: Config, case: str, wanted: float, variance: float, title: str, paper: str
) -> Claim:
    """The factor of e² per layer; `variance` is that of log e² in one layer."""
    found, near = _factor(depth, case, config), allowed(variance, config.depth / 2, config.trials)
    late = rows(depth[depth["layer"] >= config.depth // 2], case=case)
    return judge(
        title,
        paper=paper,
        ours=f"e² times {found:.3f} per layer, order {late['order'].mean():.4f}",
        tolerance=f"{near:.1%} of {wanted:g}: 3 standard errors of the walk at this width",
        holds=bool(abs(found / wanted - 1) < near),
    )


def _factor(depth: pd.DataFrame, case: str, config: Config, column: str = "residual") -> float:
    """What a layer leaves of e², over the second half of the layers: geometric mean of the trials' slopes."""
    late = rows(depth[depth["layer"] >= config.depth // 2], case=case)
    slopes = [_slope(trial["layer"], 2 * np.log(trial[column])) for _, trial in late.groupby("trial")]
    return float(np.exp(np.mean(slopes)))


def _slope(x: Any, y: Any) -> float:
    return float(np.polyfit(x, y, 1)[0])
