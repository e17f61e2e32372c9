"""Why tokens grow alike: which step does it, and what theory says of attention's."""

from __future__ import annotations

import pandas as pd

from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.steps import attention_rates, growth_by_block
from depthscope.report.drawings import Drawing, Material
from depthscope.report.marks import lines


def steps(material: Material) -> Drawing | None:
    """What each kind of step has added to the log-odds by each block."""
    tables = []
    for subject in material.measured:
        assert subject.profile is not None
        facts = Facts(subject.profile)
        found = growth_by_block(subject.profile, facts.judged, facts.span) if facts.has(facts.judged) else None
        if found is not None and len(found):
            found = found.groupby(["block", "step"], sort=False)["growth"].sum().reset_index()
            tables.append(found.assign(total=found.groupby("step")["growth"].cumsum(), run=subject.label))
    if not tables:
        return None
    table = pd.concat(tables, ignore_index=True)
    kinds = list(dict.fromkeys(table["step"]))
    return Drawing(
        "Which step is to blame",
        "What each kind of step has added, from block 1 on, to the logarithm of the odds t_sim/t_div. A line that "
        "climbs is a step that makes tokens alike; one that falls drives them apart.",
        lines("steps", kinds, material, y="total", title="added to log odds", by="step"),
        {"steps": {}},
        section="Why",
        tables={"steps": table},
        rules=("steps",),
    )


def rates(material: Material) -> Drawing | None:
    """The rate of attention's step beside its bound and its estimate."""
    names = {
        "rate": "measured",
        "bound": "at least (Thm 2.6 of Yu & Zhang 2024)",
        "estimate": "estimate (Cor. 2.7)",
    }
    tables = []
    for subject in material.measured:
        assert subject.profile is not None
        facts = Facts(subject.profile)
        found = attention_rates(
            subject.profile, facts.about.get("placement"), facts.curve("token_similarity"), facts.span[1:]
        )
        if found is not None:
            long = found.melt("block", list(names), "series", "value")
            tables.append(long.assign(series=long["series"].map(names), run=subject.label))
    if not tables:
        return None
    return Drawing(
        "Attention's rate against theory",
        "By what factor attention's step multiplies the odds t_sim/t_div in each block, and what theory says at the "
        "measured size of the branch. Theory is for random weights: of trained ones it is a reference only.",
        lines("rates", list(names.values()), material, title="r per block"),
        {"rates": {}},
        section="Why",
        tables={"rates": pd.concat(tables, ignore_index=True)},
        rules=("theory",),
    )
