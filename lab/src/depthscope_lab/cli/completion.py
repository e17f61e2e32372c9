"""What the shell completes of the commands that train. Names of other packages are not."""

from __future__ import annotations

from depthscope.cli.completion import beginning


def recipes(incomplete: str) -> list[str]:
    """Of `train` and `compare`."""
    from depthscope_lab.training.recipes import RECIPES

    return beginning(RECIPES.ours(), incomplete)


def variants(incomplete: str) -> list[str]:
    """One, or the last of several that are separated by commas."""
    from depthscope_lab.training.variants import VARIANTS

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in beginning(VARIANTS.ours(), last)]


def studies(incomplete: str) -> list[str]:
    """Or all of them."""
    from depthscope_lab.papers import STUDIES

    return beginning([*STUDIES.ours(), "all"], incomplete)
