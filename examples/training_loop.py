"""A training loop that is watched: at one learning rate a model learns, at another its tokens collapse and a gate stops
it. Ten seconds.

    python examples/training_loop.py

A post-norm ViT of 12 blocks learns which of four pictures it sees through noise. At the larger rate its tokens become
equal within twenty steps, and the loss stays that of a guess, ln 4 = 1.39. The watch sees why, and its rule ends the
loop: three looks in a row at which the tokens of half of the blocks were alike, and a loss that does not fall. Up to
there no bit of the training changes.
"""

import torch
from torch import nn

import depthscope
from depthscope.models import BlockConfig, VisionTransformer


def train(learning_rate: float, steps: int = 40) -> tuple[float, depthscope.watching.Watch]:
    generator = torch.Generator().manual_seed(0)
    shape = {"image_size": 8, "patch_size": 2, "channels": 1, "classes": 4}
    model = VisionTransformer(12, BlockConfig(32, 4), **shape, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    pictures = 2 * torch.randn(4, 1, 8, 8, generator=generator)
    losses = []
    rule = "token_similarity>0.99 for 3 after 20"  # in half of the blocks at three watched steps, not before step 20
    with depthscope.watch(model, every=5, stop_if=rule, on_alarm=lambda alarm: print(f"  stopped: {alarm}")) as watch:
        for _ in range(steps):
            labels = torch.randint(4, (16,), generator=generator)
            noise = torch.randn(16, 1, 8, 8, generator=generator)
            loss = nn.functional.cross_entropy(model(pictures[labels] + noise), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            watch.tell(loss=loss)  # while it falls, the rule says nothing
            if watch.should_stop:  # of several processes: watch.should_stop_together()
                break
    return sum(losses[-10:]) / 10, watch


def main() -> None:
    for learning_rate in (0.003, 0.01):
        print(f"learning rate {learning_rate}")
        loss, watch = train(learning_rate)
        print(f"  loss {loss:.2f} over the last ten steps")
        rows = watch.records.query("measure == 'token_similarity' and block == 12")
        for step, value in zip(rows["step"], rows["value"], strict=True):
            print(f"  step {step:2}: token similarity of the last block {value:.3f}")


if __name__ == "__main__":
    main()
