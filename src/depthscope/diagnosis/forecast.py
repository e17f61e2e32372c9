"""Where the blocks lead and why: the law that they follow, attention's rate beside theory, attention's spectrum."""

from __future__ import annotations

import math

from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.rules import arrives, end, finding, no_forecast, rises
from depthscope.measures import EQUAL
from depthscope.usage import Finding


def trend(f: Facts) -> Finding | None:
    """The law that the blocks follow, and where it leads; or why there is none."""
    why = no_forecast(f)
    if why is not None:
        said = f"No forecast for more than {f.blocks} blocks: {why}."
        asked = rises(f) and end(f) < EQUAL and f.blocks >= 4
        return finding("no forecast", said, blocks=f.blocks) if asked else None
    if f.trend is None:
        return None
    rho, feed, exponent, error = f.trend.map.rho, f.trend.map.feed, f.trend.exponent, f.trend.error
    odds = "s = t_sim/(1 − t_sim)" if f.judged == "token_similarity" else "s = similarity/(1 − similarity)"
    if exponent is not None:
        law = (
            f"{odds} {'grows' if exponent > 0 else 'falls'} like block^{exponent:.2f} over the last half of the blocks"
        )
        numbers = {"exponent": exponent, "error": error}
    else:
        law = f"From block to block {odds} becomes {rho:.3f} s + {feed:.2g} (± {error:.1%})"
        numbers = {"rho": rho, "feed": feed, "error": error}
    if end(f) >= EQUAL:
        if rho <= 1:
            return None
        if exponent is not None:
            return finding("trend passed", f"{law}.", **numbers)
        half = math.log(2) / math.log(rho)
        said = f"{law}: in the end the differences' share of the energy halves every {half:.1f} blocks."
        return finding("trend passed", said, half=half, **numbers)
    best, low, high = f.reach
    if best is None:
        said = f"{law}: no sign of passing 0.99 within {f.horizon} blocks."
        return finding("trend settles", said, horizon=f.horizon, **numbers)
    if not arrives(f) or not rises(f):
        return None
    between = "" if low == high else f" ({low or best} to {high})" if high else f" ({low or best} or later)"
    said = f"{law}; at this rate similarity passes 0.99 at about block {best}{between}."
    return finding("trend arrives", said, arrival=best, **numbers)


def theory(f: Facts) -> Finding | None:
    found = f.attention
    if found is None or found.omega_delta >= 1:  # else the theorem says nothing
        return None
    caveat = ", a reference only: the weights are trained" if f.look == "trained" else ""
    said = (
        f"Attention's step makes the differences {found.rate:.3f} times smaller per block (r); theory at this branch "
        f"size: at least {found.bound:.3f} (Thm 2.6), about {found.estimate:.3f} (Cor. 2.7){caveat}."
    )
    return finding("theory", said, rate=found.rate, bound=found.bound, estimate=found.estimate,
                    omega_delta=found.omega_delta)  # fmt: skip


def gap(f: Facts) -> Finding | None:
    if math.isnan(f.mean_gap):
        return None
    caveat = "; heads that look at an outlier have a large gap and carry little" if f.sink is not None else ""
    said = (
        f"Attention's spectral gap 1 − |λ₂| is {f.mean_gap:.3f} on average; near 1 a head passes on little but a "
        f"mean{caveat}."
    )
    return finding("spectra", said, gap=f.mean_gap)
