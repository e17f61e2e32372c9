"""What a newcomer reads of a public function: what goes in, what comes out, and an example that is run."""

import doctest
import inspect

import pytest

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
