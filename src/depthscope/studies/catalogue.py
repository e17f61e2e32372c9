"""The studies by name, with what each shows and costs. Imports nothing heavy: the study loads when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from depthscope.studies.study import Study


@dataclass(frozen=True)
class Entry:
    """One study, before it is loaded."""

    module: str
    title: str
    cost: str  # of the full form, on 2 cores


ENTRIES: dict[str, Entry] = {
    "yu2024-fig1": Entry("yu2024.fig1", "BERT and ALBERT with 100 layers at initialisation", "2 to 3 min, 9 GB"),
    "yu2024-fig2": Entry("yu2024.fig2", "similarity, ξ₁/ξ₂ of the four steps, δ and ω, block by block", "10 s"),
    "yu2024-fig3": Entry("yu2024.fig3", "ξ₁/ξ₂ − 1 and r against the two estimates and our expectation", "2 s"),
    "yu2024-fig4": Entry("yu2024.fig4", "pre-norm: similarity and the three norms", "25 s"),
    "yu2024-fig5": Entry("yu2024.fig5", "de-escalation for three τ, and the transition at τ_c", "25 s"),
    "yu2024-fig6": Entry("yu2024.fig6", "ViTs trained: post-norm, pre-norm, de-escalated", "20 min"),
    "yu2024-fig7": Entry("yu2024.fig7", "Transformer-XL trained; with the future hidden, with warm-up", "35 min"),
    "yu2024-fig8": Entry("yu2024.fig8", "η against the perturbation t for three widths", "5 s"),
    "yu2024-rate": Entry("yu2024.rate", "the local rate 1/(1 + α²) down to t_div of 1e-17 and below", "25 s"),
    "yu2024-init": Entry("yu2024.initialisation", "the same block under each initialiser", "14 s"),
    "causal-rate": Entry("causal.rate", "causal attention: rate .625, the ramp, δ against n", "21 s"),
    "causal-leak": Entry("causal.leak", "the sequence mean lets a causal model see the future", "3 min"),
}


def load(name: str) -> Study:
    """The study of this name."""
    if name not in ENTRIES:
        from difflib import get_close_matches

        close = get_close_matches(name, ENTRIES, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"unknown study {name!r}{hint} Known: {', '.join(ENTRIES)}")
    return import_module(f"depthscope.studies.{ENTRIES[name].module}").STUDY
