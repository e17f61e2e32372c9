"""What is claimed of the collapse of BERT, ALBERT and XLNet, and of what the floor of float32 hides."""

from __future__ import annotations

import numpy as np
import pandas as pd

from depthscope_lab.papers.dong2021.pretrained import FAMILIES
from depthscope_lab.papers.study import Claim, judge

NAMES = {"bert": "BERT", "albert": "ALBERT", "xlnet": "XLNet"}
GONE = 1e-6  # a few times the floor of float32
LEFT = 0.05  # of the tokens' size beside the mean: less is nearly one token
SPREADS = 2.0  # standard deviations within which two numbers count as the same
NO_POSITIONS = "SAN, no position scores"  # of XLNet
CONSTANT = 1.5  # the largest factor between contractions that count as one rate; doubly exponential means a power of 3


def claims_of(frame: pd.DataFrame, *, is_paper: bool) -> list[Claim]:
    """`is_paper`: the shapes are the paper's, so that its numbers can be asked for."""
    found: list[Claim] = []
    for family in FAMILIES:
        found.append(_collapses(frame, family, is_paper))
        found += [_stays(frame, family, variant, is_paper) for variant in ("SAN+skip", "full")]
    found += [_floor(frame, is_paper), _below_the_floor(frame)]
    found += [_exponent(frame, family) for family in FAMILIES]
    found.append(_exponent(frame, "xlnet", NO_POSITIONS))
    found += [_readings(frame), _albert_reading(frame)]
    return found + _of_pretrained(frame)


def curve(frame: pd.DataFrame, model: str, variant: str, source: str, weights: str = "init") -> pd.Series:
    """Mean over samples by block, of the first draw of the weights."""
    return _by_draw(frame, model, variant, source, weights)[0]


def _by_draw(frame: pd.DataFrame, model: str, variant: str, source: str, weights: str = "init") -> pd.DataFrame:
    """Mean over samples: blocks × draws of the weights."""
    rows = frame[
        (frame["model"] == model)
        & (frame["variant"] == variant)
        & (frame["source"] == source)
        & (frame["weights"] == weights)
    ]
    return rows.pivot_table(index="block", columns="draw", values="value", aggfunc="mean")


def _paper_curve(frame: pd.DataFrame, family: str, variant: str, weights: str = "init") -> pd.DataFrame:
    rows = frame[(frame["source"] == "paper") & (frame["family"] == family) & (frame["weights"] == weights)]
    return rows[rows["variant"] == variant].set_index("block")[["value", "spread"]]


def _first_below(values: pd.Series, level: float) -> int:
    below = values.index[values < level]
    return int(below[0]) if len(below) else -1


def _collapses(frame: pd.DataFrame, family: str, is_paper: bool) -> Claim:
    said, ours, alike = [], [], []
    for variant in ("SAN", "SAN+MLP"):
        theirs = _paper_curve(frame, family, variant)["value"]
        mean = curve(frame, family, variant, "float32")
        first = _first_below(mean, GONE)
        alike.append(first > 0 and abs(first - _first_below(theirs, GONE)) <= 1)
        said.append(f"{variant} {theirs[0]:.2f}, {theirs[1]:.2g}, below {GONE:g} at layer {_first_below(theirs, GONE)}")
        ours.append(f"{variant} {mean[0]:.2f}, {mean[1]:.2g}, below {GONE:g} at block {first}")
    return judge(
        f"without attention's skip, {NAMES[family]} with fresh weights collapses, with MLPs or without",
        paper="; ".join(said) + " (Fig. 2)",
        ours="; ".join(ours),
        tolerance="one block: where a curve passes a level hangs on the weights drawn and the text",
        holds=all(alike) if is_paper else None if all(alike) else False,
        note="" if is_paper else "not of the paper's width and length",
    )


