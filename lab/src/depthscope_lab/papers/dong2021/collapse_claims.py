"""What is claimed of the collapse of BERT, ALBERT and XLNet, and of what the floor of float32 hides."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd

from depthscope_lab.papers.dong2021.pretrained import FAMILIES
from depthscope_lab.papers.study import Claim, curve, judge, rows

NAMES = {"bert": "BERT", "albert": "ALBERT", "xlnet": "XLNet"}
GONE = 1e-6  # a few times the floor of float32
LEFT = 0.05  # of the tokens' size beside the mean: less is nearly one token
SPREADS = 2.0  # standard deviations within which two numbers count as the same
NO_POSITIONS = "SAN, no position scores"  # of XLNet
CONSTANT = 1.5  # the largest factor between contractions that count as one rate; doubly exponential means a power of 3
OTHER_SIZE = "not of the paper's width and length"


def claims_of(frame: pd.DataFrame, *, is_paper: bool) -> list[Claim]:
    """`is_paper`: the shapes are the paper's, so that its numbers can be asked for."""
    found: list[Claim] = []
    for family in FAMILIES:
        found.append(_collapses(frame, family, is_paper))
        found += [_stays(frame, family, variant, is_paper) for variant in ("SAN+skip", "full")]
    found += _floors(frame, is_paper)
    found += [_exponent(frame, family) for family in FAMILIES]
    found.append(_exponent(frame, "xlnet", NO_POSITIONS))
    return [*found, *_readings(frame), *_of_pretrained(frame)]


def _mean(frame: pd.DataFrame, model: str, variant: str, source: str, weights: str = "init") -> pd.Series:
    """Over samples, by block, of the first draw of the weights."""
    return curve(frame, "block", model=model, variant=variant, source=source, weights=weights, draw=0)


def _paper_curve(frame: pd.DataFrame, family: str, variant: str, weights: str = "init") -> pd.DataFrame:
    found = rows(frame, source="paper", family=family, weights=weights, variant=variant)
    return found.set_index("block")[["value", "spread"]]


def _first_below(values: pd.Series, level: float) -> int:
    below = values.index[values < level]
    return int(below[0]) if len(below) else -1


def _collapses(frame: pd.DataFrame, family: str, is_paper: bool) -> Claim:
    said, ours, alike = [], [], []
    for variant in ("SAN", "SAN+MLP"):
        theirs, mean = _paper_curve(frame, family, variant)["value"], _mean(frame, family, variant, "float32")
        last, first = _first_below(theirs, GONE), _first_below(mean, GONE)
        alike.append(first > 0 and abs(first - last) <= 1)
        said.append(f"{variant} {theirs[0]:.2f}, {theirs[1]:.2g}, below {GONE:g} at layer {last}")
        ours.append(f"{variant} {mean[0]:.2f}, {mean[1]:.2g}, below {GONE:g} at block {first}")
    return judge(
        f"without attention's skip, {NAMES[family]} with fresh weights collapses, with MLPs or without",
        paper="; ".join(said) + " (Fig. 2)",
        ours="; ".join(ours),
        tolerance="one block: where a curve passes a level hangs on the weights drawn and the text",
        holds=all(alike) if is_paper else None if all(alike) else False,
        note="" if is_paper else OTHER_SIZE,
    )


def _stays(frame: pd.DataFrame, family: str, variant: str, is_paper: bool) -> Claim:
    theirs, mean = _paper_curve(frame, family, variant), _mean(frame, family, variant, "float32")
    samples = rows(frame, model=family, variant=variant, source="float32", weights="init")
    draws = samples.pivot_table(index="block", columns="draw", values="value", aggfunc="mean")
    both = mean.index.intersection(theirs.index)
    of_draws = np.asarray(draws.std(axis=1, ddof=1))[: len(both)]
    spread = np.sqrt(theirs.loc[both, "spread"] ** 2 + 2 * of_draws**2)  # theirs is one draw, ours is another
    apart = (mean.loc[both] - theirs.loc[both, "value"]).abs() / spread
    end = mean.iloc[-1]
    within = float((apart <= SPREADS).mean())
    return judge(
        f"{NAMES[family]} with fresh weights keeps its rank {'as it is' if variant == 'full' else 'with skips alone'}",
        paper=f"{theirs['value'].iloc[0]:.3f} → {theirs['value'].iloc[-1]:.3f} over 12 layers (Fig. 2)",
        ours=f"{mean.iloc[0]:.3f} → {end:.3f}; {within:.0%} of the blocks within {SPREADS:g} standard "
        f"deviations, the farthest {apart.max():.1f} at block {apart.idxmax()}",
        tolerance=f"at least {LEFT} is left, and half of the blocks within {SPREADS:g} standard deviations: the spread "
        "over texts in the figure with that over draws of the weights, measured here",
        holds=bool(end > LEFT and within >= 0.5) if is_paper else None if end > LEFT else False,
        note="" if is_paper else OTHER_SIZE,
    )


