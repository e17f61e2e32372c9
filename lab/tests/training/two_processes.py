"""Run twice, as ranks 0 and 1 that meet in a file; each prints JSON: the losses of the tiny model with `fully_shard`,
then where a loop of one's own and our loop stop by a gate.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

import depthscope
from collapsing import CollapsingTask
from depthscope.models import Block, BlockConfig, Encoder
from depthscope_lab.training.engine import learning_rate
from depthscope_lab.training.task import Share
from tiny_training import run_in, tiny_config, tiny_task


def main(steps: int, rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=240)
    )
    found = sharded(steps, rank) | {"own": stopped_alone(rank)}
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
    }  # for Accelerate
    found["ours"] = stopped(Path(meeting).with_name("run"))  # it ends the process group too
    print(json.dumps(found))


def sharded(steps: int, rank: int) -> dict[str, Any]:
    mesh = distributed.init_device_mesh("cpu", (2,))
    config = tiny_config(precision="float64", steps=steps)
    task = tiny_task(config)
    model = task.build()
    for block in model.modules():
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    losses = []
    for step in range(steps):
        batch = task.batch(step, Share(rank, 2), torch.device("cpu"))
        loss, _ = task.loss(model, batch, None)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, steps)
        optimizer.step()
        mean = loss.detach().clone()
        distributed.all_reduce(mean)
        losses.append(mean.item() / 2)
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    return {"losses": losses, "local": local, "all": sum(p.numel() for p in model.parameters())}


def stopped_alone(rank: int) -> list[Any]:
    """Only the second one's tokens become alike, at step 3."""
    torch.manual_seed(0)
    model, x = Encoder(2, BlockConfig(16, 4)), torch.randn(2, 5, 16)
    with depthscope.watch(model, 1, stop_if="token_similarity>0.99 for 2 after 0", on_alarm=lambda _: None) as watch:
        for step in range(9):
            model(x[:, :1].expand(2, 5, 16) if rank == 1 and step >= 3 else x)
            if watch.should_stop_together():
                break
    return [step, watch.should_stop]


def stopped(folder: Path) -> list[Any]:
    """Our loop watches in the first process."""
    task = CollapsingTask(3)
    outcome, _ = run_in(folder, task.config, task=task, stop_if=("token_similarity>0.99 for 3 after 0",), watch_every=1)
    return [outcome.step, outcome.stopped]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
