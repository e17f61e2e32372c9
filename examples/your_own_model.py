"""A model that depthscope has never seen: its blocks are found, measured, and de-escalated. Three seconds.

    python examples/your_own_model.py

Nothing is taken on trust: one pass is followed to find the blocks, others tell whether a token sees later ones, and
the notes say what was found and what was not seen.
"""

import torch
from torch import Tensor, nn

import depthscope
from depthscope.remedies import DeEscalate


class Layer(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.mix = nn.MultiheadAttention(width, 4, batch_first=True)
        self.think = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x + self.mix(x, x, x)[0])
        return self.second(x + self.think(x))


class Mine(nn.Module):
    def __init__(self, depth: int = 24):
        super().__init__()
        self.tower = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.tower:
            x = layer(x)
        return x


def main() -> None:
    torch.manual_seed(0)
    model, batch = Mine().eval(), torch.randn(4, 32, 64)
    profile = depthscope.probe(model, batch)
    print("\n".join(profile.metadata["notes"]))
    depthscope.apply(model, DeEscalate(tau=0.5), inputs=batch)
    after = depthscope.probe(model, batch)
    for block in (0, 6, 12, 24):
        before, now = (found.curve("token_similarity")[block] for found in (profile, after))
        print(f"block {block:2}: token similarity {before:.3f} before, {now:.3f} with τ = 0.5")


if __name__ == "__main__":
    main()
