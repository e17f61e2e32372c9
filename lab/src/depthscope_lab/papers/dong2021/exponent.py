"""How fast attention makes tokens equal, measured: the exponent 3 per layer of Dong et al. 2021, and what changes it.

Thm 2.2 and 2.3 bound the residual e of a pure attention network by e' ≤ c·e³ in every layer. The paper's plots, in
float32, end at 1e-7 of the tokens after two layers; here the residual is carried by itself (`theory.residuals`) down
to 1e-290. §3.3 says that layer normalisation plays no role, Claim 3.1 that skip connections stop the collapse,
Cor. 3.2 that an MLP slows it by its Lipschitz constant λ.

All cases go through the same weights: one matrix of N(0, 1/d) each for queries, keys, values and outputs, taken as
one head or cut into several. Trials are a batch axis. The MLP sin(g·XW₁)W₂ has a λ that grows with its gain g.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from depthscope.drawing import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, legend_below, panels
from depthscope.measures import composite_norm
from depthscope.progress import Share
from depthscope.theory import (
    Heads,
    Mlp,
    SplitTokens,
    attend,
    attend_causally,
    collapse_bound,
    feed_forward,
    layer_contraction,
    lipschitz_bound,
    normalise,
    weight_product,
)
from depthscope.theory.collapse import LARGEST_RANGE
from depthscope_lab.papers.simulation.randomness import generators
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.vocabulary import Claim, Work, axis, curve, judge, line, rows, table

FLOOR = 1e-290  # below, float64 has fewer digits


class Layer(NamedTuple):
    """The weights of one layer, one per trial."""

    one: Heads  # (trials, 1, d, d)
    many: Heads  # (trials, h, d, d/h)
    expand: Tensor  # (trials, d, 4d)
    contract: Tensor  # (trials, 4d, d)


def layers(trials: int, width: int, heads: int, seed: tuple[int, ...]) -> Iterator[Layer]:
    """Layer after layer, without end."""
    (stream,) = generators(seed, 1)

    def matrix(fan_in: int, fan_out: int) -> Tensor:
        return torch.from_numpy(stream.standard_normal((trials, fan_in, fan_out)) / fan_in**0.5)

    while True:
        q, k, v, o = (matrix(width, width) for _ in range(4))
        cut = [part.unflatten(-1, (heads, -1)).transpose(-3, -2) for part in (q, k, v)]
        one = Heads(q.unsqueeze(1), k.unsqueeze(1), (v @ o).unsqueeze(1))
        many = Heads(cut[0], cut[1], cut[2] @ o.unflatten(-2, (heads, -1)))
        yield Layer(one, many, matrix(width, 4 * width), matrix(4 * width, width))


def first_tokens(trials: int, n: int, width: int, seed: tuple[int, ...]) -> SplitTokens:
    """A shared token and differences from it, both N(0, 1)."""
    (stream,) = generators(seed, 1)
    shared = torch.from_numpy(stream.standard_normal((trials, 1, width)))
    return SplitTokens.of(shared + torch.from_numpy(stream.standard_normal((trials, n, width))))


def _tenth(heads: Heads) -> Heads:
    return heads._replace(value=heads.value / 10)


CASES: dict[str, Callable[[SplitTokens, Layer], SplitTokens]] = {
    "one head": lambda x, layer: attend(x, layer.one),
    "several heads": lambda x, layer: attend(x, layer.many),
    "LN": lambda x, layer: normalise(attend(x, layer.many)),
    "MLP": lambda x, layer: feed_forward(attend(x, layer.many), Mlp(layer.expand, layer.contract)),
    "values / 10": lambda x, layer: attend(x, _tenth(layer.many)),
    "values / 10, LN": lambda x, layer: normalise(attend(x, _tenth(layer.many)), eps=0.0),
    "skip": lambda x, layer: x + attend(x, layer.many),
    "skip, LN": lambda x, layer: normalise(x + attend(x, layer.many)),
    "causal": lambda x, layer: attend_causally(x, layer.many),
}
_SHOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "one head": (BLUE, {"linewidth": 3.0}),
    "several heads": (SKY, {}),
    "LN": (GREEN, {"linestyle": "--"}),
    "MLP": (ORANGE, {}),
    "skip": (PURPLE, {}),
    "skip, LN": (VERMILION, {}),
    "causal": (BLACK, {}),
}


def order_of(case: str, tokens: SplitTokens, layer: Layer) -> Tensor:
    """p of e' ∝ e^p at this point: log₂ of how much smaller e' becomes when R is halved, (trials)."""
    whole, half = (composite_norm(CASES[case](tokens.scaled(size), layer).residual) for size in (1.0, 0.5))
    return torch.log2(whole / half)


def follow(case: str, tokens: SplitTokens, source: Iterator[Layer], depth: int) -> pd.DataFrame:
    """A case from the first tokens to the last layer, or to the layer before its residual leaves float64.

    Columns: residual (e = ‖R‖_{1,∞}), relative (to ‖X‖_{1,∞}), digits (to how many the tokens are equal, −log₁₀ of
    that), order (`order_of`, of the next layer), exponent (log(e_l/e_{l−1})/log(e_{l−1}/e_{l−2})); of pure attention
    also `layer_contraction` of the next.
    """
    frames = []
    for place in range(depth + 1):
        residual = composite_norm(tokens.residual)
        if (residual < FLOOR).any():
            break
        layer = next(source)
        relative = residual / composite_norm(tokens.tokens)  # `composite_residual`, with the residual that was carried
        columns = {"residual": residual, "relative": relative, "order": order_of(case, tokens, layer)}
        if case in ("one head", "several heads"):  # the theorems are about these
            found = layer_contraction(tokens, layer.one if case == "one head" else layer.many)
            columns |= {name: getattr(found, name) for name in ("constant", "gamma", "largest_range", "after")}
            columns |= {name: getattr(found.paper, name) for name in ("threshold", "log_bound")}
        frames.append(table(columns, trial=range(len(residual))).assign(part="depth", case=case, layer=place))
        tokens = CASES[case](tokens, layer)
    frame = pd.concat(frames, ignore_index=True)
    steps = np.log(frame["residual"]).groupby(frame["trial"]).diff()
    frame["exponent"] = steps / steps.groupby(frame["trial"]).shift(1)
    frame.loc[frame["order"].abs() == np.inf, "order"] = np.nan  # the halved tokens have left float64
    return frame.assign(digits=-np.log10(frame["relative"].where(frame["relative"] > 0)))


def sine(layer: Layer, gains: Tensor) -> Mlp:
    """sin(g·XW₁)W₂ for every gain, (trials, gains, …)."""
    return Mlp(gains[:, None, None] * layer.expand.unsqueeze(1), layer.contract.unsqueeze(1), activation="sine")


def critical_residual(
    start: SplitTokens, stack: list[Layer], gains: Tensor, *, steps: int = 16, gone: float = 1e-10
) -> Tensor:
    """The residual of the first tokens above which the collapse stops, (trials, gains), by bisection in its logarithm.

    The same differences, smaller or larger; collapsed is what is below `gone` after the last layer of the stack. nan
    where even differences ten times as large collapse.
    """
    wide = SplitTokens(start.shared.unsqueeze(1), start.residual.unsqueeze(1))
    low = torch.full((len(start.shared), len(gains)), -8.0, dtype=torch.float64)
    high = torch.full_like(low, 1.0)
    for _ in range(steps):
        middle = (low + high) / 2
        x = wide.scaled((10**middle)[..., None, None])
        for layer in stack:
            query, key, value = (part.unsqueeze(1) for part in layer.many[:3])
            x = feed_forward(attend(x, Heads(query, key, value)), sine(layer, gains))
        collapsed = composite_norm(x.residual) < gone
        low, high = torch.where(collapsed, middle, low), torch.where(collapsed, high, middle)
    found = 10**low * composite_norm(start.residual).unsqueeze(-1)
    return torch.where(high < 1, found, torch.nan)


def promised_residual(layer: Layer, gains: Tensor, tokens: int) -> Tensor:
    """c^(−1/2) of Cor. 3.2 for this layer, (trials, gains): below, the theorem promises a collapse; γ = √n at most."""
    heads = layer.many
    return collapse_bound(
        torch.ones(len(heads.query), len(gains)),
        beta=weight_product(heads).unsqueeze(-1),
        key_width=heads.key.shape[-1],
        gamma=tokens**0.5,
        heads=heads.query.shape[-3],
        lipschitz=lipschitz_bound(sine(layer, gains)),
    ).threshold


@dataclass(frozen=True)
class Config:
    seed: int = 0
    trials: int = 8
    tokens: int = 32
    width: int = 64
    heads: int = 4
    depth: int = 60  # of the cases that do not end before
    gains: tuple[float, ...] = tuple(4.0**power for power in range(9))  # g of the MLPs
    mlp_depth: int = 12


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows of two parts, with nan where a column has no meaning.

    `depth`: case, trial, layer, and the columns of `follow`. `critical`: trial, gain, the residual of the first tokens,
    the critical one, the one promised by Cor. 3.2, and fitted (the line through the means).
    """
    size: dict[str, Any] = {"trials": config.trials, "width": config.width, "heads": config.heads}
    size["seed"] = (config.seed, 15, 0)
    start = first_tokens(config.trials, config.tokens, config.width, (config.seed, 15, 1))
    work, frames = Work(len(CASES) + 1, progress), []
    for case in CASES:
        frames.append(follow(case, start, layers(**size), config.depth))
        work()
    stack, gains = list(islice(layers(**size), config.mlp_depth)), torch.tensor(config.gains, dtype=torch.float64)
    found = {
        "residual": composite_norm(start.residual).unsqueeze(-1).expand(-1, len(gains)),
        "critical": critical_residual(start, stack, gains),
        "promised": promised_residual(stack[0], gains, config.tokens),
    }
    frame = table(found, trial=range(config.trials), gain=config.gains).assign(part="critical", case="sin(g·)")
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
    figure, (fall, order, critical) = panels(3, width=4.6, height=4.1)
    depth, own = rows(frame, part="depth"), rows(frame, part="critical")
    for case, (colour, style) in _SHOWN.items():
        line(fall, rows(depth, case=case).groupby("layer")["digits"].median(), colour, case, **style)
        line(order, curve(depth, "order", by="layer", case=case), colour, **style)
    critical.plot(own["gain"], own["critical"], "o", color=BLUE, markersize=3, label="sin(g·): collapse below")
    line(critical, curve(own, "fitted", by="gain"), BLUE, "least squares", linewidth=1)
    line(critical, curve(own, "promised", by="gain"), GREY, "promised by Cor. 3.2", linewidth=1.2, linestyle="--")
    critical.axhline(float(own["residual"].mean()), color=BLACK, linewidth=1, linestyle=":", label="N(0, 1) tokens")
    critical.set_xscale("log", base=4)
    title, y = "Digits to which the tokens are equal", "−log₁₀ ‖res(X)‖/‖X‖, median over trials"
    axis(fall, title, "layer", y, log=True, ylim=(0.2, 400), first=0, last=16)
    title = "Order p of the next layer: e' ∝ e^p"
    axis(order, title, "layer", "p, mean over trials", ylim=(-0.2, 3.6), first=0, last=16)
    title, x = "Where the MLP stops the collapse", "gain g of the MLP: λ ∝ g"
    axis(critical, title, x, "‖res(X)‖ of the first tokens", log=True)
    legend_below(fall, columns=3)
    legend_below(critical, columns=2)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    depth = rows(frame, part="depth")
    pure = depth[depth["after"] > FLOOR]  # what float64 can hold
    cubes, held = pure[pure["residual"] < 1e-3], pure[pure["largest_range"] <= LARGEST_RANGE]
    off = (cubes["order"] - 3).abs().max()
    above = int((np.log(held["after"]) > held["log_bound"]).sum())
    start, end = rows(pure, layer=0, case="several heads"), _end(depth, "several heads", "residual").max()
    after3 = rows(depth, layer=3).groupby("case")["relative"].median()
    plain, normed = (after3[f"values / 10{ln}"] / after3[of] for ln, of in (("", "several heads"), (", LN", "LN")))
    kept = [curve(depth, "residual", by="trial", case="skip", layer=layer) for layer in (0, config.depth)]
    share = (kept[1] / kept[0]).min()
    late = depth[depth["layer"] >= config.depth // 2]
    ones = late.groupby("case")["order"].mean()[["skip, LN", "causal"]]
    critical = rows(frame, part="critical").dropna(subset="fitted")
    slope = _slope(np.log(critical["gain"]), np.log(critical["fitted"])) if len(critical) else np.nan
    no_role = "§3.3: layer normalisation plays no role"
    several = f"with {config.heads} heads, too, log e grows by the factor 3 per layer"
    return [
        _exponent(depth, "one head", "with one head, log e grows by the factor 3 per layer", "Thm 2.2: 3^L"),
        _exponent(depth, "several heads", several, "Thm 2.3: 3^L"),
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
            kind="check",
        ),
        judge(
            "tokens collapse of which the theorem promises nothing",
            "not in the paper; ours: the bound contracts only if ‖res(X)‖ < c^(−1/2)",
            f"c^(−1/2) = {start['threshold'].mean():.3f}, ‖res(X)‖ = {start['residual'].mean():.1f} at the "
            f"entrance, {end:.0e} at the end",
            "residual above the threshold at the entrance, below 1e-50 at the end, in all trials",
            (start["residual"] > start["threshold"]).all() and end < 1e-50,
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
        judge(
            "a skip with LN, or a causal mask without skips, makes the exponent 1: e falls by a constant factor",
            "not in the paper, whose theorem is about attention without either; Yu & Zhang 2024: t_div halves (§2.5)",
            f"order {ones['skip, LN']:.4f} and {ones['causal']:.4f}; e² times "
            f"{_factor(depth, 'skip, LN', config):.3f} and {_factor(depth, 'causal', config):.3f} per layer",
            "0.01; the factors are judged in yu2024-rate and causal-rate",
            ((ones - 1).abs() < 0.01).all(),
        ),
        _exponent(depth, "MLP", "an MLP of random weights (ReLU, g = 1) leaves the exponent at 3", "Cor. 3.2: 3^L"),
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


def _factor(depth: pd.DataFrame, case: str, config: Config, column: str = "residual") -> float:
    """What a layer leaves of e², over the second half of the layers: geometric mean of the trials' slopes."""
    late = rows(depth[depth["layer"] >= config.depth // 2], case=case)
    slopes = [_slope(trial["layer"], 2 * np.log(trial[column])) for _, trial in late.groupby("trial")]
    return float(np.exp(np.mean(slopes)))


def _slope(x: Any, y: Any) -> float:
    return float(np.polyfit(x, y, 1)[0])


GAINS = (1.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0)
QUICK = Config(trials=3, tokens=8, width=32, heads=2, depth=40, gains=GAINS, mlp_depth=8)
STUDY = Study("dong2021-exponent", Config(), QUICK, compute, draw, claims)