def _floors(frame: pd.DataFrame, is_paper: bool) -> list[Claim]:
    plain, exact = (_mean(frame, "bert", "SAN", name).iloc[4:].mean() for name in ("float32", "float32 exact"))
    theirs = _paper_curve(frame, "bert", "SAN")["value"].iloc[4:].mean()
    parts, all_lower = [], True
    for family in FAMILIES:
        single, double = (_mean(frame, family, "SAN", source) for source in ("float32", "float64"))
        at = next((block for block in double.index if double[block] < 0.5 * single[block]), -1)
        all_lower &= bool(at > 0 and double.min() < 1e-14)
        parts.append(f"{NAMES[family]} block {at}: {double.get(at, np.nan):.2g} for {single.get(at, np.nan):.2g}")
    return [
        judge(
            "the level where the curves end is rounding of float32",
            paper=f"{theirs:.2g} from layer 3 on, in every collapsed curve (Fig. 2)",
            ours=f"{plain:.2g} as the authors compute it; {exact:.2g} of the same tokens, measured without rounding",
            tolerance="a factor of 2",
            holds=bool(0.5 < plain / theirs < 2) if is_paper else None,
            note="a part of the floor is the measurement's, the rest the model's",
        ),
        judge(
            "in float64 the collapse goes on below the floor of float32",
            paper="not in the paper: its curves end at 2e-7",
            ours="; ".join(parts) + "; all end at some 1e-16, the floor of float64",
            tolerance="less than half of what float32 shows, and 1e-14 reached",
            holds=all_lower,
        ),
    ]


def _exponent(frame: pd.DataFrame, family: str, variant: str = "SAN") -> Claim:
    """Where the mean of a curve falls from block to block by a power or by a factor."""
    values = _mean(frame, family, variant, "float64").iloc[1:]
    clean = np.asarray(values[values > 1e-14])  # a hundred times the floor
    falls = np.log(clean[:-1] / clean[1:])
    if len(falls) > 1:
        growing = bool(falls[-1] > CONSTANT * falls[0])
        ours = f"y shrinks by {', '.join(f'{np.exp(-fall):.2g}' for fall in falls)} from block 1 on"
    else:  # two blocks, and the next is rounding
        first, second = (float(np.log(values.iloc[i])) for i in (0, 1))
        growing = bool(second / first > CONSTANT)
        ours = f"ln y {first:.2f} at block 1, {second:.2f} at block 2 (× {second / first:.2f}), then below float64"
    of_positions = "" if variant == "SAN" else ", and without scores of relative positions,"
    return judge(
        f"{NAMES[family]} without skips and MLPs{of_positions} loses rank doubly exponentially",
        paper="Thm 2.3: ‖res‖ ≤ c^((3^L − 1)/2)·‖res(X)‖^(3^L); Fig. 2 is to verify it",
        ours=ours,
        tolerance=f"the contraction grows by more than {CONSTANT} from block to block; a constant one is exponential",
        holds=growing,
        note="its scores have terms of relative positions, which do not fade as the tokens grow alike; the theorem's "
        "scores have none. Float32 ends before the difference shows"
        if family == "xlnet" and variant == "SAN"
        else "the cancellation-free residual of depthscope.theory follows it further",
    )