def _stays(frame: pd.DataFrame, family: str, variant: str, is_paper: bool) -> Claim:
    theirs, mean = _paper_curve(frame, family, variant), curve(frame, family, variant, "float32")
    draws = _by_draw(frame, family, variant, "float32")
    both = mean.index.intersection(theirs.index)
    of_draws = np.asarray(draws.std(axis=1, ddof=1))[: len(both)]
    spread = np.sqrt(theirs.loc[both, "spread"] ** 2 + 2 * of_draws**2)  # theirs is one draw, ours is another
    apart = (mean.loc[both] - theirs.loc[both, "value"]).abs() / spread
    end = int(mean.index[-1])
    worst = int(apart.idxmax())
    within = float((apart <= SPREADS).mean())
    return judge(
        f"{NAMES[family]} with fresh weights keeps its rank {'as it is' if variant == 'full' else 'with skips alone'}",
        paper=f"{theirs['value'].iloc[0]:.3f} → {theirs['value'].iloc[-1]:.3f} over 12 layers (Fig. 2)",
        ours=f"{mean.iloc[0]:.3f} → {mean[end]:.3f}; {within:.0%} of the blocks within {SPREADS:g} standard "
        f"deviations, the farthest {apart[worst]:.1f} at block {worst}",
        tolerance=f"at least {LEFT} is left, and half of the blocks within {SPREADS:g} standard deviations: the spread "
        "over texts in the figure with that over draws of the weights, measured here",
        holds=bool(mean[end] > LEFT and within >= 0.5) if is_paper else None if mean[end] > LEFT else False,
        note="" if is_paper else "not of the paper's width and length",
    )


def _floor(frame: pd.DataFrame, is_paper: bool) -> Claim:
    plain = curve(frame, "bert", "SAN", "float32").iloc[4:].mean()
    exact = curve(frame, "bert", "SAN", "float32 exact").iloc[4:].mean()
    theirs = _paper_curve(frame, "bert", "SAN")["value"].iloc[4:].mean()
    return judge(
        "the level where the curves end is rounding of float32",
        paper=f"{theirs:.2g} from layer 3 on, in every collapsed curve (Fig. 2)",
        ours=f"{plain:.2g} as the authors compute it; {exact:.2g} of the same tokens, measured without rounding",
        tolerance="a factor of 2",
        holds=bool(0.5 < plain / theirs < 2) if is_paper else None,
        note="a part of the floor is the measurement's, the rest the model's",
    )


def _below_the_floor(frame: pd.DataFrame) -> Claim:
    parts, all_lower = [], True
    for family in FAMILIES:
        single, double = (curve(frame, family, "SAN", source) for source in ("float32", "float64"))
        at = next((block for block in double.index if double[block] < 0.5 * single[block]), -1)
        lowest = double.min()
        all_lower &= bool(at > 0 and lowest < 1e-14)
        parts.append(f"{NAMES[family]} block {at}: {double.get(at, np.nan):.2g} for {single.get(at, np.nan):.2g}")
    return judge(
        "in float64 the collapse goes on below the floor of float32",
        paper="not in the paper: its curves end at 2e-7",
        ours="; ".join(parts) + "; all end at some 1e-16, the floor of float64",
        tolerance="less than half of what float32 shows, and 1e-14 reached",
        holds=all_lower,
    )


def _exponent(frame: pd.DataFrame, family: str, variant: str = "SAN") -> Claim:
    """Where the mean of a curve falls from block to block by a power or by a factor."""
    values = curve(frame, family, variant, "float64").iloc[1:]
    of_positions = "" if variant == "SAN" else ", and without scores of relative positions,"
    clean = values[values > 1e-14]  # a hundred times the floor
    falls = np.log(np.asarray(clean)[:-1] / np.asarray(clean)[1:])
    growing = len(falls) > 0 and bool(falls[-1] > CONSTANT * falls[0]) if len(falls) > 1 else None
    factors = ", ".join(f"{np.exp(-fall):.2g}" for fall in falls)
    first, second = (float(np.log(values.iloc[i])) for i in (0, 1))
    if growing is None:  # two blocks, and the next is rounding
        growing = bool(second / first > CONSTANT)
        ours = f"ln y {first:.2f} at block 1, {second:.2f} at block 2 (× {second / first:.2f}), then below float64"
    else:
        ours = f"y shrinks by {factors} from block 1 on"
    return judge(
        f"{NAMES[family]} without skips and MLPs{of_positions} loses rank doubly exponentially",
        paper="Thm 2.3: ‖res‖ ≤ c^((3^L − 1)/2)·‖res(X)‖^(3^L); Fig. 2 is to verify it",
        ours=ours,
        tolerance=f"the contraction grows by more than {CONSTANT} from block to block; a constant one is exponential",
        holds=growing,
        note=(
            "its scores have terms of relative positions, which do not fade as the tokens grow alike; the theorem's "
            "scores have none. Float32 ends before the difference shows"
            if family == "xlnet" and variant == "SAN"
            else "the cancellation-free residual of depthscope.theory follows it further"
        ),
    )


