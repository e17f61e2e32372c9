"""Draws the picture of the README, docs/images/smollm2.png, from the numbers of the gallery. It runs no model.

python scripts/gallery/picture.py
"""

from __future__ import annotations

import json
from pathlib import Path

from depthscope.drawing.palette import BLUE, GREY, VERMILION
from depthscope.drawing.panels import label, legend_inside, panels

DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    first, second = json.loads((DOCS / "gallery" / "data" / "smollm2.json").read_text())["texts"]
    title = "SmolLM2-135M, trained: six of its 30 blocks make three quarters of what skipping costs"
    figure, (cost, alike) = panels(2, width=4.6, height=2.9, title=title)
    both = zip(first["by_block"]["skip_loss"], second["by_block"]["skip_loss"], strict=True)
    skipped = [(one + other) / 2 for one, other in both]  # mean of two batches
    blocks = list(range(1, len(skipped) + 1))
    total, done, dear = sum(skipped), 0.0, set()
    for block in sorted(blocks, key=lambda block: -skipped[block - 1]):
        if done >= 0.75 * total:
            break
        dear.add(block)
        done += skipped[block - 1]
    print("blocks with three quarters of the cost:", sorted(dear), "cheapest:", min(skipped))
    cost.bar(blocks, skipped, color=[VERMILION if block in dear else GREY for block in blocks])
    cost.set_yscale("log")
    label(cost, "What skipping a block costs", "block", "rise of the loss (nats, log)")
    for name, shown, colour in (
        ("token_similarity", "of tokens", BLUE),
        ("direction_similarity", "of directions, without outliers", VERMILION),
    ):
        alike.plot(range(len(skipped) + 1), first["curves"][name]["mean"], color=colour, label=shown, linewidth=1.6)
    alike.set_ylim(0, 1)
    label(alike, "From block 12 one huge token hides similarity", "after block", "similarity")
    legend_inside(alike)
    figure.savefig(DOCS / "images" / "smollm2.png", dpi=150)


if __name__ == "__main__":
    main()
