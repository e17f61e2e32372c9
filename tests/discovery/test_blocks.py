"""Which modules of an unknown model are its blocks, and where the tokens pass them: seen in one pass, or refused."""

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import depthscope
from depthscope.discovery.blocks import find_anatomy
from depthscope.inputs import batches
from depthscope.measures import token_similarity
from depthscope.remedies import DeEscalate, applied, restore
from samples import seeded

X = torch.randn(3, 8, 8, generator=seeded(0))
Loop = Callable[[nn.Module, Callable[[Tensor], Tensor]], tuple[list[Tensor], Tensor]]


class Block(nn.Module):
    """Mixes tokens, then changes each."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.ffn = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x).mean(dim=1, keepdim=True)
        return x + self.ffn(x)


class Looped(nn.Module):
    """One block, applied six times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Linear(8, 8), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(x, lambda x: x)[1]

    def loop(self, x: Tensor, after: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
        """The tokens at the entrance and after every block, and what is returned; `after` is done to each output."""
        states = [self.embed(x)]
        for _ in range(6):
            states.append(after(self.block(states[-1])))
        return states, states[-1]


class Summarising(Block):
    """Returns a summary of other tokens first."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return y.flip(1)[:, :3] * 2, y


class WithSummaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Summarising() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(x, lambda x: x)[1]

    def loop(self, x: Tensor, after: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
        states = [x]
        for layer in self.layers:
            states.append(after(layer(states[-1])[1]))
        return states, states[-1]


class Reading(Block):
    """Is given what it reads before its tokens."""

    def forward(self, context: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + context.mean(dim=1, keepdim=True)


class WithContext(nn.Module):
    def __init__(self, tokens: int = 5) -> None:
        super().__init__()
        self.tokens, self.read = tokens, nn.Linear(8, 8)
        self.layers = nn.ModuleList(Reading() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(x, lambda x: x)[1]

    def loop(self, x: Tensor, after: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
        context, states = self.read(x[:, : self.tokens]), [x]
        for layer in self.layers:
            states.append(after(layer(context, states[-1])))
        return states, states[-1]


class TextAndImage(Block):
    def forward(self, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = super().forward(torch.cat([text, image], dim=1))
        return y[:, : text.shape[1]], y[:, text.shape[1] :]


class TwoStreams(nn.Module):
    """Text and image pass the blocks side by side; the image is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(8, 8)
        self.layers = nn.ModuleList(TextAndImage() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(x, lambda x: x)[1]

    def loop(self, x: Tensor, after: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
        text, states = self.read(x[:, :5]), [x]
        for layer in self.layers:
            text, image = layer(text, states[-1])
            states.append(after(image))
        return states, states[-1]


class Local(Block):
    pass


class LocalAndGlobal(nn.Module):
    """Two classes in one list, the rare one at the end too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Local(), Local(), Block(), Local(), Local(), Block()])
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(x, lambda x: x)[1]

    def loop(self, x: Tensor, after: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
        states = [x]
        for layer in self.layers:
            states.append(after(layer(states[-1])))
        return states, self.norm(states[-1])


class Stage(nn.Module):
    def __init__(self, width: int, depth: int, halves: bool):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.merge = nn.Linear(2 * width, 2 * width) if halves else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.merged(x)

    def merged(self, x: Tensor) -> Tensor:
        return x if self.merge is None else self.merge(x.unflatten(1, (-1, 2)).flatten(2))


class Stages(nn.Module):
    """As in Swin: half as many tokens of twice the width from stage to stage."""

    def __init__(self, halves: bool = True) -> None:
        super().__init__()
        widths = (8, 16, 32) if halves else (8, 8, 8)
        self.stages = nn.ModuleList(
            Stage(width, depth, halves and width < 32) for width, depth in zip(widths, (2, 2, 3), strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x

    def loop(self, x: Tensor, after: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
        states = [x]
        for stage in self.stages:
            for block in stage.blocks:
                x = after(block(x))
                states.append(x)
            x = stage.merged(x)
        return states, x


class Normed(nn.Module):
    def __init__(self, mixes: bool):
        super().__init__()
        self.mixes, self.norm, self.linear = mixes, nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(x))
        return y.mean(dim=1, keepdim=True).expand_as(y) if self.mixes else y


class Attending(Normed):
    pass


class ListsOfLists(nn.Module):
    """As in vit-pytorch: the layers are lists of a mixing and a changing module, and the additions stand outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Attending(True), Normed(False)]) for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        for mix, change in self.layers:
            x = mix(x) + x
            x = change(x) + x
        return self.norm(x)

    def loop(self, x: Tensor, after: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
        states = [x]
        for layer in self.layers:
            for part in layer:
                states.append(after(part(states[-1]) + states[-1]))
        return states, self.norm(states[-1])


class Residual(nn.Module):
    def forward(self, branch: Tensor, trunk: Tensor) -> Tensor:
        return branch + trunk


class AddingModules(nn.Module):
    """As in x-transformers: norm, branch and addition are three modules of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(8), Normed(mixes), Residual()]) for mixes in (True, False) * 2
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(x, lambda x: x)[1]

    def loop(self, x: Tensor, after: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
        states = [x]
        for norm, branch, add in self.layers:
            states.append(after(add(branch(norm(states[-1])), states[-1])))
        return states, states[-1]


class Remembering(Block):
    def forward(self, x: Tensor, first: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + 0.1 * first


class WithFirstTokens(nn.Module):
    """As in Zamba: the blocks also read what has entered the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Remembering() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(x, lambda x: x)[1]

    def loop(self, x: Tensor, after: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
        states = [x]
        for layer in self.layers:
            states.append(after(layer(states[-1], x)))
        return states, states[-1]


class Named(nn.Module):
    """Blocks that stand in no list, with a norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(), Block(), Block()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(x, lambda x: x)[1]

    def loop(self, x: Tensor, after: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
        states = [x]
        for layer in (self.first, self.second, self.third):
            x = after(layer(x))
            states.append(x)
            x = self.between(x)
        return states, x

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Plain(nn.Linear):
    """A layer of somebody's own."""


class Injecting(nn.Module):
    """Two blocks that run three times, each on what the one before returned and on the first tokens (x₀, nanochat)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        for layer in self.layers:
            layer.mix = nn.Sequential(Plain(8, 8), Plain(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(x, lambda x: x)[1]

    def between(self, x: Tensor) -> Tensor:
        return 1.1 * x + 0.2 * self.first

    def loop(self, x: Tensor, after: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
        self.first = x
        states: list[Tensor] = []
        for layer in [*self.layers] * 3:
            x = self.between(x)
            states = states or [x]
            x = after(layer(x))
            states.append(x)
        return states, x


class OverBlocks(Block):
    """Reads a mean over all earlier blocks, and returns them with its own tokens, which leave it twice."""

    def forward(self, history: list[Tensor], x: Tensor) -> tuple[list[Tensor], Tensor]:  # type: ignore[override]
        x = x + self.ffn(torch.stack(history).mean(dim=0)) + self.mix(x).mean(dim=1, keepdim=True)
        return [*history, x], x


class WithHistory(nn.Module):
    """Attention residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OverBlocks() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(x, lambda x: x)[1]

    def loop(self, x: Tensor, after: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
        states, history = [x], [x]
        for layer in self.layers:
            history, x = layer(history, x)
            history[-1] = x = after(x)
            states.append(x)
        return states, x


KINDS = [
    Looped,
    Injecting,
    WithHistory,
    WithSummaries,
    WithContext,
    TwoStreams,
    LocalAndGlobal,
    Stages,
    lambda: Stages(halves=False),
    ListsOfLists,
    AddingModules,
    WithFirstTokens,
    Named,
]


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def take_mean(x: Tensor) -> Tensor:
    return x - 0.5 * x.mean(dim=1, keepdim=True)


def applied_with_inputs(model: nn.Module, **options: object) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return depthscope.apply(model, DeEscalate(0.5), inputs=X, causal=False, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_probe_measures_the_tokens_of_the_trunk(kind: Callable[[], nn.Module]):
    model = made(kind)
    with torch.no_grad():
        states, _ = model.loop(X, lambda x: x)
    found = depthscope.probe(model, X)
    assert found.metadata["family"] == "unknown"
    assert found.depth == len(states) - 1
    assert found.curve("token_similarity") == pytest.approx(
        [token_similarity(state).mean().item() for state in states], rel=1e-5
    )
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_a_remedy_changes_the_trunk_after_every_block(kind: Callable[[], nn.Module]):
    model = made(kind)
    with torch.no_grad():
        untreated = model(X)
        _, expected = model.loop(X, take_mean)
        applied_with_inputs(model)
        assert_close(model(X), expected, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(expected, untreated, atol=1e-3)
        assert_close(copy.deepcopy(model)(X), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(depthscope.remove(model)(X), untreated)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_found_is_recorded_and_found_again_without_inputs(kind: Callable[[], nn.Module]):
    model = made(kind)
    model.config, model.save_pretrained = SimpleNamespace(), None  # as a model has it that can be saved
    applied_with_inputs(model)
    loaded = made(kind)
    loaded.config, loaded.save_pretrained = model.config, None
    with torch.no_grad():
        assert torch.equal(restore(loaded)(X), model(X))
    assert [entry.block for entry in applied(loaded)] == [entry.block for entry in applied(model)]


@pytest.mark.parametrize("kind", KINDS)
def test_skipping_a_block_passes_its_input_on(kind: Callable[[], nn.Module]):
    model = made(kind)
    table = depthscope.skip_loss(model, X, loss=lambda output: output.square().mean())
    last = []

    def skip_second(x: Tensor) -> Tensor:
        last.append(x)
        return x if len(last) != 2 else entered

    with torch.no_grad():
        entered = model.loop(X, lambda x: x)[0][1]
        if kind in (Named, Injecting):
            entered = model.between(entered)  # what enters the second block is not what left the first
        _, expected = model.loop(X, skip_second)
    assert table["loss"][2] == pytest.approx(expected.square().mean().item(), rel=1e-5)


@pytest.mark.parametrize("kind", [ListsOfLists, AddingModules])
def test_causality_is_found_behind_norms_that_do_not_see_a_shift(kind: Callable[[], nn.Module]):
    assert depthscope.probe(made(kind), X).metadata["causal"] is False


def test_the_line_of_a_recommendation_finds_the_same_blocks_without_inputs():
    model = made(WithFirstTokens)
    fixed = depthscope.fix(model, X, tau=0.5)
    assert fixed.recommendation.line == (
        'depthscope.apply(model, DeEscalate(tau=0.5, at="output"), blocks="layers.*@0", causal=False)'
    )
    with torch.no_grad():
        _, expected = model.loop(X, take_mean)
        assert_close(fixed.apply_to(model)(X), expected, rtol=1e-5, atol=1e-6)


def test_a_loop_counts_applications_and_its_weights_are_shared():
    found = depthscope.probe(made(Looped), X)
    assert found.metadata["shared_weights"] is True
    with pytest.raises(ValueError, match="share their weights"):
        depthscope.apply(made(Looped), DeEscalate(0.5, blocks=(2,)), inputs=X, causal=False)


def test_the_other_stream_is_said_and_can_be_named():
    model = made(TwoStreams)
    notes = " ".join(depthscope.probe(model, X).metadata["notes"])
    assert "another stream of tokens passes these blocks and is left out: blocks='layers.*@0>0' names it" in notes
    with pytest.warns(UserWarning, match=r"what the remedy covers: another stream .*layers\.\*@0>0"):
        depthscope.apply(made(TwoStreams), DeEscalate(0.5), inputs=X, causal=False)
    text = depthscope.probe(model, X, blocks="layers.*@0>0")
    assert text.metadata["tokens"] == 5
    with torch.no_grad():
        first = model.read(X[:, :5])
        second, _ = model.layers[0](first, X)
    assert text.curve("token_similarity")[:2] == pytest.approx(
        [token_similarity(tokens).mean().item() for tokens in (first, second)], rel=1e-5
    )


def test_what_stands_between_stages_is_said():
    notes = depthscope.probe(made(Stages), X).metadata["notes"]
    assert "something else changes the tokens between the blocks, before block 3, 5" in notes
    assert not [note for note in depthscope.probe(made(ListsOfLists), X).metadata["notes"] if "between" in note]


class Towers(nn.Module):
    """Two chains of one class that have nothing to do with each other, and a block that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.ModuleList(Block() for _ in range(4))
        self.small = nn.ModuleList(Block() for _ in range(2))
        self.idle = Block()

    def forward(self, x: Tensor) -> Tensor:
        a, b = x, 2 * x
        for block in self.large:
            a = block(a)
        for block in self.small:
            b = block(b)
        return a.mean(1) @ b.mean(1).T


def test_what_is_left_out_is_said():
    notes = depthscope.probe(made(Towers), X).metadata["notes"]
    assert "other blocks that follow each other are left out: small.0 to small.1" in notes
    with pytest.warns(UserWarning, match="what the remedy covers") as said:
        depthscope.apply(made(Towers), DeEscalate(0.5), inputs=X, causal=False)
    assert len(said) == 1, [str(w.message) for w in said]
    with pytest.warns(UserWarning, match=r"other lists of modules were not measured: small"):
        depthscope.apply(made(Towers), DeEscalate(0.5), causal=False)


class Experts(nn.Module):
    """Modules of one class side by side: no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return sum((expert(x) for expert in self.experts), x)


class Convolutions(nn.Module):
    """Maps of features with the width on axis 1."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).unflatten(2, (8, 8)).movedim(2, 1)
        for block in self.blocks:
            x = x + block(x) if isinstance(block, Block) else block(x)
        return x


class Unnamed(nn.Module):
    """Parts of layers that are called without the layers, and additions that no module sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(8), nn.Linear(8, 8)]) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in self.layers:
            x = x + linear(norm(x))
        return x


class Lerping(nn.Module):
    """nViT: its sums are no sums of PyTorch, and the largest modules that follow each other are parts of one block."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Sequential(Plain(8, 8), nn.GELU(), Plain(8, 8)) for _ in range(9)]
        inside = [nn.Sequential(nn.Sequential(part), nn.Sequential(Plain(8, 8))) for part in parts]
        self.layers = nn.ModuleList(nn.ModuleList(inside[i : i + 3]) for i in range(0, 9, 3))

    def forward(self, x: Tensor) -> Tensor:
        for parts in self.layers:
            for part in parts:
                x = nn.functional.normalize(x.lerp(part(x), 0.3), dim=-1)
        return x


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Lerping, r"none of the blocks \['layers.0'.* ran; modules that are called: blocks='layers.\*.0' or"),
        (Experts, "what 'experts.0' returns does not enter 'experts.1'"),
        (Convolutions, r"expected tokens .* in 'blocks.0', got a map of features \(3, 8, 8, 8\)"),
        (Unnamed, r"none of the blocks \['layers.0'.* ran; modules that are called: blocks='layers.\*.0' or"),
    ],
)
def test_what_is_no_chain_of_blocks_is_refused(kind: Callable[[], nn.Module], message: str):
    model = made(kind)
    with pytest.raises(ValueError, match=message):
        depthscope.probe(model, X)
    with pytest.raises(ValueError, match=message):
        depthscope.apply(model, DeEscalate(0.5), inputs=X, causal=False)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_without_inputs_the_first_passes_refuse_what_was_guessed_wrong():
    for model, message in (
        (made(lambda: WithContext(5)), r"'layers.0' is given \(3, 5, 8\) and returns \(3, 8, 8\)"),
        (made(lambda: WithContext(8)), "several tensors could be the tokens of 'layers.1'"),
        (made(WithSummaries), r"'layers.0' is given \(3, 8, 8\) and returns \(3, 3, 8\)"),
        (made(TwoStreams), "several tensors could be the tokens of 'layers.1'"),
        (made(Experts), "'experts.1' is given the same tokens as the block before it"),
    ):
        depthscope.apply(model, DeEscalate(0.5), causal=False)
        with pytest.raises(ValueError, match=message):
            model(X)
    with pytest.raises(ValueError, match="no repeated blocks in Looped"):
        depthscope.apply(made(Looped), DeEscalate(0.5), causal=False)


def test_a_change_before_a_branch_would_not_reach_the_trunk():
    with pytest.raises(ValueError, match=r"'layers.0.0' is given a copy of the trunk"):
        depthscope.apply(made(ListsOfLists), DeEscalate(0.5, at="input"), inputs=X, causal=False)
    with pytest.raises(ValueError, match="the residual addition stands outside"):
        depthscope.probe(made(ListsOfLists), X, gradients=True)


def test_named_parts_are_followed_to_the_trunk():
    model = made(ListsOfLists)
    found = depthscope.probe(model, X, blocks="layers.*.1")
    with torch.no_grad():
        states, _ = model.loop(X, lambda x: x)
    assert found.curve("token_similarity") == pytest.approx(
        [token_similarity(states[i]).mean().item() for i in (1, 2, 4, 6)], rel=1e-5
    )
    with pytest.raises(ValueError, match="got a map of features"):
        depthscope.probe(made(Convolutions), X, blocks="blocks.*")
    broken = depthscope.probe(made(Experts), X, blocks="experts.*").metadata["notes"]
    assert "what one block returns does not enter the next, or not alone: experts.0 and experts.1" in broken


class Windows(nn.Module):
    """A map with the width last, and attention in windows whose tokens are not those of the trunk."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(6), Block(6)

        def forward(self, x: Tensor) -> Tensor:
            windows = self.norm(x).unflatten(1, (2, 2)).flatten(0, 1).flatten(1, 2)  # (batch · 2, 2 · width, d)
            return x + self.inner(windows).unflatten(0, (-1, 2)).reshape(x.shape)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 30)
        self.blocks = nn.ModuleList(self.Shifted() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x[:, :4]).unflatten(2, (5, 6))
        for block in self.blocks:
            x = block(x)
        return x


def test_a_map_is_read_as_its_places():
    model = made(Windows)
    found = depthscope.probe(model, X)
    assert (found.depth, found.metadata["tokens"], found.metadata["width"]) == (3, 20, 6)
    with torch.no_grad():
        y = model(X)
        assert found.curve("token_similarity")[-1] == pytest.approx(
            token_similarity(y.flatten(1, 2)).mean().item(), rel=1e-5
        )
        x = model.embed(X[:, :4]).unflatten(2, (5, 6))
        for block in model.blocks:
            x = block(x)
            x = x - 0.5 * x.mean(dim=(1, 2), keepdim=True)
        assert_close(applied_with_inputs(model)(X), x, rtol=1e-5, atol=1e-6)


class WritesIntoItsInput(Looped):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return super().forward(x)


def test_a_model_that_writes_into_its_input_sees_the_same_input_in_every_pass():
    model = made(WritesIntoItsInput)
    given = X.clone()
    found = depthscope.probe(model, given)
    assert torch.equal(given, X)
    with torch.no_grad():
        states, _ = model.loop(X + 1, lambda x: x)
    assert found.curve("token_similarity") == pytest.approx(
        [token_similarity(state).mean().item() for state in states], rel=1e-5
    )


def test_inputs_that_can_be_read_once_and_inference_mode():
    expected = depthscope.probe(made(WithContext), X).curve("token_similarity")
    assert depthscope.probe(made(WithContext), iter([X])).curve("token_similarity") == expected
    with torch.inference_mode():
        found = depthscope.probe(made(WithContext), X.clone()).curve("token_similarity")
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("kind", [WithSummaries, WithContext, ListsOfLists])
def test_remedies_on_paths_compile_without_graph_breaks(kind: Callable[[], nn.Module]):
    model = made(kind)
    with torch.no_grad():
        _, expected = model.loop(X, take_mean)
        applied_with_inputs(model)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert_close(compiled(X), expected, rtol=1e-5, atol=1e-6)


def test_a_known_family_is_not_followed(monkeypatch: pytest.MonkeyPatch):
    import zoo

    model, inputs = zoo.make("bert")
    monkeypatch.setattr("depthscope.discovery.blocks.follow", lambda *_: pytest.fail("a pass too many"))
    assert find_anatomy(model, next(batches(model, inputs))).family == "bert"
