"""The batch axis is found by a change of one sequence; what is not independent, or no block, is refused."""

import pytest
import torch
from torch import Tensor, nn

import depthscope
from depthscope.anatomy import anatomy_of
from depthscope.discovery import find_token_axis
from depthscope.hooks import undisturbed
from depthscope.inputs import batches
from depthscope.measures import token_similarity
from depthscope.remedies import DeEscalate
from samples import seeded


class Attending(nn.Module):
    """A block of a model that nobody here knows, with the tokens on axis 0 or 1."""

    def __init__(self, token_axis: int):
        super().__init__()
        self.token_axis, self.linear = token_axis, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).mean(dim=self.token_axis, keepdim=True)


class FromIds(nn.Module):
    """Ids (batch, n) in; the blocks' tokens on the axis that is asked for."""

    def __init__(self, token_axis: int):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.token_axis = token_axis
        self.blocks = nn.ModuleList(Attending(token_axis) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x if self.token_axis == 1 else x.transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return x


def axis_of(model: nn.Module, inputs: Tensor) -> int:
    with undisturbed(model):
        return find_token_axis(model, anatomy_of(model), next(batches(model, inputs)))


@pytest.mark.parametrize("shape", [(3, 5), (4, 4)])  # also where the two axes are equally long
@pytest.mark.parametrize("token_axis", [0, 1])
def test_the_axis_of_ids_and_of_tokens(token_axis: int, shape: tuple[int, int]):
    torch.manual_seed(0)
    ids = torch.randint(1, 20, shape, generator=seeded(0))
    assert axis_of(FromIds(token_axis), ids) == token_axis
    stack = nn.Sequential(*(Attending(token_axis) for _ in range(3)))
    assert axis_of(stack, torch.randn(*shape, 8, generator=seeded(1))) == token_axis


class Normed(Attending):
    """A block with a norm first: a huge token moves the others no more than any other does."""

    def forward(self, x: Tensor) -> Tensor:
        normed = nn.functional.layer_norm(x, x.shape[-1:])
        return x + self.linear(normed).mean(dim=self.token_axis, keepdim=True)


@pytest.mark.parametrize("token_axis", [0, 1])
def test_a_huge_token_does_not_hide_what_moves_beside_it(token_axis: int):
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8, generator=seeded(1))
    x[:, 0] *= 1e6
    stack = nn.Sequential(*(Normed(token_axis) for _ in range(3)))
    assert axis_of(stack, x if token_axis == 1 else x.transpose(0, 1)) == token_axis


def test_a_probe_measures_the_tokens_of_each_sequence():
    torch.manual_seed(0)
    x = torch.randn(10, 3, 8, generator=seeded(2))  # 10 tokens, 3 sequences
    stack = nn.Sequential(*(Attending(0) for _ in range(3)))
    found = depthscope.probe(stack, x)
    assert (found.metadata["samples"], found.metadata["tokens"]) == (3, 10)
    assert found.curve("token_similarity")[-1] == pytest.approx(
        token_similarity(stack(x).transpose(0, 1)).mean().item(), rel=1e-5
    )
    hints = depthscope.probe(stack, x, token_axis=1)  # what the user says wins
    assert (hints.metadata["samples"], hints.metadata["tokens"]) == (10, 3)


def decoder(**options: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, **options), 2).eval()

    class WithMemory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            memory = x.new_zeros(x.shape[0], 4, 8) if options else x.new_zeros(4, x.shape[1], 8)
            return self.layers(x, memory)

    return WithMemory()


@pytest.mark.parametrize("options", [{}, {"batch_first": True}])
def test_a_remedy_in_pytorchs_decoder_does_not_mix_the_batch(options: dict[str, bool]):
    batch_axis = 0 if options else 1
    x = torch.randn(5, 4, 8, generator=seeded(3))
    for inputs in (x, None):
        model = decoder(**options)
        depthscope.apply(model, DeEscalate(0.5), inputs=inputs, causal=False)
        changed = x.clone()
        changed.select(batch_axis, 0).add_(1.0)
        with torch.no_grad():
            difference = (model(x) - model(changed)).abs().amax(dim=(1 - batch_axis, 2))
        assert difference[0] > 0
        assert not difference[1:].any()


