"""The default measures at every block output, by the tools that people use for it today and by ours, in one run.

    python benchmarks/peers.py --make-env ../peers     # an environment with all of them; minutes, 2 GB
    ../peers/bin/python benchmarks/peers.py            # all of it
    ../peers/bin/python benchmarks/peers.py time       # one part of: time, memory, padding, growth

time     the measured pass ÷ the plain pass: CPU time, each pair back to back, median and quartiles of the rounds;
         some ways alone: time depthscope nnsight (how their names begin)
memory   what a measured pass of 32 sequences needs beyond what the process had before, each in its own process (Linux)
padding  the largest error of the numbers when sequences are padded, against float64 over the real tokens alone
growth   milliseconds beyond the plain pass, and their exponent, when depth, tokens or width double

The tools hand out the tokens of every block; none of them has these measures. They are computed from the tokens by
the formulas as one would write them down (`by_hand`), over all tokens, since no tool knows the mask at that place.
Each tool is asked for the trunk alone, by the way that its documentation has for it, and those that keep everything
unless they are told also as they are. All run in float32 on one thread, without gradients. A tool that is not
installed is left out. The model is a GPT-2 of Hugging Face with random weights.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
import warnings
from collections.abc import Callable
from functools import reduce
from importlib.metadata import version
from importlib.util import find_spec
from operator import or_
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS = ("torchlens==2.36.*", "transformer_lens==4.3.*", "nnsight==0.8.*")
PACKAGES = {"torchlens": "torchlens", "TransformerLens": "transformer_lens", "nnsight": "nnsight"}
SLOW = {"torchlens, record", "torchlens, trace", "TransformerLens, whole cache"}  # a few rounds are enough to see that
SHAPE = {"depth": 12, "tokens": 197, "width": 192}
Numbers = dict[str, Any]  # by measure: (blocks, batch)


def make_env(folder: str) -> None:
    """An environment with the tools and with what depthscope needs, in the versions that its tests have."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["huggingface"], *PEERS]
    venv.create(folder, with_pip=True)
    python = str(Path(folder, "bin", "python"))
    subprocess.run([python, "-m", "pip", "install", "-c", str(ROOT / "constraints.txt"), *needed], check=True)
    print(f"made: {python} {Path(__file__).relative_to(ROOT)}")


if sys.argv[1:2] == ["--make-env"]:  # before anything is imported that only the environment has
    make_env(sys.argv[2])
    sys.exit()

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(ROOT / "src"))
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402


