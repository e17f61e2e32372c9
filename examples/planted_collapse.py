"""Three planted models whose answer is known: does the probe report what is there, and nothing else?

    python examples/planted_collapse.py [FOLDER]

1. tokens of each sequence collapse onto their mean; different sequences stay different;
2. sequences collapse onto each other, tokens do not: this is no token collapse;
3. all tokens but one are equal, and that one is a hundred times as large: a collapse that the
   similarity of raw tokens does not see, and that of directions does.
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


class Sink(nn.Module):
    """Makes token 0 of a sequence a hundred times as large as the others."""

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.ones(x.shape[1], 1)
        scale[0] = 100
        return x * scale


def collapsing(axis: int) -> nn.Sequential:
    """Eight planted layers whose pull rises to 1."""
    generator = torch.Generator().manual_seed(0)
    return nn.Sequential(*(Planted(axis, (layer / DEPTH) ** 2, generator) for layer in range(1, DEPTH + 1)))


class SinkModel(nn.Module):
    """127 equal tokens and a huge one, through layers that only rotate."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.sink = Sink()
        self.layers = nn.ModuleList(Planted(1, 0.0, generator) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.sink(x)
        for layer in self.layers:
            x = layer(x)
        return x


def profiles() -> dict[str, Profile]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(SEQUENCES, TOKENS, WIDTH, generator=generator)
    equal = torch.randn(2, 1, WIDTH, generator=generator).repeat(1, 128, 1)
    equal[:, 0] = torch.randn(2, WIDTH, generator=generator)
    measures = ["default", "effective_rank"]
    return {
        "tokens collapse": probe(collapsing(axis=1), tokens, measures=measures),
        "sequences collapse": probe(collapsing(axis=0), tokens, measures=measures),
        "one huge token": probe(SinkModel(), equal, measures=measures),
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
        for measure in ("token_similarity", "cosine_similarity", "direction_similarity"):
            axes.plot(profile.curve(measure), label=measure.replace("_", " "), linewidth=2)
        rank = profile.curve("effective_rank")
        axes.plot([value / rank[0] for value in rank], label="effective rank / first", linestyle="--", color="black")
        axes.set(title=name, xlabel="block", ylim=(-0.05, 1.08))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=8)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "planted_collapse.png", dpi=150)


if __name__ == "__main__":
    main()
