"""How fast attention makes tokens equal, measured: the exponent 3 per layer of Dong et al. 2021, and what changes it.

Thm 2.2 and 2.3 bound the residual e of a pure attention network by e' ≤ c·e³ in every layer. The paper's plots, in
float32, end at 1e-7 of the tokens after two layers; here the residual is carried by itself (`theory.residuals`) down
to 1e-290. §3.3 says that layer normalisation plays no role, Claim 3.1 that skip connections stop the collapse,
Cor. 3.2 that an MLP slows it by its Lipschitz constant λ.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
import torch

from depthscope.drawing import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    block_axis,
    label,
    legend_below,
    panels,
)
from depthscope.measures import composite_norm
from depthscope.progress import Share
from depthscope_lab.papers.dong2021.exponent_claims import claims
from depthscope_lab.papers.dong2021.exponent_mlps import (
    KINDS,
    critical_residual,
    layers_until_ended,
    promised_residual,
)
from depthscope_lab.papers.dong2021.exponent_runs import CASES, ROUNDED, Config, first_tokens, follow, layers, rounded
from depthscope_lab.papers.study import Study, Work, curve, rows

_STYLES: dict[str, dict[str, Any]] = {
    "one head": {"color": BLUE, "linewidth": 3.0},
    "several heads": {"color": SKY},
    "LN": {"color": GREEN, "linestyle": "--"},
    "MLP": {"color": ORANGE},
    "skip": {"color": PURPLE},
    "skip, LN": {"color": VERMILION},
    "causal": {"color": BLACK},
    "blind, LN": {"color": GREEN, "linestyle": ":"},
}
_KIND_COLOURS = dict(zip(KINDS, (ORANGE, GREEN, PURPLE, BLUE), strict=True))


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows of three parts, with nan where a column has no meaning.

    `depth`: case, trial, layer and the columns of `follow`. `mlp`: case (the kind), trial, gain, layers (until the
    residual is below 1e-100; nan: never), never (the depth that was tried in vain). `critical`: the same for one kind,
    with the residual of the first tokens, the critical one, the one promised by Cor. 3.2, and fitted (the line through
    the means).
    """
    work = Work(len(CASES) + len(ROUNDED) + len(KINDS) + 1, progress)
    frames = []
    for frame in _parts(config):
        frames.append(frame)
        work()
    return pd.concat(frames, ignore_index=True)


