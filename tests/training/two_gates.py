"""Run by torchrun as two processes: a loop of one's own with a gate, then our loop; writes RANK.json."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

import depthscope
from collapsing import CollapsingTask
from depthscope.models import BlockConfig, Encoder
from tiny_training import run_in


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.manual_seed(0)
    model, x = Encoder(2, BlockConfig(16, 4)), torch.randn(2, 5, 16)
    rule = "token_similarity>0.99 for 2"
    with depthscope.watch(model, 1, stop_if=rule, on_alarm=lambda _: None) as watch:
        for step in range(9):
            model(x[:, :1].expand(2, 5, 16) if rank == 1 and step >= 3 else x)
            if watch.should_stop_together():
                break

    task = CollapsingTask(7)
    options = {"stop_if": ("token_similarity>0.99 for 3",), "watch_every": 2}
    outcome, _ = run_in(folder / "run", task.config, task=task, **options)
    found = {"loop": [outcome.step, outcome.stopped], "own": [step, watch.should_stop]}
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


main(Path(sys.argv[1]))
