"""Open sets: conflicts are named, what exists is said, a broken plug-in does not stop the rest."""

from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest

from depthscope import registry
from depthscope.naming import did_you_mean, unknown_name
from depthscope.registry import Registry


@dataclass(frozen=True)
class Thing:
    name: str
    size: int = 1


OFFERED = [Thing("theirs"), Thing("theirs too")]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Pretends that packages offer things in a group."""

    def pretend(*values: str) -> None:
        points = [EntryPoint(value.rpartition(":")[2], value, "things") for value in values]
        monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "things" else [])

    pretend()
    return pretend


def things() -> Registry[Thing]:
    return Registry("thing", "things", [Thing("ours"), Thing("second")])


def test_things_are_found_by_name_in_order(installed):
    found = things()
    assert list(found) == ["ours", "second"]
    assert found["ours"].name == "ours"
    assert found.owner("ours") == "depthscope"
    found.register(Thing("mine"))
    assert list(found) == ["ours", "second", "mine"]
    assert found.owner("mine") == Thing.__module__.split(".")[0]


def test_an_unknown_name_says_what_there_is(installed):
    with pytest.raises(
        ValueError, match=r"unknown thing 'secand': did you mean 'second'\? expected one of ours, second"
    ):
        things()["secand"]
    assert "nothing" not in things()


def test_two_of_one_name_are_refused_and_both_owners_named(installed):
    found = things()
    with pytest.raises(ValueError, match="exists twice: one of depthscope, one of other"):
        found.register(Thing("ours", 2), owner="other")
    assert found["ours"].size == 1
    same = found["ours"]
    assert found.register(same) is same  # the very same thing again is no conflict


def test_packages_offer_one_thing_or_several(installed):
    installed("test_registry:OFFERED")
    assert list(things()) == ["ours", "second", "theirs", "theirs too"]
    assert "theirs" in things()
    assert things()["theirs too"].name == "theirs too"


def test_a_thing_of_ours_loads_no_package(installed):
    installed("no_such_package:thing")
    assert things()["ours"]


def test_a_broken_package_is_left_out_with_a_warning(installed):
    installed("no_such_package:thing", "test_registry:OFFERED")
    found = things()
    with pytest.warns(UserWarning, match="no_such_package offers 'thing' in things.*ModuleNotFoundError"):
        assert "theirs" in found
    assert "ours" in found


def test_a_thing_that_does_not_belong_is_left_out_and_its_package_named(installed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("test_registry.OFFERED", [3, Thing("theirs")])
    installed("test_registry:OFFERED")
    with pytest.warns(UserWarning, match="test_registry offers 'OFFERED' in things.* is no thing: expected a thing"):
        assert list(things()) == ["ours", "second", "theirs"]


def test_the_default_of_get_and_the_version(installed):
    found = things()
    assert found.get("nothing") is None
    assert found.get("ours").name == "ours"
    before = found.version
    found.register(Thing("mine"))
    found.unregister("mine")
    assert found.version == before + 2


def test_a_package_that_takes_one_of_our_names_is_named(installed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("test_registry.OFFERED", [Thing("ours", 3)])
    installed("test_registry:OFFERED")
    found = things()
    for _ in range(2):  # the same answer each time
        with pytest.raises(ValueError, match="exists twice: one of depthscope, one of test_registry"):
            list(found)


def test_names_are_compared_without_case_and_shown_as_they_are():
    assert did_you_mean("BERT-large", ["Bert-Large", "gpt2"]) == "did you mean 'Bert-Large'? "
    assert did_you_mean("zzz", ["Bert"]) == ""
    assert did_you_mean("mamba", ["llama"]) == ""
    assert did_you_mean("fig1", ["yu2024-fig2", "yu2024-fig1"]) == "did you mean 'yu2024-fig1'? "
    assert did_you_mean("bert-base", ["gpt2", "bert"]) == "did you mean 'bert'? "
    assert did_you_mean("learning_rate", ["depth", "lr"]) == "did you mean 'lr'? "
    assert (
        str(unknown_name("model", "gpt3", ["gpt2"]))
        == "unknown model 'gpt3': did you mean 'gpt2'? expected one of gpt2"
    )
