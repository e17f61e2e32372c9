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


_OURS = (  # name, module in this folder, what it shows, cost
    ("yu2024-fig1", "yu2024.fig1", "BERT and ALBERT with 100 layers at initialisation", "2 to 3 min, 9 GB"),
    ("yu2024-fig2", "yu2024.fig2", "similarity, ξ₁/ξ₂ of the four steps, δ and ω, block by block", "10 s"),
    ("yu2024-fig3", "yu2024.fig3", "ξ₁/ξ₂ − 1 and r against the two estimates and our expectation", "2 s"),
    ("yu2024-fig4", "yu2024.fig4", "pre-norm: similarity and the three norms", "25 s"),
    ("yu2024-fig5", "yu2024.fig5", "de-escalation for three τ, and the transition at τ_c", "25 s"),
    ("yu2024-fig6", "yu2024.fig6", "ViTs trained: post-norm, pre-norm, de-escalated", "20 min"),
    ("yu2024-fig7", "yu2024.fig7", "Transformer-XL trained; with the future hidden, with warm-up", "35 min"),
    ("yu2024-fig8", "yu2024.fig8", "η against the perturbation t for three widths", "5 s"),
    ("yu2024-rate", "yu2024.rate", "the local rate 1/(1 + α²) down to t_div of 1e-17 and below", "25 s"),
    ("gradient-roles", "yu2024.gradient_roles", "BERT-100: where can attention learn?", "1 min"),
    ("depth-phase", "deep.phase", "τ × α at 100 blocks: theory's lines, and which cells train", "50 min"),
    ("yu2024-init", "yu2024.initialisation", "the same block under each initialiser", "14 s"),
    ("dong2021-collapse", "dong2021.collapse", "BERT, ALBERT and XLNet without skips, MLPs or both", "3 min"),
    ("dong2021-exponent", "dong2021.exponent", "rank collapse to 1e-267: the exponent 3", "1 min"),
    ("dong2021-paths", "dong2021.paths", "accuracy by length of path, frozen and recomputed", "30 min"),
    ("dong2021-toy", "dong2021.toy", "one attention layer, applied again and again to two points", "5 min"),
    ("dong2021-lengths", "dong2021.lengths", "how many paths of each length architectures have", "2 s"),
    ("causal-rate", "causal.rate", "causal attention: rate .625, the ramp, δ against n", "21 s"),
    ("causal-leak", "causal.leak", "the sequence mean lets a causal model see the future", "3 min"),
    ("dovonon2025-theory", "dovonon2025.theory", "which eigenvalues dominate: theory, simulated", "30 s"),
    ("three-papers", "dovonon2025.three_papers", "one axis, three measures, three predictions", "1 min, 4 GB"),
    ("dovonon2025-fig2", "dovonon2025.fig2", "three definitions of smoothing over depth", "1 min"),
    ("dovonon2025-fig5", "dovonon2025.fig5", "eigenvalues of H: fresh and pretrained", "1 min"),
    ("dovonon2025-fig3", "dovonon2025.fig3", "H steered to smooth and to sharpen, trained", "20 min"),
    ("dovonon2025-fig4", "dovonon2025.fig4", "the sign of layer norm's weights, pre- and post-norm", "15 s"),
    ("remedies", "deep.remedies", "which remedy at 12, 48 and 100 blocks, trained", "1 h"),
)
STUDIES: Registry[Entry] = Registry(
    "study",
    "depthscope.studies",
    [Entry(name, f"depthscope_lab.papers.{module}", title, cost) for name, module, title, cost in _OURS],
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
