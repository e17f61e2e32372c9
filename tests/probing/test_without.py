"""`probe(without=…)`: the curve of a model without parts of its blocks, said to be that, and nothing advised by it."""

import math

import pytest
import torch

import depthscope
from depthscope.diagnosis import diagnose
from depthscope.models.families import build_family
from depthscope.probing import Profile, probe
from depthscope.remedies import recommend
from traces import state_of
from zoo import IDS, MASK, make


@pytest.fixture(scope="module")
def fresh_bert() -> torch.nn.Module:
    return build_family("bert", 6, 64)


def ids() -> dict[str, torch.Tensor]:
    some = torch.randint(8, 5000, (3, 24), generator=torch.Generator().manual_seed(0))
    return {"input_ids": some, "attention_mask": torch.ones_like(some)}


def test_the_curve_is_that_of_the_changed_model(fresh_bert: torch.nn.Module):
    whole = probe(fresh_bert, ids())
    cut = probe(fresh_bert, ids(), without=("skips", "ffn"))
    assert whole.curve("token_diversity")[-1] > 0.1
    assert cut.curve("token_diversity")[0] == whole.curve("token_diversity")[0]
    assert cut.curve("token_diversity")[-1] < 1e-10


def test_metadata_notes_table_and_plot_say_what_was_left_out(fresh_bert: torch.nn.Module, tmp_path):
    cut = probe(fresh_bert, ids(), without="norms,ffn")
    assert cut.metadata["without"] == ["ffn", "norms"]
    assert any("without its FFNs and norms: this is not the model as it is" in note for note in cut.metadata["notes"])
    assert "without ffn and norms" in str(cut)
    assert "without ffn, norms" in cut.plot().get_suptitle()
    assert Profile.load(cut.save(tmp_path)).metadata["without"] == ["ffn", "norms"]
    assert "without" not in probe(fresh_bert, ids()).metadata


def test_the_verdict_says_so_and_advises_nothing(fresh_bert: torch.nn.Module):
    measured: list[str] = []

    def measure():
        measured.append("measured")
        return recommend(fresh_bert, ids())

    found = diagnose(probe(fresh_bert, ids(), measures="verdict", stations="trunk", without="skips"), measure=measure)
    assert found.verdict == "collapsed"
    assert found.headline.startswith("Without its skips, which is not the model as it is: the tokens")
    assert found.recommendation.remedies == ()
    assert "Probe it whole" in found.recommendation.reason
    assert not measured
    assert found.finding("normal") is None


def test_inside_an_open_context_the_profile_says_so_too(fresh_bert: torch.nn.Module):
    with depthscope.ablate(fresh_bert, "skips", "ffn"):
        inside = probe(fresh_bert, ids())
        with pytest.raises(ValueError, match="already"):
            probe(fresh_bert, ids(), without="norms")
    asked = probe(fresh_bert, ids(), without=("skips", "ffn"))
    assert inside.metadata["without"] == asked.metadata["without"] == ["skips", "ffn"]
    assert inside.curve("token_diversity") == asked.curve("token_diversity")


def test_gradients_are_those_of_the_changed_model(fresh_bert: torch.nn.Module):
    whole, cut = (probe(fresh_bert, ids(), gradients="outputs", without=parts) for parts in ((), ("skips",)))
    ratio = cut.curve("output_gradient")[1] / whole.curve("output_gradient")[1]
    assert math.isfinite(ratio)
    assert not 0.5 < ratio < 2


def test_a_causal_model_stays_causal_and_padding_stays_out():
    model, _ = make("gpt2")
    whole, cut = (probe(model, {"input_ids": IDS, "attention_mask": MASK}, without=parts) for parts in ((), "skips"))
    assert cut.metadata["causal"] is whole.metadata["causal"] is True
    model.eval()
    other = IDS.clone()
    other[:, -1] = 9
    with torch.no_grad(), depthscope.ablate(model, "skips", "norms"):
        first, second = (model(input_ids=given).logits[:, :-1] for given in (IDS, other))
    assert torch.equal(first, second)


def test_refused_before_anything_runs_and_without_trace():
    model, inputs = make("gptj")
    state = state_of(model)
    with pytest.raises(ValueError, match="share one skip"):
        probe(model, inputs, without="ffn_skip")
    with pytest.raises(ValueError, match="did you mean 'norms'"):
        probe(model, inputs, without="norm")
    assert state_of(model) == state
