"""What a remedy costs in training: ratios of CPU time of one thread, from one run, each pair back to back.

    python benchmarks/remedies.py             # all of it, about ten minutes on 2 cores
    python benchmarks/remedies.py time        # one part of: time, operation, memory
    python benchmarks/remedies.py --means     # the token means on the deep ViT

time       a training step (forward, backward, AdamW) with ÷ without, and how many torch operations it adds
operation  forward and backward of the operation alone, and the n × n matrix as written in the paper, ÷ two bounds: a
           copy each way into memory that is there (`bandwidth`: X is read and Y is written once), and the same copies
           as an operation of autograd, which makes its results (`copying`)
memory     peak memory of a process that trains with ÷ one that trains without (give it alone: a child's peak
           counts what its parent had), and what autograd keeps for the backward pass, counted exactly
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import depthscope
from depthscope.models import BlockConfig, Encoder, VisionTransformer
from depthscope.remedies import (
    ContraNorm,
    DeEscalate,
    MVSplit,
    PairNorm,
    Reparameterise,
    ResidualWeight,
    deescalate,
)

FORMS = {
    "full mean": DeEscalate(1.0, mixing="full"),
    "prefix mean": DeEscalate(1.0, mixing="prefix"),
    "EMA": DeEscalate(1.0, mixing="ema"),
    "residual weight": ResidualWeight(0.5),
    "H = VΛV⁻¹": Reparameterise(),
}
FORMS |= {  # of other papers
    "weight per block": ResidualWeight(0.5, "block"),
    "per feature": ResidualWeight(0.5, "feature"),
    "PairNorm": PairNorm(),
    "ContraNorm": ContraNorm(),
    "MV-Split": MVSplit(),
}


def bert() -> tuple[nn.Module, Tensor]:
    return Encoder(12, BlockConfig(768, 12)), torch.randn(2, 128, 768)


def vit() -> tuple[nn.Module, Tensor]:
    return VisionTransformer(80, BlockConfig(192, 8, 384)), torch.randn(16, 3, 32, 32)


MODELS = {"BERT-base shape, 2 × 128 tokens": bert, "ViT 80 × 192, 16 × 65 tokens": vit}


def trainer(make: Callable[[], tuple[nn.Module, Tensor]], form: str | None) -> Callable[[], None]:
    """One step of training, as a function."""
    torch.manual_seed(0)
    model, inputs = make()
    if form is not None:
        depthscope.apply(model, FORMS[form])
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        optimiser.zero_grad()
        model(inputs).square().mean().backward()
        optimiser.step()

    return step


class Counted(TorchDispatchMode):
    """How many operations of torch run, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return function(*args, **(kwargs or {}))


def operations(call: Callable[[], object]) -> int:
    with Counted() as counted:
        call()
    return counted.operations


def ratios(plain: Callable[[], object], other: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Median and quartiles of other ÷ plain, CPU time, in alternating order."""
    for call in (plain, other):
        call()
    found = []
    for number in range(rounds):
        order = (plain, other) if number % 2 else (other, plain)
        spent = {call: seconds(call) for call in order}
        found.append(spent[other] / spent[plain])
    low, middle, high = statistics.quantiles(found, n=4)
    return middle, low, high


def seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def compare_time(models: dict[str, Callable[[], Any]] | None = None, forms: tuple[str, ...] = tuple(FORMS)) -> None:
    for name, make in (models or MODELS).items():
        plain = trainer(make, None)
        without = operations(plain)
        for form in forms:
            step = trainer(make, form)
            more = operations(step) - without
            middle, low, high = ratios(plain, step, rounds=7)
            print(
                f"{name:<34} {form:<16} {middle:.3f} ({low:.3f}–{high:.3f}) × the step without, "
                f"{more} operations more than its {without}",
                flush=True,
            )


def compare_means() -> None:
    compare_time({"ViT 80 × 192, 16 × 65 tokens": vit}, ("full mean", "prefix mean", "EMA"))


class Copy(torch.autograd.Function):
    """The least that an operation with a new result can do."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor) -> Tensor:
        return tokens.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clone()


def compare_operation() -> None:
    for shape in ((32, 65, 192), (4, 128, 768), (2, 1024, 768)):
        x = torch.randn(shape, requires_grad=True)
        gradient = torch.randn(shape)
        plain, there, back = x.detach(), torch.empty(shape), torch.empty(shape)
        matrix = torch.eye(shape[1]) - 1 / shape[1]

        def bandwidth(plain: Tensor = plain, there: Tensor = there, back: Tensor = back, g: Tensor = gradient) -> None:
            there.copy_(plain)
            back.copy_(g)

        def both_ways(change: Callable[[Tensor], Tensor], x: Tensor = x, gradient: Tensor = gradient) -> None:
            torch.autograd.grad(change(x), x, gradient)

        def deescalated(form: str, go: Callable[..., None] = both_ways) -> None:
            go(lambda tokens: deescalate(tokens, mixing=form))

        calls: dict[str, Callable[[], object]] = {
            form: lambda form=form, go=deescalated: go(form) for form in ("full", "prefix", "ema")
        }
        calls["matrix"] = lambda go=both_ways, matrix=matrix: go(lambda tokens: matrix @ tokens)
        calls |= {"copying": lambda go=both_ways: go(Copy.apply), "bandwidth": bandwidth}
        against_bounds(str(shape), calls, rounds=200)


def against_bounds(shape: str, calls: dict[str, Callable[[], object]], rounds: int) -> None:
    """All calls in turn, so that each round compares them under the same load."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(-3, rounds):  # the first ones warm up
        for name, call in calls.items():
            took = seconds(call)
            if round_ >= 0:
                spent[name].append(took)
    for name in calls:
        printed = [f"{shape:<16} {name:<18} {1e6 * statistics.median(spent[name]):6.0f} µs"]
        for bound in ("bandwidth", "copying"):
            found = [a / b for a, b in zip(spent[name], spent[bound], strict=True)]
            low, middle, high = statistics.quantiles(found, n=4)
            printed.append(f"{middle:6.2f} ({low:.2f}–{high:.2f}) × {bound}")
        print(", ".join(printed), flush=True)


def compare_memory() -> None:
    for name, make in MODELS.items():
        base = _peak(name, "")
        peaks = {form: _peak(name, form) / base for form in FORMS}
        plain = _kept(make, None)
        for form, peak in peaks.items():
            kept = _kept(make, form) / plain
            print(f"{name:<34} {form:<16} {peak:.3f} × the peak without ({base / 1e6:.0f} MB), {kept:.3f} × kept")


def _kept(make: Callable[[], tuple[nn.Module, Tensor]], form: str | None) -> int:
    """Bytes of the tensors that a forward pass leaves for the backward pass, each storage once."""
    model, inputs = make()
    if form is not None:
        depthscope.apply(model, FORMS[form])
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(inputs)
    total = sum(storage.nbytes() for storage in kept.values())
    del output
    return total


def _peak(name: str, form: str) -> int:
    command = [sys.executable, __file__, "--peak", name, form]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def print_peak(name: str, form: str) -> None:
    step = trainer(MODELS[name], form or None)
    for _ in range(3):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def main() -> None:
    torch.set_num_threads(1)  # threads that wait for each other spend time that is no work
    if sys.argv[1:2] == ["--peak"]:
        print_peak(*sys.argv[2:])
        return
    if sys.argv[1:2] == ["--means"]:
        compare_means()
        return
    parts = {"memory": compare_memory, "time": compare_time, "operation": compare_operation}
    for part in sys.argv[1:] or parts:
        parts[part]()


if __name__ == "__main__":
    main()