def _readings(frame: pd.DataFrame) -> Claim:
    parts, collapsed = [], True
    for family in FAMILIES:
        first = _first_below(curve(frame, family, "SAN+MLP, no skip at all", "float32"), GONE)
        kept = _first_below(curve(frame, family, "SAN+MLP", "float32"), GONE)
        collapsed &= first > 0
        parts.append(f"{NAMES[family]} block {first} (with the MLP's skip: {kept})")
    return judge(
        "MLPs without a skip of their own do not stop the collapse",
        paper="not in the paper: its “SAN + MLP” keeps the MLP's skip",
        ours=f"below {GONE:g} at " + ", ".join(parts),
        tolerance=f"{GONE:g} is reached",
        holds=collapsed,
    )


def _albert_reading(frame: pd.DataFrame) -> Claim:
    theirs = curve(frame, "albert", "SAN+skip", "float32 exact").iloc[-1]
    whole = curve(frame, "albert", "SAN+skip, whole FFN step out", "float32 exact").iloc[-1]
    return judge(
        "taking out the linear layers of ALBERT's MLP alone is as good as taking out the whole step",
        paper="“SAN + skip” of ALBERT keeps an activation, a skip and a norm, of BERT and XLNet none (their code)",
        ours=f"SAN+skip ends at {theirs:.3f} so, at {whole:.3f} with the whole step out, as in BERT and XLNet",
        tolerance="20 %",
        holds=bool(abs(whole / theirs - 1) < 0.2),
    )


def _of_pretrained(frame: pd.DataFrame) -> list[Claim]:
    own = frame[(frame["weights"] == "pretrained") & (frame["source"] == "float32")]
    models = own[["model", "family"]].drop_duplicates()
    found = [_trained_collapses(frame, model) for model in models["model"]]
    given = {family: model for model, family in models.itertuples(index=False) if model != "MiniLM"}
    for family in FAMILIES:
        if family in given:
            found += [_as_pretrained(frame, family, given[family], v) for v in ("SAN", "SAN+skip", "full")]
        else:
            found.append(_not_here(frame, family))
    return found


def _not_here(frame: pd.DataFrame, family: str) -> Claim:
    ends = {v: _paper_curve(frame, family, v, "pretrained")["value"] for v in ("SAN", "SAN+skip", "full")}
    return judge(
        f"pretrained {NAMES[family]} has the paper's curves",
        paper="; ".join(f"{v} {values.iloc[0]:.2g} → {values.iloc[-1]:.2g}" for v, values in ends.items())
        + " (Fig. 2)",
        ours="needs its weights: --data FOLDER",
        tolerance="none without them",
        holds=None,
    )


def _trained_collapses(frame: pd.DataFrame, model: str) -> Claim:
    san, full = (curve(frame, model, variant, "float32 exact", "pretrained") for variant in ("SAN", "full"))
    fresh = curve(frame, "bert", "SAN", "float32 exact")
    end = int(san.index[-1])
    return judge(
        f"without skips and MLPs, {model} (pretrained) collapses, more slowly than fresh weights",
        paper="BERT .687, .676, .315, .139, .031, .0035, 2e-5, then the floor (Fig. 2)",
        ours=f"{', '.join(f'{value:.2g}' for value in san)}; whole {full.iloc[0]:.2f} → {full[end]:.2f}; fresh BERT "
        f"{fresh[2]:.2g} at block 2",
        tolerance="a tenth of the whole model's residual at the last block; a hundred times the fresh one's at block 2",
        holds=bool(san[end] < 0.1 * full[end] and san[2] > 100 * fresh[2]),
    )


def _as_pretrained(frame: pd.DataFrame, family: str, model: str, variant: str) -> Claim:
    theirs = _paper_curve(frame, family, variant, "pretrained")
    about = f"{theirs['value'].iloc[0]:.2g} → {theirs['value'].iloc[-1]:.2g} over 12 layers (Fig. 2)"
    mean = curve(frame, model, variant, "float32", "pretrained")
    both = mean.index.intersection(theirs.index)
    apart = (mean.loc[both] - theirs.loc[both, "value"]).abs() / np.maximum(theirs.loc[both, "spread"], 1e-7)
    return judge(
        f"pretrained {NAMES[family]}, {variant}, has the paper's curve",
        paper=about,
        ours=f"{model}: {mean.iloc[0]:.2g} → {mean.iloc[-1]:.2g}; farthest {apart.max():.1f} standard deviations",
        tolerance=f"{2 * SPREADS:g} standard deviations over the paper's texts, which are not ours; 12 blocks",
        holds=bool(apart.max() <= 2 * SPREADS) if len(mean) == len(theirs) else None,
    )
