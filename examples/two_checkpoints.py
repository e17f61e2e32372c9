"""Two checkpoints of one model, compared block by block: what did training change? Five seconds.

    python examples/two_checkpoints.py [FOLDER FOLDER]

With two folders of profiles (`depthscope probe MODEL --out FOLDER` writes them) these are compared. Without, a small
encoder is trained to tell sequences apart by their mean token, and its profile is compared with the one from before.
"""

import sys

import torch
from torch import nn

import depthscope
from depthscope.models import BlockConfig, Encoder


def before_and_after(steps: int = 30) -> tuple[depthscope.Profile, depthscope.Profile]:
    torch.manual_seed(0)
    model, head = Encoder(6, BlockConfig(32, 4)), nn.Linear(32, 8)
    batch = torch.randn(8, 16, 32)
    before = depthscope.probe(model, batch)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(head(model(batch).mean(dim=1)), torch.arange(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss at the end: {loss.item():.2f} (a guess: {torch.log(torch.tensor(8.0)):.2f})")
    return before, depthscope.probe(model, batch)


def main() -> None:
    if len(sys.argv) > 2:
        before, after = (depthscope.Profile.load(folder) for folder in sys.argv[1:3])
    else:
        before, after = before_and_after()
    table = after.against(before).rename(columns={"this": "after", "other": "before"})
    print(table.query("measure == 'token_similarity'").drop(columns="measure").round(3).to_string(index=False))


if __name__ == "__main__":
    main()
