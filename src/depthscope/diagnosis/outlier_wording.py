"""The numbers and phrases of the rules about outlier tokens and rogue features: `wording.py` has the others."""

from __future__ import annotations

import math

from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.outliers import Run
from depthscope.diagnosis.wording import Values, raw_and_robust
from depthscope.naming import blocks_of

_LETTERS = 20  # of a token's text that are shown


def sink(f: Facts) -> Values:
    found = f.sink
    assert found is not None
    born = found.largest.first
    numbers = {"token": found.token, "born": born, "samples": found.samples, "peak": found.largest.peak}
    share = f.sink_attention
    words: Values = {
        "of": float(f.about.get("samples", found.samples)),
        "texts": _texts(found.texts),
        "runs": ", ".join(_run(run, first=run is found.runs[0]) for run in found.runs),
        "others": f"; {found.others} more positions" if found.others else "",
        "birth": f"Its large norm is born in block {born}." if born else "It enters as one.",
        "drawn": "" if math.isnan(share) else f" The blocks that read outliers give them {share:.0%} of attention.",
    }
    return raw_and_robust(f) | {name: float(value) for name, value in numbers.items()} | words


def _run(run: Run, *, first: bool) -> str:
    size = f"up to {run.peak:.0f} ×{' the median norm' if first else ''}"
    if run.first:
        return f"{size} after {blocks_of(range(run.first, run.last + 1))}"
    return f"{size} at the entrance" + (f" and up to block {run.last}" if run.last else "")


def _texts(texts: tuple[str, ...]) -> str:
    """Up to three texts in quotes, on one line."""
    shown = [repr(text if len(text) <= _LETTERS else text[:_LETTERS] + "…") for text in texts[:3]]
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return f" ({', '.join(shown)}{more})" if shown else ""


def few_outliers(f: Facts) -> Values:
    assert f.outliers is not None
    numbers = {"carriers": f.outliers.carriers, "peak": f.outliers.peak, "of": f.about.get("samples", 1)}
    return {name: float(value) for name, value in numbers.items()}


def rogue_feature(f: Facts, least: float) -> Values:
    found = f.rogue_feature(least)
    assert found is not None
    without = " (outlier tokens left out)" if f.sink is not None and f.sink.is_there(found.block) else ""
    numbers = {"feature": found.feature, "share": found.share, "block": found.block, "samples": found.samples}
    about = {"width": f.about.get("width", math.nan), "of": f.about.get("samples", found.samples)}
    return {"without": without} | {name: float(value) for name, value in (numbers | about).items()}