def _readings(frame: pd.DataFrame) -> list[Claim]:
    parts, collapsed = [], True
    for family in FAMILIES:
        first, kept = (
            _first_below(_mean(frame, family, variant, "float32"), GONE)
            for variant in ("SAN+MLP, no skip at all", "SAN+MLP")
        )
        collapsed &= first > 0
        parts.append(f"{NAMES[family]} block {first} (with the MLP's skip: {kept})")
    theirs, whole = (
        _mean(frame, "albert", variant, "float32 exact").iloc[-1]
        for variant in ("SAN+skip", "SAN+skip, whole FFN step out")
    )
    return [
        judge(
            "MLPs without a skip of their own do not stop the collapse",
            paper="not in the paper: its “SAN + MLP” keeps the MLP's skip",
            ours=f"below {GONE:g} at " + ", ".join(parts),
            tolerance=f"{GONE:g} is reached",
            holds=collapsed,
        ),
        judge(
            "taking out the linear layers of ALBERT's MLP alone is as good as taking out the whole step",
            paper="“SAN + skip” of ALBERT keeps an activation, a skip and a norm, of BERT and XLNet none (their code)",
            ours=f"SAN+skip ends at {theirs:.3f} so, at {whole:.3f} with the whole step out, as in BERT and XLNet",
            tolerance="20 %",
            holds=bool(abs(whole / theirs - 1) < 0.2),
        ),
    ]


def _of_pretrained(frame: pd.DataFrame) -> list[Claim]:
    models = rows(frame, weights="pretrained", source="float32")[["model", "family"]].drop_duplicates()
    found = [_trained_collapses(frame, model) for model in models["model"]]
    given = {family: model for model, family in models.itertuples(index=False) if model != "MiniLM"}
    for family in FAMILIES:
        theirs = {v: _paper_curve(frame, family, v, "pretrained") for v in ("SAN", "SAN+skip", "full")}
        if family in given:
            found += [_as_pretrained(frame, family, given[family], v, known) for v, known in theirs.items()]
            continue
        ends = {v: (known["value"].iloc[0], known["value"].iloc[-1]) for v, known in theirs.items()}
        found.append(
            judge(
                f"pretrained {NAMES[family]} has the paper's curves",
                paper="; ".join(f"{v} {first:.2g} → {last:.2g}" for v, (first, last) in ends.items()) + " (Fig. 2)",
                ours="needs its weights: --data FOLDER",
                tolerance="none without them",
                holds=None,
            )
        )
    return found


def _trained_collapses(frame: pd.DataFrame, model: str) -> Claim:
    exact = partial(_mean, frame, source="float32 exact")
    san, full = (exact(model, variant, weights="pretrained") for variant in ("SAN", "full"))
    fresh, last, end = exact("bert", "SAN")[2], san.iloc[-1], full.iloc[-1]
    return judge(
        f"without skips and MLPs, {model} (pretrained) collapses, more slowly than fresh weights",
        paper="BERT .687, .676, .315, .139, .031, .0035, 2e-5, then the floor (Fig. 2)",
        ours=f"{', '.join(f'{value:.2g}' for value in san)}; whole {full.iloc[0]:.2f} → {end:.2f}; fresh BERT "
        f"{fresh:.2g} at block 2",
        tolerance="a tenth of the whole model's residual at the last block; a hundred times the fresh one's at block 2",
        holds=bool(last < 0.1 * end and san[2] > 100 * fresh),
    )


def _as_pretrained(frame: pd.DataFrame, family: str, model: str, variant: str, theirs: pd.DataFrame) -> Claim:
    mean = _mean(frame, model, variant, "float32", "pretrained")
    both = mean.index.intersection(theirs.index)
    apart = (mean.loc[both] - theirs.loc[both, "value"]).abs() / np.maximum(theirs.loc[both, "spread"], 1e-7)
    return judge(
        f"pretrained {NAMES[family]}, {variant}, has the paper's curve",
        paper=f"{theirs['value'].iloc[0]:.2g} → {theirs['value'].iloc[-1]:.2g} over 12 layers (Fig. 2)",
        ours=f"{model}: {mean.iloc[0]:.2g} → {mean.iloc[-1]:.2g}; farthest {apart.max():.1f} standard deviations",
        tolerance=f"{2 * SPREADS:g} standard deviations over the paper's texts, which are not ours; 12 blocks",
        holds=bool(apart.max() <= 2 * SPREADS) if len(mean) == len(theirs) else None,
    )
