"""Remedies in models that are wrapped, compiled, pickled, recomputed or run in half precision."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import GPTNeoConfig, GPTNeoForCausalLM

import depthscope
import zoo
from depthscope.inputs import batches
from depthscope.remedies import DeEscalate, LearnableTau, ResidualWeight
from zoo import run

COMPILED = ("encoder-pre", "causal-lm", "torch", "bert", "gpt2", "t5")


@pytest.mark.long  # a process of its own
def test_hooks_from_a_pickle_are_not_overwritten_in_a_new_process(tmp_path):
    model, inputs = zoo.make("bert")
    depthscope.apply(model.eval(), DeEscalate(0.5))
    expected = run(model, inputs)
    torch.save((model, inputs, expected), tmp_path / "model.pt")
    code = (
        "import torch, sys, depthscope\n"
        "model, inputs, expected = torch.load(sys.argv[1], weights_only=False)\n"
        "handles = [m.register_forward_hook(lambda *_: None) for m in model.modules() for _ in range(3)]\n"
        "depthscope.probe(model, inputs)\n"
        "assert torch.equal(model(**inputs)[0], expected)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_finds_the_mask_of_its_own_pass(reentrant: bool):
    def gradients(checkpointed: bool) -> list[Tensor]:
        model, inputs = zoo.make("bert")
        depthscope.apply(model, DeEscalate(0.7))
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.train()
        other = {"input_ids": zoo.IDS, "attention_mask": zoo.MASK.flip(0, 1)}
        first, second = model(**inputs)[0], model(**other)[0]  # two passes, then one backward
        (first.square().sum() + second.sin().sum()).backward()
        return [p.grad for p in model.encoder.parameters()]

    pairs = list(zip(gradients(False), gradients(True), strict=True))
    assert len(pairs) == 3 * 16  # three blocks of eight weights and biases each
    for plain, recomputed in pairs:
        assert_close(recomputed, plain, rtol=1e-4, atol=1e-5)


def test_activation_checkpointing_of_blocks_that_were_guessed():
    """They run again in the backward pass, the last one first, with the same tokens as before."""
    torch.manual_seed(0)
    tiny = {"vocab_size": 50, "hidden_size": 16, "num_layers": 3, "num_heads": 2, "intermediate_size": 32}
    nothing = {"resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0, "use_cache": False}
    model = GPTNeoForCausalLM(GPTNeoConfig(**tiny, **nothing, attention_types=[[["global"], 3]])).train()
    depthscope.apply(model, DeEscalate(0.5), causal=True)
    found = []
    for _ in range(2):
        loss = model(zoo.IDS, attention_mask=zoo.MASK, labels=zoo.IDS).loss
        found.append(torch.autograd.grad(loss, [*model.parameters()]))
        model.gradient_checkpointing_enable()
    for plain, recomputed in zip(*found, strict=True):
        assert_close(recomputed, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype):
    model, inputs = zoo.make("llama")
    model.eval()

    def exact_and_error() -> tuple[Tensor, float]:
        exact = run(model, inputs)
        with torch.autocast("cpu", dtype=dtype):
            return exact, (run(model, inputs).float() - exact).norm().item()

    untreated, error = exact_and_error()
    depthscope.apply(model, DeEscalate(0.9))
    exact, treated_error = exact_and_error()
    assert treated_error < 2 * error  # no more than half precision costs the model itself, within a factor of two
    assert (exact - untreated).norm() > 10 * error  # a remedy that autocast skips would be seen


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("torch", "gpt2") else pytest.mark.long) for n in COMPILED]
)
def test_compiles_without_graph_breaks(name: str):
    model, inputs = zoo.make(name)
    zoo.shortened(model.eval())
    batch = next(batches(model, inputs))
    depthscope.apply(model, DeEscalate(LearnableTau(), at="after_attention"), DeEscalate(0.9), ResidualWeight(0.5))
    eager = run(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(*batch.args, **batch.kwargs)
    compiled = compiled if isinstance(compiled, Tensor) else compiled[0]
    assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
    compiled.sum().backward()


def test_distributed_data_parallel(tmp_path):
    from torch.distributed import destroy_process_group, init_process_group
    from torch.nn.parallel import DistributedDataParallel

    init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model, inputs = zoo.make("bert")
        depthscope.apply(model.eval(), DeEscalate(LearnableTau(0.4)))
        expected = run(model, inputs)
        expected.sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        output = wrapped(**inputs)[0]
        assert torch.equal(output, expected)
        output.sum().backward()
        wrapped_gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert len(gradients) > 3  # those of three blocks, and the strengths
        for wrapped_gradient, gradient in zip(wrapped_gradients, gradients, strict=True):
            assert_close(wrapped_gradient, gradient)
        depthscope.remove(model)
        late = DistributedDataParallel(model)
        depthscope.apply(late, DeEscalate(0.4))
        assert_close(late(**inputs)[0], expected)
        with pytest.raises(ValueError, match="apply first, wrap after"):
            depthscope.apply(late, DeEscalate(LearnableTau(), at="input"))
    finally:
        destroy_process_group()
