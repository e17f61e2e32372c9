"""Run twice, as ranks 0 and 1 that meet in a file: a Llama that they share, probed; the answers are in a folder."""

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import depthscope
from depthscope.remedies import DeEscalate, ResidualWeight

IDS = torch.arange(24).reshape(2, 12)
PLAN = {name: ColwiseParallel() for name in ("query", "key", "value")} | {"out": RowwiseParallel()}


def llama(folder: Path) -> nn.Module:
    return hf.AutoModelForCausalLM.from_pretrained(folder).eval()


def tensor_parallel(folder: Path) -> nn.Module:
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_plan="auto")
    return hf.AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).eval()


def fully_sharded(folder: Path) -> nn.Module:
    model, mesh = llama(folder), distributed.init_device_mesh("cpu", (2,))
    for block in model.model.layers:
        fully_shard(block.self_attn, mesh=mesh)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Attend(nn.Module):
    """A block of a family that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        heads = (part(normed).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.query, self.key, self.value))
        return x + self.out(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class HalfOfTheTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.chunk(2, dim=1)[distributed.get_rank()]


def unknown(sequence_parallel: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), *(Attend() for _ in range(3)))
    mesh = distributed.init_device_mesh("cpu", (2,))
    plan = PLAN
    if sequence_parallel:  # every process has half of the tokens between the linear layers
        model[0] = HalfOfTheTokens()
        plan = {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("query", "key", "value")}
        plan |= {"norm": SequenceParallel(use_local_output=True), "out": RowwiseParallel(output_layouts=Shard(1))}
    for block in model[1:]:
        parallelize_module(block, mesh, plan)
    return model.eval()


def as_dtensors() -> nn.Module:
    model = unknown()
    mesh = distributed.init_device_mesh("cpu", (2,))
    layouts = {"input_layouts": Replicate(), "desired_input_layouts": Replicate(), "use_local_output": False}
    for block in model[1:]:
        parallelize_module(block, mesh, PrepareModuleInput(**layouts))
    return model


def refusal(act: Callable[[], object]) -> str:
    try:
        act()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def answers(mode: str, model: nn.Module, folder: Path, rank: int) -> dict[str, Any]:
    depthscope.probe(model, IDS, measures="all", stations="all").save(folder / f"{mode}-{rank}")
    refused = {"gradients": "", "other inputs": ""}
    if mode == "fully_sharded":
        refused["gradients"] = refusal(lambda: depthscope.probe(model, IDS, gradients=True))
        refused["other inputs"] = refusal(lambda: depthscope.probe(model, IDS + rank, measures="all"))
    depthscope.apply(model, DeEscalate(0.5), ResidualWeight(0.5))
    return {"logits": model(IDS).logits.tolist()} | refused


def answers_of_unknown(rank: int) -> dict[str, Any]:
    tokens = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(0))
    return {
        "notes": depthscope.probe(unknown(), tokens, measures="all").metadata["notes"],
        "other tokens": refusal(lambda: depthscope.probe(unknown(), tokens + rank)),
        "half": refusal(lambda: depthscope.probe(unknown(sequence_parallel=True), tokens, token_axis=1)),
        "spread": refusal(lambda: depthscope.probe(as_dtensors(), tokens)),
    }


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    models = {"tensor_parallel": tensor_parallel, "fully_sharded": fully_sharded}
    said = {mode: answers(mode, split(folder), folder, rank) for mode, split in models.items()}
    said["unknown"] = answers_of_unknown(rank)
    (folder / f"said-{rank}.json").write_text(json.dumps(said))
    distributed.barrier()
    time.sleep(0.5)  # for the same reason as in training's engine.release
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
