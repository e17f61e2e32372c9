"""Yu & Zhang 2024, Fig. 5: token diversity under de-escalation with three τ; our prediction; the transition at τ_c.

The paper does not say whether diversity is measured before or after the operation, nor, in agreement with its own
figures, how W is drawn: both places and two settings are shown. The sweep over τ (ours) shows that similarity
and gradients change sides at the same τ_c = 1 − ρ^(−1/2): order below it, chaos above.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd
import torch

from depthscope import drawing
from depthscope.theory import OddsMap
from depthscope_lab.papers.study import Claim, Study, judge
from depthscope_lab.papers.yu2024.fig5_runs import SETTINGS, SWEEPS, TAUS, Config, compute
from depthscope_lab.papers.yu2024.sweep import escalating_slope

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEVELS = (0.0, 0.5, 1.0)  # what the paper's text reads off its figure
CRITICAL = 1 - 2**-0.5  # τ_c at ρ = 2, which is what α = 1 and dσ² = 1 give


def draw(frame: pd.DataFrame) -> Figure:
    figure, (left, middle, right) = drawing.panels(3, width=3.9, height=4.0)
    for ax, setting in ((left, SETTINGS[0]), (middle, SETTINGS[1])):
        _draw_levels(ax, frame[frame["setting"] == setting])
        drawing.label(ax, f"Initialiser: {setting}", "block", "token diversity t_div")
    drawing.label(right, "Sweep of τ: order and chaos", "strength τ of de-escalation", "t_div, last block, before")
    twin = drawing.second_axis(right, "growth of the gradient per block", drawing.VERMILION)
    for setting, line in zip(SWEEPS, ("-", "--"), strict=True):
        name = "He FFN" if "He" in setting else "default FFN"
        sweep = _sweep_means(frame, setting)
        right.plot(sweep.index, sweep["diversity"], color=drawing.BLUE, linestyle=line, label=f"t_div, {name}")
        growth = sweep["gradient_growth"]
        twin.plot(growth.index, growth, color=drawing.VERMILION, linestyle=line, label=f"gradient, {name}")
    twin.axhline(1, color=drawing.VERMILION, linewidth=0.6, zorder=0)
    right.axvline(CRITICAL, color=drawing.BLACK, linestyle=":", linewidth=1.2, label="τ_c = 1 − 1/√2")
    handles = [*right.get_lines(), *(curve for curve in twin.get_lines() if "gradient" in str(curve.get_label()))]
    drawing.legend_below(right, columns=2, handles=handles)
    drawing.legend_below([left, middle], columns=2)
    return figure


def _draw_levels(ax: Axes, frame: pd.DataFrame) -> None:
    for tau, colour in zip(TAUS, (drawing.BLUE, drawing.ORANGE, drawing.GREEN), strict=True):
        for quantity, width in (("before", 1.8), ("after", 0.9)):
            rows = frame[(frame["tau"] == tau) & (frame["quantity"] == quantity)]
            runs = rows[rows["part"] == "levels"].groupby("block")["value"]
            line = "-" if quantity == "before" else "--"
            spread = runs.std() if quantity == "before" else None
            name = f"τ = {tau:g}, {quantity}"
            drawing.line_with_band(
                ax, runs.mean().index, runs.mean(), spread, colour=colour, name=name, linewidth=width, linestyle=line
            )
    predicted = frame[(frame["part"] == "predicted") & (frame["quantity"] == "before")]
    for strength, guess in predicted.groupby("tau"):
        once = "our prediction, before" if strength == TAUS[0] else None
        ax.plot(guess["block"], guess["value"], color=drawing.BLACK, linestyle=":", linewidth=1.2, label=once)
    ax.set_ylim(-0.02, 1.04)
    drawing.block_axis(ax, int(frame.loc[frame["part"] == "levels", "block"].max()))


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    found = []
    for tau, level in zip(TAUS, LEVELS, strict=True):
        for setting in SETTINGS:
            before, after = (_last(frame, "levels", setting, tau, quantity) for quantity in ("before", "after"))
            found.append(
                judge(
                    f"τ = {tau:g} keeps diversity around {level:g}, initialiser {setting}",
                    paper="§3.2: the levels “are around 0, 0.5 and 1, respectively”",
                    ours=f"{before:.3f} before the operation, {after:.3f} after it, at block {config.blocks}",
                    tolerance="within 0.1, before or after: read off a plot, and the paper does not say which",
                    holds=min(abs(before - level), abs(after - level)) < 0.1,
                    note="1 after the operation holds by construction" if tau == 1 else "",
                )
            )
    return [*found, *_judge_collapse(frame), *_judge_prediction(frame), *_judge_transition(frame, config)]


def _judge_collapse(frame: pd.DataFrame) -> list[Claim]:
    weak, strong = (
        [_last(frame, "levels", setting, tau, "after") for setting in SETTINGS] for tau in (TAUS[0], TAUS[1])
    )
    return [
        judge(
            "tokens collapse under τ = 0.1 and not under τ = 0.5",
            paper="§3.2: TSE “seems to have already been eliminated in the case of τ = 0.5”",
            ours=f"after the operation: {max(weak):.1e} at most for τ = 0.1, {min(strong):.3f} at least for τ = 0.5",
            tolerance="below 0.05 and above 0.3, under both initialisers",
            holds=max(weak) < 0.05 and min(strong) > 0.3,
        )
    ]


def _judge_prediction(frame: pd.DataFrame) -> list[Claim]:
    found = []
    for setting in SETTINGS:
        apart = {
            tau: abs(_last(frame, "predicted", setting, tau, "before") - _last(frame, "levels", setting, tau, "before"))
            for tau in TAUS
        }
        rho, feed = (_value(frame, "map", setting, name) for name in ("rho", "feed"))
        found.append(
            judge(
                f"the map of the odds predicts all three levels, initialiser {setting}",
                paper="ours; the paper: “such a behavior seems quite predictable”",
                ours=f"ρ = {rho:.2f}, c = {feed:.3f}, measured on fresh blocks; off by "
                + ", ".join(f"{gap:.3f} (τ = {tau:g})" for tau, gap in apart.items()),
                tolerance="0.1 in t_div before the operation at the last block",
                holds=max(apart.values()) < 0.1,
                note=f"its τ_c is {OddsMap(rho, feed).critical_tau:.3f}: the closer τ, the more an error of ρ counts",
            )
        )
    return found


def _judge_transition(frame: pd.DataFrame, config: Config) -> list[Claim]:
    seen, crossing, sides = {}, [], []
    for setting in SWEEPS:
        sweep = _sweep_means(frame, setting)
        taus, odds_growth = (torch.tensor(values.to_numpy()) for values in (sweep.index, sweep["odds_growth"]))
        seen[setting] = escalating_slope(taus, odds_growth)
        gradient = sweep["gradient_growth"]
        crossing.append(
            f"{setting}: " + ", ".join(f"{gradient[tau]:.3f} (τ = {tau:g})" for tau in (0.2, 0.3, 0.5, 1.0))
        )
        sides.append(gradient[gradient.index <= CRITICAL - 0.05].max() < 1 < gradient[gradient.index >= 0.4].min())
    matches = all(value is not None and abs(value - CRITICAL) < 0.03 for value in seen.values())
    return [
        judge(
            "the transition from order to chaos stands at τ_c = 1 − ρ^(−1/2)",
            paper="ours; the paper leaves the choice of τ open",
            ours="; ".join(f"{name}: {value:.3f}" if value else f"{name}: none" for name, value in seen.items())
            + f" against {CRITICAL:.3f} for ρ = 2",
            tolerance="0.03, the step of the sweep",
            holds=matches,
            note="where √(growth of the odds per block) = (1 − τ)√ρ, fitted where the odds escalate, reaches 1",
        ),
        judge(
            "gradients shrink where τ < τ_c and grow where τ > τ_c",
            paper="ours: order on one side, chaos on the other",
            ours="growth per block " + "; ".join(crossing),
            tolerance=f"below 1 for every τ ≤ {CRITICAL - 0.05:.2f}, above 1 for every τ ≥ 0.4",
            holds=all(sides),
            note=f"second half of {config.sweep_blocks} blocks; gradient of ⟨a random matrix, the last output⟩",
        ),
    ]


def _last(frame: pd.DataFrame, part: str, setting: str, tau: float, quantity: str) -> float:
    """The mean over runs at the last block."""
    rows = frame[(frame["part"] == part) & (frame["setting"] == setting) & (frame["tau"] == tau)]
    rows = rows[rows["quantity"] == quantity]
    return float(rows.loc[rows["block"] == rows["block"].max(), "value"].mean())


def _value(frame: pd.DataFrame, part: str, setting: str, quantity: str) -> float:
    chosen = (frame["part"] == part) & (frame["setting"] == setting) & (frame["quantity"] == quantity)
    return float(frame.loc[chosen, "value"].iloc[0])


def _sweep_means(frame: pd.DataFrame, setting: str) -> pd.DataFrame:
    """Geometric means over trials: a row per τ, a column per quantity."""
    rows = frame[(frame["part"] == "sweep mean") & (frame["setting"] == setting)]
    return rows.pivot(index="tau", columns="quantity", values="value")


STUDY = Study(
    name="yu2024-fig5",
    full=Config(),
    quick=Config(tokens=32, width=128, blocks=20, trials=4, sweep_tokens=16, sweep_width=64, sweep_trials=2),
    compute=compute,
    draw=draw,
    claims=claims,
)
