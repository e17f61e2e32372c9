"""`depthscope agents`: docs/agents.md, for a coding agent that is to use depthscope on somebody's model."""

from __future__ import annotations

from pathlib import Path

_INSTALLED = Path(__file__).with_suffix(".md")  # where the wheel has it
_IN_A_CHECKOUT = Path(__file__).parents[3] / "docs" / "agents.md"


def agents() -> None:
    """Print what a coding agent must know: the verbs, JSON, exit codes, pitfalls."""
    page = _INSTALLED if _INSTALLED.exists() else _IN_A_CHECKOUT
    print(page.read_text(encoding="utf-8"), end="")