def _parts(config: Config) -> Iterator[pd.DataFrame]:
    size = {"trials": config.trials, "width": config.width, "heads": config.heads, "seed": (config.seed, 15, 0)}
    start = first_tokens(config.trials, config.tokens, config.width, (config.seed, 15, 1))
    trials = np.arange(config.trials)
    for case in CASES:
        yield _with_digits(follow(case, start, layers(**size), config.depth))  # type: ignore[arg-type]
    for case, dtype in ROUNDED.items():
        found = rounded(start.tokens.to(dtype), layers(**size), 8)  # type: ignore[arg-type]
        yield pd.concat(
            _with_digits(pd.DataFrame({"case": case, "layer": layer, "trial": trials, "relative": values}))
            for layer, values in enumerate(found)
        )
    stack = list(islice(layers(**size), config.mlp_depth))  # type: ignore[arg-type]
    gains = torch.tensor(config.gains, dtype=torch.float64)
    grid = {"trial": np.repeat(trials, len(gains)), "gain": np.tile(config.gains, config.trials)}
    for name, kind in KINDS.items():
        needed = layers_until_ended(start, stack, kind, gains).flatten().numpy()
        frame = pd.DataFrame({"part": "mlp", "case": name, **grid, "layers": needed})
        yield frame.assign(never=np.where(frame["layers"].isna(), float(config.mlp_depth), np.nan))
    name, kind = list(KINDS.items())[-1]
    critical = critical_residual(start, stack[: config.mlp_depth // 2], kind, gains)
    promised = promised_residual(stack[0], kind, gains, config.tokens)
    residual = np.repeat(composite_norm(start.residual).numpy(), len(gains))
    three = {"residual": residual, "critical": critical.flatten().numpy(), "promised": promised.flatten().numpy()}
    frame = pd.DataFrame({"part": "critical", "case": name, **grid, **three})
    yield frame.assign(fitted=_line(frame))


def _with_digits(frame: pd.DataFrame) -> pd.DataFrame:
    """digits: to how many the tokens are equal, −log₁₀ of the relative residual; nan where rounding left none."""
    relative = frame["relative"].where(frame["relative"] > 0)
    return frame.assign(part="depth", digits=-np.log10(relative))


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
    line = np.exp(height + slope * np.log(frame["gain"].to_numpy()))
    return np.where(frame["gain"].isin(known.index), line, np.nan)


def draw(frame: pd.DataFrame) -> Any:
    figure, (fall, order, until, critical) = panels(2, 2, width=4.9, height=4.1)
    depth = rows(frame, part="depth")
    rounded = {
        case: {"color": GREY, "linewidth": 1.2, "linestyle": line}
        for case, line in zip(ROUNDED, ("-", "--"), strict=True)
    }
    for case, style in {**_STYLES, **rounded}.items():
        digits = rows(depth, case=case).groupby("layer")["digits"].median()
        fall.plot(digits.index, digits, label=case, **{"linewidth": 1.5, **style})
    for case, style in _STYLES.items():
        p = curve(depth, "layer", "order", case=case)
        order.plot(p.index, p, **{"linewidth": 1.5, **style})
    fall.set_yscale("log")
    fall.set_ylim(0.2, 400)
    order.set_ylim(-0.2, 3.6)
    for ax in (fall, order):
        block_axis(ax, 16, first=0)
    label(fall, "Digits to which the tokens are equal", "layer", "−log₁₀ ‖res(X)‖/‖X‖, median over trials")
    label(order, "Order p of the next layer: e' ∝ e^p", "layer", "p, mean over trials")
    for case, colour in _KIND_COLOURS.items():
        own = rows(frame, part="mlp", case=case)
        layers = curve(own, "gain", "layers")
        until.plot(layers.index, layers, "o-", color=colour, markersize=4, linewidth=1.2, label=case)
        until.plot(own["gain"], own["never"], "x", color=colour, markersize=5)
    until.plot([], [], "x", color=BLACK, markersize=5, linewidth=0, label="not in so many")
    until.set_xscale("log", base=4)
    until.set_ylim(0, None)
    label(until, "Layers to a residual of 1e-100", "gain g of the MLP: λ ∝ g", "layers")
    own = rows(frame, part="critical")
    critical.plot(own["gain"], own["critical"], "o", color=BLUE, markersize=3, label="sin(g·): collapse below")
    for column, colour, width, dashes, name in (
        ("fitted", BLUE, 1, "-", "least squares"),
        ("promised", GREY, 1.2, "--", "promised by Cor. 3.2"),
    ):
        means = curve(own, "gain", column)
        critical.plot(means.index, means, color=colour, linewidth=width, linestyle=dashes, label=name)
    critical.axhline(float(own["residual"].mean()), color=BLACK, linewidth=1, linestyle=":", label="N(0, 1) tokens")
    critical.set_xscale("log", base=4)
    critical.set_yscale("log")
    label(critical, "Where the MLP stops the collapse", "gain g of the MLP: λ ∝ g", "‖res(X)‖ of the first tokens")
    legend_below(fall, columns=3)
    legend_below([until, critical], columns=2)
    return figure


STUDY = Study(
    "dong2021-exponent",
    full=Config(),
    quick=Config(
        trials=3, tokens=8, width=32, heads=2, depth=40, gains=(1.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0), mlp_depth=16
    ),
    compute=compute,
    draw=draw,
    claims=claims,
)