def gpt2(depth: int, tokens: int, width: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=depth, n_embd=width, n_head=width // 64, n_positions=tokens, vocab_size=1000)
    config.update({"use_cache": False, "bos_token_id": 0, "eos_token_id": 0})
    return GPT2LMHeadModel(config).eval()


def batch(tokens: int, *, padded: bool = True, size: int = 8) -> dict[str, Tensor]:
    """Sequences of falling length, padded on the right: the last one is a third of the first."""
    ids = torch.randint(1000, (size, tokens), generator=torch.Generator().manual_seed(0))
    lengths = torch.linspace(tokens, tokens / 3 if padded else tokens, size).long()
    return {"input_ids": ids, "attention_mask": (torch.arange(tokens) < lengths[:, None]).long()}


def by_hand(states: list[Tensor]) -> Numbers:
    """The measures of X_0 … X_L (batch, n, d) as one writes them down."""
    found: dict[str, list[Tensor]] = {}
    before: tuple[Tensor, Tensor, Tensor] | None = None
    for x in states:
        n, norms, mean = x.shape[1], x.norm(dim=-1), x.mean(dim=1, keepdim=True)
        unit, energy = x / norms.unsqueeze(-1), norms.square().sum(dim=1)
        similar, diverse = n * mean.square().sum(dim=(1, 2)), (x - mean).square().sum(dim=(1, 2))
        together = unit.sum(dim=1).square().sum(dim=-1)
        numbers = {
            "token_similarity": similar / energy,
            "token_diversity": diverse / energy,
            "cosine_similarity": (together - n) / (n * (n - 1)),
            "direction_similarity": together / n**2,
            "largest_token_share": norms.square().amax(dim=1) / energy,
            "frobenius_norm": energy.sqrt(),
        }
        if before is not None:
            cosines = (unit * before[0]).sum(dim=-1).clamp(-1, 1)
            growth = similar / before[1], diverse / before[2]
            numbers |= {
                "growth_mean": growth[0],
                "growth_diversity": growth[1],
                "escalation_rate": (similar + diverse) / (before[1] + before[2]) / growth[1],
                "angular_distance": cosines.acos().mean(dim=1) / math.pi,
            }
        before = unit, similar, diverse
        for name, value in numbers.items():
            found.setdefault(name, []).append(value)
    return {name: torch.stack(values) for name, values in found.items()}


def hidden_states(model: nn.Module, inputs: dict[str, Tensor]) -> Numbers:
    """Hugging Face's own option. Its last state is behind the final norm, so that the last block's output is missing:
    a hook brings it."""
    last = []
    handle = model.transformer.h[-1].register_forward_hook(lambda _module, _given, returned: last.append(returned))
    states = model(**inputs, output_hidden_states=True).hidden_states
    handle.remove()
    return by_hand([*states[:-1], _tokens(last[0])])


def ours(model: nn.Module, inputs: dict[str, Tensor]) -> Numbers:
    from depthscope import probe

    frame = probe(model, inputs, stations="output").frame
    tables = {
        name: rows.pivot(index="block", columns="sample", values="value") for name, rows in frame.groupby("measure")
    }
    return {str(name): torch.from_numpy(table.to_numpy(copy=True)) for name, table in tables.items()}


def with_nnsight(model: nn.Module) -> Callable[[dict[str, Tensor]], Numbers]:
    from nnsight import NNsight

    wrapped = NNsight(model)

    def run(inputs: dict[str, Tensor]) -> Numbers:
        with wrapped.trace(**inputs):
            first = wrapped.transformer.drop.output.save()
            states = [block.output for block in wrapped.transformer.h].save()
        return by_hand([first, *map(_tokens, states)])

    return run


def with_torchlens(model: nn.Module, *, whole: bool) -> Callable[[dict[str, Tensor]], Numbers]:
    """Its sparse recording of the modules that are wanted, or the trace that keeps every operation."""
    import torchlens

    names = ["transformer.drop", *(f"transformer.h.{number}" for number in range(model.config.n_layer))]
    wanted = reduce(or_, map(torchlens.module, names))

    def run(inputs: dict[str, Tensor]) -> Numbers:
        if whole:
            trace = torchlens.trace(model, (), dict(inputs))
            return by_hand([_tokens(trace.modules[name].out) for name in names])
        recording = torchlens.record(model, (), dict(inputs), save=wanted)
        return by_hand([record.ram_payload for record in recording])

    return run


def with_transformer_lens(model: nn.Module, *, whole: bool) -> Callable[[dict[str, Tensor]], Numbers]:
    """Asked for the trunk alone, or for the cache that `run_with_cache` keeps unless it is told."""
    from tokenizers import Tokenizer, models
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as folder:  # it loads its tokenizer again, by the name of where it is from
        words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a", eos_token="a", bos_token="a").save_pretrained(
            folder
        )
        model.config.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        bridge = TransformerBridge.boot_transformers("gpt2", hf_model=model, device="cpu", tokenizer=tokenizer)
    names = ["blocks.0.hook_resid_pre", *(f"blocks.{number}.hook_resid_post" for number in range(model.config.n_layer))]
    wanted = {} if whole else {"names_filter": names}

    def run(inputs: dict[str, Tensor]) -> Numbers:
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        _, cache = bridge.run_with_cache(ids, attention_mask=mask, **wanted)
        return by_hand([cache[name] for name in names])

    return run


def _tokens(returned: Any) -> Tensor:
    return returned if isinstance(returned, Tensor) else returned[0]


WAYS: dict[str, Callable[[nn.Module], Callable[[dict[str, Tensor]], Any]]] = {
    "plain": lambda model: lambda inputs: model(**inputs),
    "depthscope": lambda model: lambda inputs: ours(model, inputs),
    "output_hidden_states": lambda model: lambda inputs: hidden_states(model, inputs),
    "nnsight": with_nnsight,
    "TransformerLens": lambda model: with_transformer_lens(model, whole=False),
    "TransformerLens, whole cache": lambda model: with_transformer_lens(model, whole=True),
    "torchlens, record": lambda model: with_torchlens(model, whole=False),
    "torchlens, trace": lambda model: with_torchlens(model, whole=True),
}


def ways_here() -> list[str]:
    """Ours, and those whose package is installed."""
    packages = {way: PACKAGES.get(way.split(",")[0]) for way in WAYS}
    return [way for way, package in packages.items() if package is None or find_spec(package) is not None]


