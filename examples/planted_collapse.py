"""Three planted models whose answer is known: does the probe report what is there, and nothing else? Five seconds.

    python examples/planted_collapse.py [FOLDER]

1. tokens of each sequence collapse onto their mean; different sequences stay different;
2. sequences collapse onto each other, tokens do not: this is no token collapse;
3. all tokens but one collapse, and that one is a hundred times as large: in the end 127 equal tokens
   and a huge one. The similarity of raw tokens does not see it, that of directions does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from depthscope.probing import Profile, probe

DEPTH, WIDTH, SEQUENCES, TOKENS = 8, 32, 16, 24


class Planted(nn.Module):
    """An orthogonal map, then a pull of strength `weight` towards the mean over `axis` (1: tokens, 0: sequences)."""

    def __init__(self, axis: int, weight: float, generator: torch.Generator):
        super().__init__()
        matrix = torch.randn(WIDTH, WIDTH, generator=generator)
        self.rotation = nn.Parameter(torch.linalg.qr(matrix).Q)
        self.axis, self.weight = axis, weight

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.rotation
        return torch.lerp(x, x.mean(dim=self.axis, keepdim=True).expand_as(x), self.weight)


def collapsing(axis: int) -> nn.Sequential:
    """Eight planted layers whose pull rises to 1."""
    generator = torch.Generator().manual_seed(0)
    return nn.Sequential(*(Planted(axis, (layer / DEPTH) ** 2, generator) for layer in range(1, DEPTH + 1)))


class BehindASink(nn.Module):
    """The collapsing layers for all tokens but the first, which is a hundred times as large as the others."""

    def __init__(self, layer: Planted):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :1] @ self.layer.rotation, self.layer(x[:, 1:])], dim=1)


def profiles() -> dict[str, Profile]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(SEQUENCES, TOKENS, WIDTH, generator=generator)
    with_sink = torch.randn(2, 128, WIDTH, generator=generator) + torch.randn(2, 1, WIDTH, generator=generator)
    with_sink[:, 0] *= 100
    behind_a_sink = nn.Sequential(*(BehindASink(layer) for layer in collapsing(axis=1)))
    measures = ["light", "effective_rank"]
    return {
        "tokens collapse": probe(collapsing(axis=1), tokens, measures=measures),
        "sequences collapse": probe(collapsing(axis=0), tokens, measures=measures, token_axis=1),
        "tokens collapse behind a sink": probe(behind_a_sink, with_sink, measures=measures),
    }


def main() -> None:
    found = profiles()
    columns = ["token_similarity", "cosine_similarity", "direction_similarity", "effective_rank", "largest_token_share"]
    for name, profile in found.items():
        print(f"\n{name}\n{profile.summary()[columns].round(3).to_string()}")
    if len(sys.argv) > 1:
        draw(found, Path(sys.argv[1]))


def draw(found: dict[str, Profile], folder: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    for axes, (name, profile) in zip(figure.subplots(1, 3, sharey=True), found.items(), strict=True):
        for measure, width in (("token_similarity", 5), ("direction_similarity", 2), ("cosine_similarity", 1.5)):
            axes.plot(profile.curve(measure), label=measure.replace("_", " "), linewidth=width, alpha=0.8)
        rank = profile.curve("effective_rank")
        axes.plot([value / rank[0] for value in rank], label="effective rank, relative", linestyle="--", color="black")
        axes.set(title=name, xlabel="block", ylim=(-0.05, 1.08))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=8)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "planted_collapse.png", dpi=150)


if __name__ == "__main__":
    main()
