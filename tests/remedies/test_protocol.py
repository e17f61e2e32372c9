"""A remedy that nobody here wrote: what the protocol does for it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import depthscope
import zoo
from depthscope.anatomy import BlockAnatomy, anatomy_of
from depthscope.hooks import Listen, Machine, undisturbed
from depthscope.hooks.staying import TokenHook
from depthscope.inputs import batches
from depthscope.remedies import REMEDIES, Remedy, Site, applied, register_remedy
from depthscope.remedies.record import from_dict, to_dict


@dataclass(frozen=True)
class Scale(Remedy):
    """Multiplies the tokens at a station; with `mean`, adds their mean as well, which mixes them."""

    factor: float = 3.0
    at: str = "after_attention"
    mean: bool = False
    name: ClassVar[str] = "scale"

    def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
        return (self.at,)

    def mixing_in(self, site: Site) -> str:
        return "full" if self.mean else "none"

    def install(self, site: Site) -> None:
        site.put(self, Scaled(self.factor, self.mean), self.at)


class Scaled(TokenHook):
    def __init__(self, factor: float, mean: bool):
        self.factor, self.mean = factor, mean

    def change(self, tokens: Tensor) -> Tensor:
        return self.factor * tokens + (tokens.mean(dim=1, keepdim=True) if self.mean else 0)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_remedy(Scale)
    yield
    REMEDIES.unregister("scale")


def stations(model, inputs) -> dict[tuple[int, str], Tensor]:
    """All stations of all blocks, in float64."""
    found: dict[tuple[int, str], Tensor] = {}
    every = {station for block in anatomy_of(model).blocks for station in block.spots}

    def keep(visit, station, tokens, _source):
        found[visit.number, station] = tokens.clone()

    with undisturbed(model), Machine(model, anatomy_of(model), Listen(every, keep)):
        for batch in batches(model, inputs):
            model(*batch.args, **batch.kwargs)
    return found


@pytest.mark.parametrize("name", ["vit", "gpt2", "opt", "llama", "t5", "bert", "encoder-pre", "torch-tokens-first"])
def test_the_trunk_is_changed_also_where_a_norm_reads_a_copy(name: str):
    """In pre-norm the output is the changed trunk plus the FFN's branch, not the old trunk."""
    model, inputs = zoo.make(name)
    model = model.double()
    inputs = (
        {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        if isinstance(inputs, dict)
        else inputs
    )
    inputs = inputs.double() if isinstance(inputs, Tensor) and inputs.is_floating_point() else inputs
    before = stations(model, inputs)
    depthscope.apply(model, Scale(3.0, blocks=None if name == "albert" else (1,)))
    after = stations(model, inputs)
    assert_close(after[1, "after_attention"], 3 * before[1, "after_attention"], rtol=0, atol=1e-10)
    if anatomy_of(model).blocks[0].placement == "pre":
        expected = after[1, "after_attention"] + after[1, "ffn_branch"]
        assert_close(after[1, "output"], expected, rtol=0, atol=1e-10)


def test_hooks_are_listed_and_the_same_remedy_does_not_go_in_twice():
    model, _ = zoo.make("bert")
    depthscope.apply(model, Scale(every=2))
    assert [(entry.block, entry.station) for entry in applied(model)] == [("encoder.layer.1", "after_attention")]
    with pytest.raises(ValueError, match="scale is already at the after_attention"):
        depthscope.apply(model, Scale())
    depthscope.apply(model, Scale(at="output"))  # elsewhere it may


def test_full_mixing_is_refused_in_a_causal_model_in_its_own_words():
    model, _ = zoo.make("gpt2")
    with pytest.raises(ValueError, match="scale with full mixing in a model that is causal") as error:
        depthscope.apply(model, Scale(mean=True))
    assert "mixing='auto'" not in str(error.value)  # that is how de-escalation gets a causal form
    depthscope.apply(model, Scale(mean=True, allow_leak=True))
    assert applied(model)


def test_every_option_is_recorded_and_comes_back():
    remedy = Scale(2.0, blocks=(1, 3), allow_leak=True)
    assert to_dict(remedy) == {"remedy": "scale", "factor": 2.0, "blocks": [1, 3], "allow_leak": True}
    assert from_dict(to_dict(remedy)) == remedy
    with pytest.raises(ValueError, match="expected blocks to hold numbers from 1"):
        Scale(blocks=(0,))


def test_a_defect_in_a_remedy_is_not_taken_for_a_bad_record():
    @dataclass(frozen=True)
    class Defect(Remedy):
        name: ClassVar[str] = "defect"

        def __post_init__(self) -> None:
            raise TypeError("a defect of its author")

        def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
            return ()

        def install(self, site: Site) -> None: ...

    register_remedy(Defect)
    try:
        with pytest.raises(ValueError, match="a defect of its author"):
            from_dict({"remedy": "defect"})
    finally:
        REMEDIES.unregister("defect")


def test_what_is_no_remedy_is_refused():
    class Plain:
        name = "plain"

    with pytest.raises(ValueError, match="expected a dataclass that inherits Remedy"):
        register_remedy(Plain)
    with pytest.raises(ValueError, match="expected remedies"):
        depthscope.apply(zoo.make("bert")[0], Plain())


def test_a_copy_does_not_carry_the_running_difference():
    model, inputs = zoo.make("vit")
    depthscope.apply(model, Scale(3.0))
    first = next(batches(model, inputs))
    with torch.no_grad():
        model(*first.args, **first.kwargs)
    hooks = [h for m in model.modules() for h in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]
    scaled = [hook for hook in hooks if isinstance(hook, Scaled)]
    assert len(scaled) == 3
    assert all(hook.is_copy and hook.carried.difference is None for hook in scaled)  # let go at the end of each block
