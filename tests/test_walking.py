"""Walks through a model give what PyTorch's own give, also where modules and weights stand in several places."""

from torch import nn

from depthscope import walking
from depthscope.models import BlockConfig, Encoder


def shared() -> nn.Module:
    """A module that stands in two others, a weight under two names, an empty place, a list in a list."""
    model = nn.Module()
    inner = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.LayerNorm(2), nn.Linear(2, 2)]))
    model.first, model.nothing, model.second = nn.Sequential(inner, nn.ReLU()), None, nn.Sequential(nn.ReLU(), inner)
    model.head = nn.Linear(2, 2)
    model.head.weight = inner[0].weight
    return model


def test_walks_give_what_pytorch_gives():
    for model in (shared(), Encoder(2, BlockConfig(8, 2)), nn.Linear(2, 2)):
        assert walking.named_modules(model) == list(model.named_modules())
        assert walking.modules(model) == list(model.modules())
        named = walking.named_parameters(model)
        assert [name for name, _ in named] == [name for name, _ in model.named_parameters()]
        assert all(a is b for (_, a), b in zip(named, model.parameters(), strict=True))


def test_the_way_to_a_module_begins_with_the_model():
    model = shared()
    for name, module in model.named_modules(remove_duplicate=False):
        way = walking.way_to(model, name)
        assert (way[0], way[-1]) == (model, module)
        paths = ["", *walking.paths_around(name), name] if name else [""]
        assert way == [model.get_submodule(path) for path in paths]