def make(way: str, shape: dict[str, int]) -> Callable[[dict[str, Tensor]], Any]:
    """A way on a model of its own: some of them put things into the model."""
    return WAYS[way](gpt2(**shape))


def paired(way: str, shape: dict[str, int], rounds: int) -> tuple[list[float], list[float]]:
    """CPU seconds of plain passes and of measured ones, each pair back to back."""
    inputs, plain, measured = batch(shape["tokens"]), make("plain", shape), make(way, shape)
    spent: tuple[list[float], list[float]] = [], []
    for round_ in range(-1, rounds):  # the first one warms up
        for run, found in zip((plain, measured), spent, strict=True):
            start = time.process_time()
            run(inputs)
            if round_ >= 0:
                found.append(time.process_time() - start)
    return spent


def compare_time(*chosen: str) -> None:
    for way in ways_here()[1:]:
        if chosen and not way.startswith(chosen):
            continue
        plain, measured = paired(way, SHAPE, rounds=3 if way in SLOW else 15)
        ratios = sorted(b / a for a, b in zip(plain, measured, strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{way:<30} {middle:6.2f} × the plain pass ({low:.2f}–{high:.2f})", flush=True)


def compare_memory() -> None:
    for way in ways_here():
        command = [sys.executable, __file__, "--peak", way]
        more = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
        print(f"{way:<30} {more / 1e6:6.0f} MB beyond what the process had before the pass", flush=True)


def print_peak(way: str) -> None:
    run = make(way, SHAPE)
    run(batch(8, size=2))  # imports, and what is made once
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    run(batch(SHAPE["tokens"], size=32))  # so many that what is kept is seen beside what the allocator keeps
    print(_status("VmHWM") - before)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def compare_padding() -> None:
    """Every number of a padded sequence against the formulas in float64 on the sequence alone, without padding."""
    model, inputs = gpt2(**SHAPE), batch(SHAPE["tokens"])
    alone = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        kept = ids[None, : int(mask.sum())]
        alone.append(hidden_states(model.double(), {"input_ids": kept, "attention_mask": torch.ones_like(kept)}))
    exact = {name: torch.cat([numbers[name] for numbers in alone], dim=1) for name in alone[0]}
    for way in ways_here()[1:]:
        found = make(way, SHAPE)(inputs)
        shared = [name for name in exact if name in found]
        errors = {name: _error(found[name], exact[name]) for name in shared}
        worst = max(errors, key=lambda name: errors[name])
        verdict = "right" if errors[worst] < 1e-3 else "wrong"
        print(
            f"{way:<30} {verdict}: {errors[worst]:.1e} in {worst}, {errors['cosine_similarity']:.1e} in t_cos",
            flush=True,
        )


def _error(found: Tensor, exact: Tensor) -> float:
    """The largest error of a measure over blocks and sequences, relative to its largest value."""
    return ((found[-len(exact) :].double() - exact[-len(found) :]).abs().max() / exact.abs().max()).item()


def compare_growth() -> None:
    steps = {"depth": (6, 12, 24), "tokens": (64, 128, 256, 512), "width": (128, 256, 512)}
    for way in ("depthscope", "output_hidden_states"):
        for name, values in steps.items():
            more = []
            for value in values:
                plain, measured = paired(way, SHAPE | {name: value}, rounds=7)
                more.append(1e3 * (statistics.median(measured) - statistics.median(plain)))
            slope = math.log(more[-1] / more[0]) / math.log(values[-1] / values[0]) if min(more) > 0 else math.nan
            listed = ", ".join(f"{value}: {ms:.0f} ms" for value, ms in zip(values, more, strict=True))
            print(f"{way:<22} {name:<7} {listed}; grows as its power {slope:.2f}", flush=True)


PARTS = {"time": compare_time, "memory": compare_memory, "padding": compare_padding, "growth": compare_growth}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if sys.argv[1:2] == ["--peak"]:
        print_peak(sys.argv[2])
        return
    here = ", ".join(f"{name} {version(name)}" for name in PACKAGES.values() if find_spec(name) is not None)
    print(f"torch {torch.__version__}, one thread; {here or 'no peer is installed'}")
    print("GPT-2 {depth} × {width}, 8 × {tokens} tokens".format(**SHAPE))
    if sys.argv[1:2] == ["time"] and len(sys.argv) > 2 and sys.argv[2] not in PARTS:
        compare_time(*sys.argv[2:])
        return
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()


if __name__ == "__main__":
    main()