class Mixed(nn.Module):
    """A block in which sequences see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return x + y.mean(dim=0, keepdim=True) + y.mean(dim=1, keepdim=True)


def test_sequences_that_see_each_other_are_refused():
    stack = nn.Sequential(*(Mixed() for _ in range(2)))
    x = torch.randn(3, 5, 8, generator=seeded(0))
    with pytest.raises(ValueError, match="the change of one sequence of the batch changes the others"):
        depthscope.probe(stack, x)
    with pytest.raises(ValueError, match="the change of one sequence"):
        depthscope.apply(stack, DeEscalate(0.5), inputs=x)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in stack.modules())
    assert depthscope.probe(stack, x, token_axis=1).depth == 2  # told, it is done


class Halving(nn.Module):
    """A stage, not a block: it returns half as many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[:, ::2]


def test_what_changes_the_shape_is_no_block():
    stack = nn.Sequential(Halving(), Halving())
    with pytest.raises(ValueError, match="'0' is given \\(2, 8, 8\\) and returns \\(2, 4, 8\\)"):
        depthscope.probe(stack, torch.randn(2, 8, 8, generator=seeded(0)))


class Between(nn.Module):
    """Something stands between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attending(1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = 2 * block(x)
        return x


def test_what_stands_between_blocks_is_said():
    x = torch.randn(3, 5, 8, generator=seeded(0))
    notes = depthscope.probe(Between(), x).metadata["notes"]
    assert "something else changes the tokens between the blocks, before block 2, 3" in notes
    plain = depthscope.probe(nn.Sequential(*(Attending(1) for _ in range(3))), x).metadata["notes"]
    assert not [note for note in plain if "between" in note]


class WithoutForward(nn.Module):
    """Blocks that are lists of modules, and are never called themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(8), nn.Linear(8, 8)]) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in self.layers:
            x = x + linear(norm(x))
        return x


def test_a_remedy_that_would_do_nothing_is_an_error():
    model, x = WithoutForward(), torch.randn(2, 5, 8, generator=seeded(0))
    with pytest.raises(ValueError, match=r"none of the blocks \['layers.0'"):
        depthscope.apply(model, DeEscalate(0.5), inputs=x)
    with pytest.raises(ValueError, match=r"none of the blocks \['layers.0'"):
        depthscope.probe(model, x)
    with pytest.raises(ValueError, match=r"'layers.0' is a ModuleList without a forward of its own"):
        depthscope.apply(model, DeEscalate(0.5), causal=False)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


class ByParts(nn.Module):
    """Calls the parts of its blocks, and not the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attending(1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.linear(x)
        return x


def test_blocks_that_are_not_called_are_an_error_at_the_second_pass():
    model, x = ByParts(), torch.randn(2, 5, 8, generator=seeded(0))
    depthscope.apply(model, DeEscalate(0.5), causal=False)
    model(x)
    with pytest.raises(ValueError, match=r"'blocks.0' and the other blocks were not called"):
        model(x)
    assert torch.equal(depthscope.remove(model)(x), model(x))


class Turned(FromIds):
    """Tokens (batch, d, n)."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("size", [1, 3, 8])
def test_tokens_whose_axes_are_exchanged_are_refused_where_both_are_as_long(size: int):
    ids = torch.randint(20, (size, 8), generator=seeded(0))
    for verb in (depthscope.probe, lambda model, inputs: depthscope.apply(model, DeEscalate(0.5), inputs=inputs)):
        with pytest.raises(ValueError, match=r"the tokens of the blocks are \(batch, d, n\)"):
            verb(Turned(1), ids)
    assert depthscope.probe(FromIds(1), ids).depth == 3
