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


def beginning(names: list[str], incomplete: str) -> list[str]:
    """Those that begin with what was typed."""
    return [name for name in names if name.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Families; the other two forms of MODEL begin as their owners please."""
    return beginning(FAMILIES, incomplete)


def schemas(incomplete: str) -> list[str]:
    """Commands that have `--json`."""
    from depthscope.cli.documents import commands_with_schemas

    return beginning(commands_with_schemas(), incomplete)
