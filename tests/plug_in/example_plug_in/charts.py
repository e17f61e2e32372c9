"""A chart: how unequal the tokens are in size, block by block."""

from depthscope.report import Drawing, Material
from depthscope.report.marks import lines


def token_spread(material: Material) -> Drawing | None:
    """The measure of this package over blocks; nothing where it was not taken."""
    if not material.has("token_spread"):
        return None
    labels = {"output token_spread": "largest over mean norm"}
    return Drawing(
        "How unequal the tokens are",
        "The largest token's norm over the mean one, behind each block. At 1 all tokens are of one size.",
        lines("numbers", list(labels.values()), material, title="ratio", labels=labels),
        {"numbers": {"station": ("output",), "measure": ("token_spread",)}},
    )
