"""Inputs that a model cannot read: every verb reads them, or says in one line what was expected and what came."""

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import depthscope
from depthscope.models import BlockConfig, Encoder
from depthscope.remedies import DeEscalate, recommend

WIDTH = 16


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        attention = (x @ x.transpose(-1, -2)).softmax(dim=-1)
        return x + attention @ self.linear(x)


class Unknown(nn.Module):
    """Of no known family: its blocks are found in a pass."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Mixing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.encoder = nn.Embedding(20, WIDTH), Encoder(3, BlockConfig(WIDTH, 2))

    def forward(self, ids: Tensor) -> Tensor:
        return self.encoder(self.embedding(ids))


def encoder() -> nn.Module:
    return Encoder(3, BlockConfig(WIDTH, 2))


def put_in(model: nn.Module, inputs: Any) -> None:
    depthscope.apply(model, DeEscalate(0.3), inputs=inputs)


def squares(returned: Tensor) -> Tensor:
    return returned.square().mean()


VERBS: dict[str, Callable[[nn.Module, Any], object]] = {
    "probe": depthscope.probe,
    "probe all": lambda model, x: depthscope.probe(model, x, measures="all", stations="all", gradients=True),
    "depth_use": depthscope.depth_use,
    "paths": depthscope.paths,
    "recommend": recommend,
    "fix": depthscope.fix,
    "apply": put_in,
    "skip_loss": lambda model, x: depthscope.skip_loss(model, x, loss=squares),
}
TOKENS = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(12).reshape(2, 6)
RAGGED = [TOKENS[0], TOKENS[1, :4]]
FAILS = "fails on these inputs|expected tokens"
NOTHING = "expected at least one sequence of at least one token, got inputs of shape"

# What comes, and what is said of it; None: it is read.
OF_TOKENS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "no sequence": (lambda: TOKENS[:0], NOTHING),
    "no token": (lambda: TOKENS[:, :0], NOTHING),
    "one sequence": (lambda: TOKENS[0], None),
    "one sequence with a gradient": (lambda: TOKENS[0].clone().requires_grad_(), None),
    "made by autograd": (lambda: 2 * TOKENS.clone().requires_grad_(), None),
    "a negative view": (lambda: torch.complex(TOKENS, TOKENS).conj().imag, None),
    "nested": (lambda: torch.nested.nested_tensor(RAGGED), "one length, got a nested tensor: pad it"),
    "jagged": (lambda: torch.nested.nested_tensor(RAGGED, layout=torch.jagged), "one length, got a nested tensor"),
    "meta": (lambda: TOKENS.to("meta"), "meta device"),
    "sparse": (TOKENS.to_sparse, r"sparse_coo|sparse"),
    "quantized": (lambda: torch.quantize_per_tensor(TOKENS, 0.1, 0, torch.qint8), FAILS),
    "complex": (lambda: TOKENS.to(torch.complex64), FAILS),
    "float64": (TOKENS.double, r"fails on these inputs, float64 \(2, 6, 16\): RuntimeError: .*dtype"),
    "of another width": (lambda: TOKENS[..., :8], r"fails on these inputs, float32 \(2, 6, 8\): RuntimeError"),
    "a vector": (lambda: TOKENS[0, 0], FAILS),
    "ids": (lambda: IDS, FAILS),
    "no strings": (list, "expected at least one batch, got none"),
    "a batch of nothing": (lambda: [[]], "got an empty list"),
    "strings": (lambda: ["a b", "c"], "these inputs are strings: pass tokenizer="),
    "an empty dict": (dict, "fails on these inputs, without a tensor: TypeError|expected tokens"),
}
OF_IDS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "no sequence": (lambda: IDS[:0], NOTHING),
    "no token": (lambda: IDS[:, :0], NOTHING),
    "int32": (IDS.int, None),
    "one sequence": (lambda: IDS[0], None),
    "int16": (IDS.short, r"fails on these inputs, int16 \(2, 6\) from 0 to 11: RuntimeError"),
    "numbers": (IDS.float, r"fails on these inputs, float32 \(2, 6\): RuntimeError"),
    "beyond the vocabulary": (lambda: IDS + 10, r"int64 \(2, 6\) from 10 to 21: IndexError: index out of range"),
    "below it": (lambda: IDS - 1, r"int64 \(2, 6\) from -1 to 10: IndexError"),
}


def tell(verb: str, model: nn.Module, inputs: Any, message: str | None) -> None:
    if message is None:
        VERBS[verb](model, inputs)
        return
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        VERBS[verb](model, inputs)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", OF_TOKENS)
@pytest.mark.parametrize("make", [encoder, Unknown])
@pytest.mark.filterwarnings("ignore")
def test_tokens_are_read_or_refused_in_a_line(make: Callable[[], nn.Module], kind: str, verb: str):
    given, message = OF_TOKENS[kind]
    tell(verb, make().eval(), given(), message)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", OF_IDS)
@pytest.mark.filterwarnings("ignore")
def test_ids_are_read_or_refused_in_a_line(kind: str, verb: str):
    given, message = OF_IDS[kind]
    tell(verb, Reader().eval(), given(), message)


@pytest.mark.parametrize("kind", ["nested", "sparse", "quantized", "complex", "ids"])
def test_a_watch_ends_with_a_warning(kind: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, of such tensors
        given = OF_TOKENS[kind][0]()
    with (
        depthscope.watch(model := encoder().train()),
        pytest.warns(UserWarning, match=r"the watch ends here; the training goes on: expected .*tokens .*, got"),
        suppress(Exception),  # what the model itself makes of it
    ):
        model(given)


def test_gradients_of_one_sequence_are_those_of_a_batch_of_one():
    model = encoder().eval()
    options = {"measures": "light", "stations": "output", "gradients": True}
    alone, in_batch = (depthscope.probe(model, x, **options).frame for x in (TOKENS[0], TOKENS[:1]))
    rows = in_batch["measure"].str.endswith("gradient")
    assert rows.any()
    assert alone[["block", "measure", "sample"]].equals(in_batch[["block", "measure", "sample"]])
    assert alone["value"].tolist() == pytest.approx(in_batch["value"].tolist(), rel=1e-5, nan_ok=True)


def test_errors_of_the_model_s_own_keep_their_cause():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = encoder()

        def forward(self, x: Tensor) -> Tensor:
            raise KeyError(f"no such key\n{self.encoder(x).shape}")

    with pytest.raises(
        ValueError, match=r"Failing fails on these inputs, float32 .*: KeyError: 'no such key"
    ) as raised:
        depthscope.probe(Failing(), TOKENS)
    assert isinstance(raised.value.__cause__, KeyError)


def test_memory_that_is_not_there_is_not_said_of_the_inputs():
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = encoder()

        def forward(self, _x: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        depthscope.probe(Large(), TOKENS)
