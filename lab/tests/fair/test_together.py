"""Members that are trained together are what they would be alone."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.models import BlockConfig, CausalLM, VisionTransformer
from depthscope.models.wiring import WIRINGS
from depthscope.remedies import DeEscalate, ResidualWeight, apply
from depthscope_lab.fair import Budget, Facts, Member, Reader, Stacked, Together
from depthscope_lab.fair.facts import Table

FACTS = Facts(facts=60, samples=10)
MEMBERS = [Member(1, 3e-3), Member(2, 3e-3), Member(2, 1e-2)]
BUDGET = Budget(20, clip=0.5)


def reader(seed: int, wiring: str = "pre", *remedies) -> nn.Module:
    model = Reader(3, BlockConfig(8, 2, 16, placement=wiring), FACTS.tokens, seed)
    return apply(model, *remedies).double() if remedies else model.double()


def train_alone(problem, model: nn.Module, member: Member, budget: Budget) -> list[float]:
    """The naive form: one model, PyTorch's own AdamW and clipping."""
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=budget.weight_decay)
    losses = []
    for step in range(budget.steps):
        inputs, targets = problem.batch(member.seed, step)
        loss = problem.losses(model(inputs), targets).mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), budget.clip)
        optimiser.param_groups[0]["lr"] = member.rate * budget.factor(step)
        optimiser.step()
        losses.append(loss.item())
    return losses


def require_equal(problem, build, members=MEMBERS, budget=BUDGET):
    together = Together(problem, build, members, budget)
    losses = torch.stack([together.step() for _ in range(budget.steps)])
    for place, member in enumerate(members):
        alone = build(member.seed)
        expected = torch.tensor(train_alone(problem, alone, member, budget), dtype=torch.float64)
        # 20 steps of float64 sums in another order; AdamW divides small gradients by small roots.
        torch.testing.assert_close(losses[:, place], expected, rtol=0, atol=1e-10)
        for name, weight in alone.named_parameters():
            torch.testing.assert_close(together.model.member(place)[name], weight.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("wiring", list(WIRINGS))
def test_every_wiring_trains_as_alone(wiring: str):
    require_equal(FACTS, lambda seed: reader(seed, wiring))


@pytest.mark.parametrize(
    "remedy",
    [DeEscalate(0.3, at="output", mixing="full"), DeEscalate(0.3, mixing="prefix"), ResidualWeight(0.4)],
    ids=repr,
)
@pytest.mark.parametrize("wiring", ["pre", "post"])
def test_remedies_train_as_alone(wiring: str, remedy):
    require_equal(FACTS, lambda seed: reader(seed, wiring, remedy))


def test_a_model_without_blocks_trains_as_alone():
    require_equal(FACTS, lambda seed: Table(FACTS.tokens).double())


@dataclass(frozen=True)
class Pictures:
    """Random images of one channel."""

    def batch(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        images = torch.randn(6, 1, 8, 8, generator=generator, dtype=torch.float64)
        return images, torch.randint(10, (6,), generator=generator)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_a_vision_transformer_trains_as_alone(pool):
    def build(seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        sizes = {"image_size": 8, "patch_size": 4, "channels": 1}
        return VisionTransformer(2, BlockConfig(8, 2), **sizes, pool=pool, generator=generator).double()

    require_equal(Pictures(), build)


@dataclass(frozen=True)
class Letters:
    """Random letters; every one is predicted from those before it."""

    def batch(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        letters = torch.randint(11, (5, 7), generator=torch.Generator().manual_seed(1000 * seed + step))
        return letters[:, :-1], letters[:, 1:]

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.mT, targets, reduction="none").mean(1)


def test_a_causal_language_model_trains_as_alone():
    def build(seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        return CausalLM(2, BlockConfig(8, 2), vocabulary=11, context=16, generator=generator).double()

    require_equal(Letters(), build)


def test_another_rate_would_be_noticed():
    together = Together(FACTS, reader, [Member(1, 3e-3), Member(2, 4.0001e-3)], BUDGET)
    losses = [together.step()[1].item() for _ in range(BUDGET.steps)]
    expected = train_alone(FACTS, reader(2), Member(2, 4e-3), BUDGET)
    assert max(abs(one - other) for one, other in zip(losses, expected, strict=True)) > 1e-8


def test_a_member_that_dies_changes_no_other():
    """A rate at which weights overflow."""
    pair = Together(FACTS, reader, [Member(1, 3e-3), Member(2, 1e300)], BUDGET)
    alone = Together(FACTS, reader, [Member(1, 3e-3)], BUDGET)
    for _ in range(5):
        losses, expected = pair.step(), alone.step()
    assert losses[1].isnan()
    torch.testing.assert_close(losses[0], expected[0], rtol=0, atol=1e-12)  # sums of one member, in another blocking


def test_it_goes_on_bit_by_bit(tmp_path: Path):
    path = tmp_path / "state.safetensors"
    whole = Together(FACTS, reader, MEMBERS, BUDGET)
    whole.train()
    killed = Together(FACTS, reader, MEMBERS, BUDGET)
    with pytest.raises(KeyboardInterrupt):
        killed.train(path, every=7, told=lambda made: (_ for _ in ()).throw(KeyboardInterrupt) if made == 16 else None)
    again = Together(FACTS, reader, MEMBERS, BUDGET)
    again.train(path, every=7)
    assert torch.equal(again.model.weights, whole.model.weights)
    assert again.measure() == whole.measure()


def test_attention_as_the_compiler_sees_it_is_the_same(monkeypatch):
    models = [reader(seed) for seed in (1, 2)]
    stacked, symbols = Stacked(models), FACTS.batch(1, 0)[0]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = stacked(torch.cat([symbols, symbols]))
    monkeypatch.undo()
    torch.testing.assert_close(found, torch.cat([model(symbols) for model in models]), rtol=0, atol=1e-12)


@pytest.mark.long  # compiles for ten seconds
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks at it
def test_compiled_blocks_give_the_same():
    eager, compiled = (Together(FACTS, reader, MEMBERS, BUDGET, compile=how) for how in (False, True))
    for _ in range(3):
        torch.testing.assert_close(compiled.step(), eager.step(), rtol=0, atol=1e-10)  # fused sums, as above


def test_what_cannot_be_stacked_is_refused():
    with pytest.raises(ValueError, match="of one shape"):
        Stacked([nn.Linear(2, 3), nn.Linear(2, 4)])
    with pytest.raises(ValueError, match=r"known modules.*weight"):
        Stacked([nn.Bilinear(2, 3, 4)])
    with pytest.raises(ValueError, match="of one shape"):
        Stacked([])
