"""What the shell completes: names that are told without importing anything heavy. Those of other packages are not."""

from __future__ import annotations

# As in models/families.py, which imports torch; a test compares them.
FAMILIES = [
    "bert",
    "roberta",
    "albert",
    "distilbert",
    "mpnet",
    "electra",
    "modernbert",
    "deberta",
    "xlnet",
    "gpt2",
    "opt",
    "llama",
    "qwen2",
    "mistral",
    "gemma",
    "qwen3",
    "gemma2",
    "gemma3",
    "olmo2",
    "phi3",
    "cohere",
    "gpt-neox",
    "falcon",
    "bloom",
    "t5",
    "bart",
    "pegasus",
    "vit",
    "deit",
    "dinov2",
    "encoder",
]


def _beginning(names: list[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Families; the other two forms of MODEL begin as their owners please."""
    return _beginning(FAMILIES, incomplete)


def recipes(incomplete: str) -> list[str]:
    """Of `train` and `compare`."""
    from depthscope.training.recipes import RECIPES

    return _beginning(RECIPES.ours(), incomplete)


def variants(incomplete: str) -> list[str]:
    """One, or the last of several that are separated by commas."""
    from depthscope.training.variants import VARIANTS

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _beginning(VARIANTS.ours(), last)]


def studies(incomplete: str) -> list[str]:
    """Or all of them."""
    from depthscope.studies import STUDIES

    return _beginning([*STUDIES.ours(), "all"], incomplete)


def schemas(incomplete: str) -> list[str]:
    """Commands that have `--json`."""
    from depthscope.cli.documents import commands_with_schemas

    return _beginning(commands_with_schemas(), incomplete)
