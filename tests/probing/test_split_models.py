"""Models that several processes share, or that do not fit into memory: the numbers are those of the whole model."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers as hf
from torch import nn

import depthscope
from depthscope.remedies import DeEscalate, ResidualWeight
from processes import ENVIRONMENT
from traces import hooks_of
from warm import run_warm

IDS = torch.arange(24).reshape(2, 12)
HERE = Path(__file__).parent
PLACE = ["block", "station", "head", "measure", "sample"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama on disk: four heads, two groups of keys."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=50, num_hidden_layers=3, **shape))
    with torch.no_grad():
        for parameter in model.parameters():  # sharper than an initialiser's: heads that differ
            parameter.mul_(3)
    model.save_pretrained(path := tmp_path_factory.mktemp("llama"))
    return path


def whole(folder: Path) -> nn.Module:
    return hf.AutoModelForCausalLM.from_pretrained(folder).eval()


def logits_with_remedies(model: nn.Module) -> torch.Tensor:
    depthscope.apply(model, DeEscalate(0.5), ResidualWeight(0.5))
    return model(IDS).logits.detach()


@pytest.fixture(scope="module")
def said(folder: Path) -> list[dict[str, Any]]:
    """What each of two processes says about the models that they share; its profiles are in the folder."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this build of torch has no torch.distributed with gloo")
    with ThreadPoolExecutor(2) as pool:
        script = str(HERE / "split_model.py")
        ended = list(pool.map(lambda rank: run_warm(script, str(folder), str(rank), env=ENVIRONMENT), range(2)))
    assert [process.returncode for process in ended] == [0, 0], "\n".join(process.stderr for process in ended)
    return [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(2)]


def assert_same_numbers(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    """The same rows in the same order; float32 sums in another order, over three blocks."""
    pd.testing.assert_frame_equal(found[PLACE], expected[PLACE])
    assert found["value"].tolist() == pytest.approx(expected["value"].tolist(), rel=1e-4, abs=2e-6, nan_ok=True)


def test_under_tensor_parallelism_every_process_has_all_heads_rightly_numbered(folder: Path, said: list[Any]):
    expected = depthscope.probe(whole(folder), IDS, measures="all", stations="all")
    by_head = expected.frame.query("measure == 'attention_entropy' and block == 1").groupby("head")["value"].mean()
    assert by_head.sort_values().diff().min() > 1e-3  # no head could be taken for another one
    logits = logits_with_remedies(whole(folder))
    for rank in range(2):
        profile = depthscope.Profile.load(folder / f"tensor_parallel-{rank}")
        assert_same_numbers(profile.frame, expected.frame)
        assert profile.metadata["notes"] == expected.metadata["notes"]
        found = torch.tensor(said[rank]["tensor_parallel"]["logits"])
        assert found.allclose(logits, rtol=1e-4, atol=1e-5)  # float32, summed in two parts


def test_in_an_unknown_model_it_is_said_whose_heads_are_seen_and_parts_of_the_tokens_are_refused(said: list[Any]):
    for each in said:
        answers = each["unknown"]
        assert "heads are those that this process computes" in " ".join(answers["notes"])
        assert "different tokens" in answers["other tokens"]
        assert "sequence parallelism" in answers["half"]
        assert "a DTensor (2, 12, 16)" in answers["spread"]


def test_fully_sharded_the_numbers_are_the_same(folder: Path, said: list[Any]):
    expected = depthscope.probe(whole(folder), IDS, measures="all", stations="all")
    logits = logits_with_remedies(whole(folder))
    for rank in range(2):
        profile = depthscope.Profile.load(folder / f"fully_sharded-{rank}")
        assert_same_numbers(profile.frame, expected.frame)
        assert profile.metadata["weights"] == expected.metadata["weights"]
        assert torch.equal(torch.tensor(said[rank]["fully_sharded"]["logits"]), logits)
        assert 'gradients="outputs"' in said[rank]["fully_sharded"]["gradients"]
        assert said[rank]["fully_sharded"]["other inputs"] == "nothing was refused"  # each process has data of its own


# --- offloaded ------------------------------------------------------------------------------------------


def offloaded(folder: Path, tmp_path: Path) -> nn.Module:
    here = ("model.embed_tokens", "model.layers.1", "model.norm", "model.rotary_emb")
    away = ("model.layers.0", "model.layers.2", "lm_head")
    device_map = dict.fromkeys(here, "cpu") | dict.fromkeys(away, "disk")
    model = hf.AutoModelForCausalLM.from_pretrained(folder, device_map=device_map, offload_folder=tmp_path).eval()
    assert model.model.layers[0].self_attn.q_proj.weight.is_meta
    return model


def test_weights_on_disk_give_the_same_numbers_and_stay_there(folder: Path, tmp_path: Path):
    model = offloaded(folder, tmp_path)
    before, hooks = model(IDS).logits, hooks_of(model)
    profile = depthscope.probe(model, IDS, measures="all", stations="all", gradients="outputs")
    expected = depthscope.probe(whole(folder), IDS, measures="all", stations="all", gradients="outputs")
    pd.testing.assert_frame_equal(profile.frame, expected.frame)
    for known in ("weights", "device", "parameters", "notes"):
        assert profile.metadata[known] == expected.metadata[known]
    assert profile.metadata["weights"]["norms"] == 6
    assert model.model.layers[0].self_attn.q_proj.weight.is_meta
    assert model.model.layers[0].input_layernorm.weight.is_meta
    assert hooks_of(model) == hooks
    assert torch.equal(model(IDS).logits, before)


def test_weights_on_disk_can_be_remedied_skipped_and_watched(folder: Path, tmp_path: Path):
    labelled = {"input_ids": IDS, "labels": IDS}
    model, other = offloaded(folder, tmp_path), whole(folder)
    pd.testing.assert_frame_equal(depthscope.skip_loss(model, labelled), depthscope.skip_loss(other, labelled))
    assert depthscope.fix(model, IDS).losses == depthscope.fix(other, IDS).losses
    records = []
    for each in (model, other):
        with depthscope.watch(each.train()) as watch:
            each(IDS)
        records.append(watch.records)
    pd.testing.assert_frame_equal(*records)
    assert torch.equal(logits_with_remedies(model.eval()), logits_with_remedies(other.eval()))


def test_gradients_of_weights_on_disk_are_refused(folder: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r'^weights that are offloaded have no gradient here; .*gradients="outputs"$'):
        depthscope.probe(offloaded(folder, tmp_path), IDS, gradients=True)


def test_weights_that_nobody_brings_are_refused(folder: Path, tmp_path: Path):
    model = offloaded(folder, tmp_path)
    model.model.layers[1].to("meta")
    with pytest.raises(ValueError, match="meta device"):
        depthscope.probe(model, IDS)
