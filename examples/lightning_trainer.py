"""Lightning with a callback that logs depth through the module's own log. Ten seconds.

    python examples/lightning_trainer.py

A small encoder learns to give back what it reads. The callback measures every second step as the tokens pass; no pass
is added and no bit of the training changes. It would stop the trainer if the tokens became alike, and name the last
good checkpoint.
"""

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import depthscope
from depthscope.models import BlockConfig, Encoder


class Copy(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(6, BlockConfig(32, 4))

    def training_step(self, batch: Tensor, _index: int) -> Tensor:
        return (self.encoder(batch) - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    torch.manual_seed(0)
    rule = "token_similarity>0.99 for 3"  # at three looks in a row, and the loss does not fall: it stops
    callback = depthscope.DepthCallback(every=2, stop_if=rule)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = lightning.Trainer(max_steps=5, accelerator="cpu", callbacks=[callback], **quiet)
    trainer.fit(Copy(), DataLoader(list(torch.randn(24, 12, 32)), batch_size=4))
    for step, rows in callback.watch.records.query("measure == 'token_similarity' and block == 6").groupby("step"):
        print(f"step {step}: token similarity of the last block {rows['value'].item():.3f}")
    print(f"stopped by the rule: {callback.watch.should_stop}")
    print("in Lightning's log:", sorted(name for name in trainer.callback_metrics if name.startswith("depth/")))


if __name__ == "__main__":
    main()
