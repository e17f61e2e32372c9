"""Run twice, as ranks 0 and 1 that meet in a file: the tiny model with `fully_shard`; prints its losses as JSON."""

import json
import sys
import time
from datetime import timedelta

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

from depthscope.models import Block
from depthscope.training.schedule import learning_rate
from depthscope.training.task import Share
from tiny_training import tiny_config, tiny_task


def main(steps: int, rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=240)
    )
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
    sharded = sum(parameter.to_local().numel() for parameter in model.parameters())
    if rank == 0:
        print(json.dumps({"losses": losses, "local": sharded, "all": sum(p.numel() for p in model.parameters())}))
    time.sleep(0.5)  # for the same reason as in engine.release
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
