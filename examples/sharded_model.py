"""A model whose weights two processes share (torch's `fully_shard`), measured as if it were whole. Fifteen seconds.

    python examples/sharded_model.py

Every process calls `probe` with the same inputs, and each gets the profile of the whole model. Two processes on one
machine, without a GPU.
"""

import tempfile
from datetime import timedelta

import torch
from torch import distributed, multiprocessing
from torch.distributed.fsdp import fully_shard

import depthscope
from depthscope.models import BlockConfig, Encoder


def model_and_batch() -> tuple[Encoder, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return Encoder(6, BlockConfig(32, 4), generator=generator), torch.randn(2, 16, 32, generator=generator)


def one_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    place, patience = f"file://{folder}/meeting", timedelta(seconds=120)
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=2, timeout=patience)
    model, batch = model_and_batch()
    for block in model.blocks:
        fully_shard(block, mesh=distributed.init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=distributed.init_device_mesh("cpu", (2,)))
    depthscope.probe(model, batch).save(f"{folder}/profile-{rank}")
    distributed.barrier()
    distributed.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(one_process, (folder,), nprocs=2)
        found = [depthscope.Profile.load(f"{folder}/profile-{rank}").curve("token_similarity") for rank in range(2)]
    model, batch = model_and_batch()
    whole = depthscope.probe(model, batch).curve("token_similarity")
    print("whole model:", ", ".join(f"{value:.4f}" for value in whole))
    for rank, curve in enumerate(found):
        largest = max(abs(one - other) for one, other in zip(curve, whole, strict=True))
        print(f"process {rank}:   the same to {largest:.0e}" if largest else f"process {rank}:   bitwise the same")


if __name__ == "__main__":
    main()
