"""The studies by name, ours and those of other packages. Imports nothing heavy: a study loads when it runs.

Another package adds a study by an entry point in the group `depthscope.studies` that names an `Entry` (or a list of
them), or by `STUDIES.register(Entry(...))`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from depthscope.registry import Registry

if TYPE_CHECKING:
    from depthscope_lab.papers.study import Study


@dataclass(frozen=True)
class Entry:
    """One study, before it is loaded."""

    name: str
    module: str  # the whole name of the module whose STUDY it is
    title: str  # what it shows
    cost: str  # of the full form, on 2 cores


def _check(entry: Entry) -> None:
    if not isinstance(entry, Entry):
        raise ValueError(f"expected a depthscope_lab.papers.Entry in depthscope.studies, got {entry!r}")
    if entry.name == "all" or entry.name.startswith("-"):
        raise ValueError(f"a study cannot be called {entry.name!r}: `depthscope reproduce` understands it otherwise")


_YU, _CAUSAL = "depthscope_lab.papers.yu2024", "depthscope_lab.papers.causal"
_DONG, _DOVONON = "depthscope_lab.papers.dong2021", "depthscope_lab.papers.dovonon2025"
_DEEP = "depthscope_lab.papers.deep"
STUDIES: Registry[Entry] = Registry(
    "study",
    "depthscope.studies",
    [
        Entry("yu2024-fig1", f"{_YU}.fig1", "BERT and ALBERT with 100 layers at initialisation", "2 to 3 min, 9 GB"),
        Entry("yu2024-fig2", f"{_YU}.fig2", "similarity, ξ₁/ξ₂ of the four steps, δ and ω, block by block", "10 s"),
        Entry("yu2024-fig3", f"{_YU}.fig3", "ξ₁/ξ₂ − 1 and r against the two estimates and our expectation", "2 s"),
        Entry("yu2024-fig4", f"{_YU}.fig4", "pre-norm: similarity and the three norms", "25 s"),
        Entry("yu2024-fig5", f"{_YU}.fig5", "de-escalation for three τ, and the transition at τ_c", "25 s"),
        Entry("yu2024-fig6", f"{_YU}.fig6", "ViTs trained: post-norm, pre-norm, de-escalated", "20 min"),
        Entry("yu2024-fig7", f"{_YU}.fig7", "Transformer-XL trained; with the future hidden, with warm-up", "35 min"),
        Entry("yu2024-fig8", f"{_YU}.fig8", "η against the perturbation t for three widths", "5 s"),
        Entry("yu2024-rate", f"{_YU}.rate", "the local rate 1/(1 + α²) down to t_div of 1e-17 and below", "25 s"),
        Entry("gradient-roles", f"{_YU}.gradient_roles", "BERT-100: where can attention learn?", "1 min"),
        Entry("leading-signal", f"{_YU}.leading_signal", "what speaks first before a training collapses?", "3 min"),
        Entry("depth-phase", f"{_DEEP}.phase", "τ × α at 100 blocks: theory's lines, and which cells train", "50 min"),
        Entry("yu2024-init", f"{_YU}.initialisation", "the same block under each initialiser", "14 s"),
        Entry("dong2021-collapse", f"{_DONG}.collapse", "BERT, ALBERT and XLNet without skips, MLPs or both", "3 min"),
        Entry(
            "dong2021-exponent",
            f"{_DONG}.exponent",
            "rank collapse to 1e-267: the exponent 3",
            "1 min",
        ),
        Entry("dong2021-paths", f"{_DONG}.paths", "accuracy by length of path, frozen and recomputed", "30 min"),
        Entry("dong2021-toy", f"{_DONG}.toy", "one attention layer, applied again and again to two points", "5 min"),
        Entry("dong2021-lengths", f"{_DONG}.lengths", "how many paths of each length architectures have", "2 s"),
        Entry("path-shares", f"{_DONG}.shares", "which lengths of path make the output of real models", "30 s"),
        Entry("skips-two-measures", f"{_DONG}.two_measures", "do skips save 100 blocks? y and t_div", "1 min, 4 GB"),
        Entry("causal-rate", f"{_CAUSAL}.rate", "causal attention: rate .625, the ramp, δ against n", "21 s"),
        Entry("causal-leak", f"{_CAUSAL}.leak", "the sequence mean lets a causal model see the future", "3 min"),
        Entry("depth-language", f"{_DEEP}.language", "100 causal blocks on letters: which remedy trains", "40 min"),
        Entry("language-collapse", f"{_DEEP}.language_collapse", "why a carried causal mean collapses", "4 min"),
        Entry("dovonon2025-theory", f"{_DOVONON}.theory", "which eigenvalues dominate: theory, simulated", "30 s"),
        Entry("three-papers", f"{_DOVONON}.three_papers", "one axis, three measures, three predictions", "1 min, 4 GB"),
        Entry("dovonon2025-fig2", f"{_DOVONON}.fig2", "three definitions of smoothing over depth", "1 min"),
        Entry("dovonon2025-fig5", f"{_DOVONON}.fig5", "eigenvalues of H: fresh, trained here, pretrained", "8 min"),
        Entry("dovonon2025-fig3", f"{_DOVONON}.fig3", "H steered to smooth and to sharpen, trained", "20 min"),
        Entry(
            "depth-1000",
            f"{_DEEP}.depth_1000",
            "a thousand blocks: the prescription and six controls",
            "130 min",
        ),
        Entry("dovonon2025-fig4", f"{_DOVONON}.fig4", "the sign of layer norm's weights, pre- and post-norm", "15 s"),
        Entry("remedies", f"{_DEEP}.remedies", "which remedy at 12, 48 and 100 blocks, trained", "1 h"),
    ],
    check=_check,
)


def load(name: str) -> Study:
    """The study of this name."""
    entry, owner = STUDIES[name], STUDIES.owner(name)
    try:
        module = import_module(entry.module)
    except ImportError as error:
        if owner == "depthscope":
            raise
        raise ValueError(f"the study {name!r} of {owner} cannot be loaded from {entry.module}: {error}") from error
    study: Study | None = getattr(module, "STUDY", None)
    if study is None or study.name != name:
        came = "there is none" if study is None else f"its name is {study.name!r}"
        raise ValueError(f"expected a STUDY called {name!r} in {entry.module}, of {owner}; {came}")
    return study
