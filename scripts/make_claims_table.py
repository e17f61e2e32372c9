"""Prints the table "All claims by verdict" of docs/studies/README.md, from the folders that `reproduce` has written.

depthscope reproduce all --out results
python scripts/make_claims_table.py results
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import get_args

from depthscope.report.formats import Claim, Verdict
from depthscope_lab.papers import STUDIES

ORDER = ("not reproduced", "not testable here", "reproduced")


def table(claims: dict[str, list[Claim]]) -> str:
    """A sentence that counts findings and checks by verdict, and a row per claim; `claims` by study."""
    every = [(name, claim) for name, own in claims.items() for claim in own]
    kinds = Counter((claim.kind, claim.verdict) for _, claim in every)
    counted = "; ".join(
        f"{sum(kinds[kind, verdict] for verdict in get_args(Verdict))} {kind}s: "
        + ", ".join(f"{kinds[kind, verdict]} {verdict}" for verdict in reversed(ORDER))
        for kind in ("finding", "check")
    )
    lines = [counted, "", "| verdict | claim | number | study |", "| --- | --- | --- | --- |"]
    for verdict in ORDER:
        lines += [row(name, claim) for name, claim in every if claim.verdict == verdict]
    return "\n".join(lines)


def row(study: str, claim: Claim) -> str:
    """What is true by construction is said to be a check; what is not in the paper, ours."""
    about = [
        word for word, told in (("ours", claim.paper.startswith("ours")), ("check", claim.kind == "check")) if told
    ]
    title = claim.claim[0].upper() + claim.claim[1:] + (f" (*{', '.join(about)}*)" if about else "")
    verdict = claim.verdict if claim.verdict == "reproduced" else f"**{claim.verdict}**"
    cells = [verdict, title, claim.ours, f"[{study}]({study}.md)"]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def main() -> None:
    folder = Path(sys.argv[1])
    found = {name: folder / name / "claims.json" for name in STUDIES if (folder / name / "claims.json").exists()}
    read = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in found.items()}
    print(table({name: [Claim(**claim) for claim in claims] for name, claims in read.items()}))


if __name__ == "__main__":
    main()
