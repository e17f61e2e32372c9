"""A saved model says which remedies it had, and gets them back."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch.testing import assert_close

import depthscope
import zoo
from depthscope.remedies import DeEscalate, Ema, LearnableTau, Prefix, ResidualWeight, applied, restore
from depthscope.remedies.record import from_dict, to_dict


@pytest.mark.parametrize(
    "remedy",
    [
        DeEscalate(),
        DeEscalate(0.3, at="input", mixing=Prefix(shrink=2.0), blocks=(1, 2), leave_alone=(0,)),
        DeEscalate(LearnableTau(0.2, per_feature=True), mixing=Ema(decay=0.9), every=3, allow_leak=True),
        ResidualWeight(0.1, blocks=(3,)),
    ],
    ids=str,
)
def test_a_record_is_json_and_comes_back(remedy):
    assert from_dict(json.loads(json.dumps(to_dict(remedy)))) == remedy


def test_a_bad_record_is_refused():
    with pytest.raises(ValueError, match=r"unknown remedy 'magic': expected one of .*residual-weight, .*de-escalation"):
        from_dict({"remedy": "magic"})
    with pytest.raises(ValueError, match="depthscope has dropped the remedy 'neutreno': use the version"):
        from_dict({"remedy": "neutreno"})
    with pytest.raises(
        ValueError, match=r"has no option 'taw': did you mean 'tau'\? expected some of .*tau, at, mixing"
    ):
        from_dict({"remedy": "de-escalation", "taw": 1})
    for record in ({"remedy": "de-escalation", "tau": {"kind": "Magic"}}, {"remedy": "residual-weight"}, {}):
        with pytest.raises(ValueError, match="expected a record of"):
            from_dict(record)


def test_save_pretrained_and_restore(tmp_path):
    model, inputs = zoo.make("bert")
    depthscope.apply(model.eval(), DeEscalate(LearnableTau(0.4)), ResidualWeight(0.5))
    with torch.no_grad():
        model.encoder.layer[1].deescalation_output_logit.fill_(2.0)
    expected = model(**inputs)[0]
    model.save_pretrained(tmp_path)
    loaded = hf.BertModel.from_pretrained(tmp_path).eval()
    assert not torch.allclose(loaded(**inputs)[0], expected)  # a loaded model has no hooks
    with pytest.raises(ValueError, match="folder it was saved in"):
        restore(loaded)
    assert not applied(loaded)
    restore(loaded, tmp_path)
    assert torch.equal(loaded(**inputs)[0], expected)
    learned = next(entry.values["tau"] for entry in applied(loaded) if entry.block == "encoder.layer.1")
    assert learned == pytest.approx(0.8808, 1e-3)  # sigmoid(2)
    with pytest.raises(ValueError, match="already"):
        restore(loaded, tmp_path)
    again = hf.BertModel.from_pretrained(tmp_path).eval()
    assert_close(restore(again, model.state_dict())(**inputs)[0], expected)


def test_what_was_learned_comes_back_also_where_the_library_saves_it_under_older_names(tmp_path):
    """`layers.0.residual_weight` of a ViT is `encoder.layer.0.residual_weight` on disk."""
    model, inputs = zoo.make("vit")
    depthscope.apply(model.eval(), ResidualWeight(0.5, learn="block"))
    for number, weight in enumerate(p for name, p in model.named_parameters() if name.endswith("residual_weight")):
        weight.data.fill_(0.1 * (number + 1))
    expected = model(inputs)[0]
    model.save_pretrained(tmp_path)
    loaded = restore(type(model).from_pretrained(tmp_path).eval(), tmp_path)
    assert torch.equal(loaded(inputs)[0], expected)
    on_disk = load_file(tmp_path / "model.safetensors")
    loaded = restore(type(model).from_pretrained(tmp_path).eval(), on_disk)
    assert torch.equal(loaded(inputs)[0], expected)


def test_learned_numbers_of_another_shape_are_refused(tmp_path):
    """One number would else be copied to all features in silence."""
    model, _ = zoo.make("bert")
    depthscope.apply(model, ResidualWeight(0.5, learn="feature"))
    model.save_pretrained(tmp_path)
    weights = {
        name: tensor.mean() if "residual_weight" in name else tensor for name, tensor in model.state_dict().items()
    }
    loaded = type(model).from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"_branch' of shape \(\d+,\) among the saved .*, got one of shape \(\)"):
        restore(loaded, weights)
    assert not applied(loaded)


def test_a_model_without_remedies_saves_no_record(tmp_path):
    model, _ = zoo.make("gpt2")
    depthscope.remove(depthscope.apply(model, DeEscalate()))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="records no remedies"):
        restore(model)
    assert "depthscope" not in (tmp_path / "config.json").read_text()


def test_what_apply_was_told_is_recorded_and_told_again(tmp_path):
    """A remedy of one tower comes back into that tower, and a model that was told to be causal stays so."""
    config = hf.CLIPConfig(
        text_config={"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
                     "intermediate_size": 24, "max_position_embeddings": 32, "eos_token_id": 2, "bos_token_id": 1},
        vision_config={"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
                       "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )  # fmt: skip
    model = hf.CLIPModel(config).eval()
    depthscope.apply(model, DeEscalate(0.5), blocks="vision_model.encoder.layers.*", causal=False)
    before = [(entry.block, entry.remedy) for entry in applied(model)]
    assert [block for block, _ in before] == ["vision_model.encoder.layers.0", "vision_model.encoder.layers.1"]
    model.save_pretrained(tmp_path)
    again = hf.CLIPModel.from_pretrained(tmp_path)
    assert not applied(again)
    restore(again)
    assert [(entry.block, entry.remedy) for entry in applied(again)] == before
    pixels = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        ours, theirs = (m.vision_model(pixels).last_hidden_state for m in (model, again))
    assert torch.equal(ours, theirs)
