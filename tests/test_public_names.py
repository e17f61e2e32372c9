"""What a newcomer reads of a public function: what goes in, what comes out, and an example that is run."""

import doctest
import inspect
from typing import Any

import pytest
import torch

import depthscope

FUNCTIONS = [name for name in depthscope.__all__ if inspect.isfunction(getattr(depthscope, name))]
LATER = {"DepthCallback", "watch"}  # their examples are loops, and are run in the docs


@pytest.mark.parametrize("name", [*FUNCTIONS, "Scope"])
def test_a_docstring_says_what_goes_in_and_what_comes_out(name: str):
    thing = getattr(depthscope, name)
    text = inspect.getdoc(thing) or ""
    for option in inspect.signature(thing).parameters:
        assert f"    {option}: " in text or name in LATER, f"{option} is not explained"
    assert "Returns:" in text or name in {*LATER, "Scope"}


@pytest.mark.parametrize("name", sorted({*FUNCTIONS, "Scope"} - LATER))
def test_an_example_does_what_it_says(name: str):
    thing = getattr(depthscope, name)
    found = doctest.DocTestFinder(recurse=False).find(thing, name, globs={})
    assert found
    assert found[0].examples
    said: list[str] = []
    assert not doctest.DocTestRunner().run(found[0], out=said.append).failed, "".join(said)


VERBS = [name for name in vars(depthscope.verbs.Verbs) if not name.startswith("_")]


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("probe", {"measures": "token_similarity"}),
        ("depth", {"skips": False}),
        ("paths", {}),
        ("spectra", {"whole": False}),
        ("recommend", {"tau": 0.3}),
        ("fix", {"tau": 0.3}),
        ("skip_loss", {"loss": lambda output: output.square().mean()}),
        ("capture", {"blocks": [2, 3]}),
        ("ablate", {}),
        ("watch", {"every": 1}),
        ("apply", {}),
        ("remove", {}),
        ("report", {}),
    ],
)
def test_a_verb_calls_its_function(verb: str, options: dict[str, Any], tmp_path):
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    scope = depthscope.Scope(torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(2, 5, 16))
    given = {"ablate": ["skips"], "apply": [depthscope.DeEscalate(0.3)], "report": [tmp_path]}.get(verb, [])
    assert getattr(scope, verb)(*given, **options) is not None


def test_a_verb_shows_the_options_of_its_function_but_for_what_a_scope_knows():
    assert len(VERBS) == 14
    known = {"model", "inputs", "tokenizer", "hints", *depthscope.discovery.Hints.__annotations__}
    for verb in VERBS:
        function = getattr(depthscope, {"depth": "depth_use", "report": "write_report"}.get(verb, verb))
        options = {name for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}
        own = set(inspect.signature(getattr(depthscope.Scope, verb)).parameters)
        assert (options - known) - own <= {"numbers", "say"}, verb
        for name, parameter in inspect.signature(function).parameters.items():
            if name in own - {"inputs", "blocks"}:
                shown = inspect.signature(getattr(depthscope.Scope, verb)).parameters[name]
                assert shown.default == parameter.default, (verb, name)
