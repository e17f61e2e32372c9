"""What `depth_use` returns and leaves behind: tables, files, words, notes on what does not apply; no trace."""

import copy
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as hf
from torch import nn

import depthscope
from depthscope import DepthUse, depth_use
from depthscope.models import BlockConfig, Encoder
from depthscope.usage.verdict import counts_of, findings_of
from samples import seeded
from traces import state_of
from zoo import BART, IDS, MASK, make


@pytest.fixture(scope="module")
def used() -> DepthUse:
    model, inputs = make("gpt2")
    return depth_use(model.eval(), inputs)


def test_everything_of_a_language_model(used: DepthUse):
    assert list(used.frame["block"]) == [1, 2, 3]
    whole = [name for name in used.frame if name != "skip_later"]
    assert used.frame[whole].notna().all().all()
    assert used.frame["skip_later"].isna().tolist() == [False, False, True]
    assert used.matrix.shape == (3, 3)
    assert np.isnan(np.tril(used.matrix)).sum() == 0 or used.matrix.isna().sum().sum() == 6
    assert used.metadata["samples"] == 2
    assert used.metadata["shortest"] == 4
    assert "3 blocks" in str(used)
    assert "<DepthUse of" in repr(used)
    assert set(used.summary().columns) == {"blocks", "of", "rests_on"}
    assert used.plot().axes
    json.dumps(used.to_dict()["summary"])


def test_saved_and_loaded(used: DepthUse, tmp_path: Path):
    used.save(tmp_path)
    found = DepthUse.load(tmp_path)
    pd.testing.assert_frame_equal(found.frame, used.frame)
    pd.testing.assert_frame_equal(found.matrix, used.matrix)
    assert found.metadata == json.loads(json.dumps(used.metadata))
    assert str(found) == str(used)
    about = json.loads((tmp_path / "depth.json").read_text(encoding="utf-8"))
    for name, wrong in (("weights", "trained"), ("energy", {"shared": None})):
        (tmp_path / "depth.json").write_text(json.dumps(about | {name: wrong}), encoding="utf-8")
        with pytest.raises(ValueError, match="holds no use of depth"):
            DepthUse.load(tmp_path)
    (tmp_path / "depth.json").write_text(json.dumps(about), encoding="utf-8")
    (tmp_path / "depth.parquet").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="holds no use of depth"):
        DepthUse.load(tmp_path)
    with pytest.raises(ValueError, match=r"no use of depth in .*depth.json is missing"):
        DepthUse.load(tmp_path / "elsewhere")


def test_an_encoder_says_what_does_not_apply(tmp_path: Path):
    model, inputs = make("bert")
    found = depth_use(model.eval(), inputs)
    for name in ("lens_kl", "skip_loss"):
        assert found.frame[name].isna().all()
    notes = " ".join(found.metadata["notes"])
    assert "no logit lens" in notes
    assert "returns no loss" in notes
    assert found.frame["skip_output"].notna().all()
    assert found.metadata["loss"] is None
    found.save(tmp_path)
    assert DepthUse.load(tmp_path).summary().equals(found.summary())


def test_padding_changes_nothing():
    """A sequence alone, and with padding beside a longer one."""
    model, _ = make("llama")
    model.eval()
    alone = depth_use(model, {"input_ids": IDS[1:, :4]}).frame
    padded = depth_use(model, {"input_ids": IDS[1:], "attention_mask": MASK[1:]}).frame
    pd.testing.assert_frame_equal(alone, padded, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_half_precision(name: str):
    model, inputs = make(name)
    full = depth_use(model.eval(), inputs).frame
    half = depth_use(model.bfloat16(), inputs).frame
    for column in ("attention_ratio", "ffn_ratio", "largest_logit", "skip_output"):
        np.testing.assert_allclose(half[column], full[column], rtol=0.1)


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_one_part_of_an_encoder_decoder(part: str):
    torch.manual_seed(0)
    model = hf.BartForConditionalGeneration(hf.BartConfig(**BART)).eval()
    batch = {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS[:, :5], "labels": IDS[:, :5]}
    with pytest.raises(ValueError, match=r"several parts \(encoder, decoder\): say which one, as in part='decoder'"):
        depth_use(model, batch)
    found = depth_use(model, batch, part=part)
    assert found.depth == 3
    assert found.metadata["part"] == part
    assert found.frame["skip_loss"].notna().all()  # the model's own, with labels
    assert ("cross_attention_ratio" in found.frame) == (part == "decoder")
    assert found.frame["lens_kl"].notna().all() == (part == "decoder")


def test_no_trace():
    model, inputs = make("gpt2")
    model.train()
    weights, state, random = copy.deepcopy(model.state_dict()), state_of(model), torch.get_rng_state()
    depth_use(model, inputs)
    assert torch.equal(torch.get_rng_state(), random)
    assert state_of(model) == state
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize("calls", [1, 2, 4])
def test_no_trace_after_an_exception(calls: int):
    """In the first pass, and while blocks are skipped."""
    model, inputs = make("gpt2")
    state, count = state_of(model), []

    def fail(output: object) -> torch.Tensor:
        count.append(1)
        if len(count) == calls:
            raise Broken
        return output.logits.sum()

    with pytest.raises(Broken):
        depth_use(model, inputs, loss=fail)
    assert state_of(model) == state

    def burst(*_: object) -> None:
        raise Broken

    handle = model.transformer.h[1].mlp.register_forward_hook(burst)
    with pytest.raises(Broken):
        depth_use(model, inputs)
    handle.remove()
    assert state_of(model) == state


def test_progress_is_called_after_every_pass():
    model, inputs = make("gpt2")
    ticks: list[int] = []
    depth_use(model.eval(), inputs, progress=lambda: ticks.append(1))
    assert len(ticks) == 1 + 3


def test_what_is_refused():
    model = Encoder(2, BlockConfig(8, 2), generator=seeded(0))
    x = torch.randn(2, 4, 8)
    with pytest.raises(ValueError, match="at least 1 token"):
        depth_use(model, x, sample=0)
    with pytest.raises(ValueError, match="at least one batch"):
        depth_use(model, [])


def test_a_tail_that_is_not_understood_is_no_lens():
    """A model that adds something to its logits: right or refused."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make("gpt2")[0]

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            logits = self.inner(input_ids=input_ids, use_cache=False).logits
            return logits + torch.arange(logits.shape[-1])

    found = depth_use(Odd().eval(), IDS, skips=False)
    assert found.frame["lens_kl"].isna().all()
    assert any("no chain of modules" in note for note in found.metadata["notes"])


def table(**columns: list[float]) -> pd.DataFrame:
    depth = len(next(iter(columns.values())))
    names = (
        "lens_kl",
        "lens_top1",
        "lens_top5",
        "skip_later",
        "skip_output",
        "skip_loss",
    )
    empty = {name: [math.nan] * depth for name in ("attention_ratio", "ffn_ratio", *names)}
    return pd.DataFrame({"block": range(1, depth + 1)} | empty | columns)


def said(frame: pd.DataFrame, **metadata: object) -> dict[str, str]:
    return {finding.rule: finding.sentence for finding in findings_of(frame, metadata)}


def test_a_single_block_is_not_said_to_settle_late():
    assert "settled" not in said(table(lens_kl=[0.0], lens_top1=[1.0], lens_top5=[1.0]))


def test_which_half_and_which_blocks_could_go():
    frame = table(skip_loss=[2.0, 0.5, 0.01, 0.2], skip_output=[1.2, 1.0, 1.0, 1.0])
    words = said(frame, loss=3.0, weights={"look": "trained"})
    assert words["half"] == (
        "Most of the work is in 2 of 4 blocks (1–2): of what skipping single blocks costs, they have 92%, and the "
        "first half of the model 92%; block 1 costs most (loss +2.000, +66.7%)."
    )
    assert words["could go"] == (
        "Block 3 could go: the loss (3.000) rises by less than 1%; cheapest is block 3 (loss +0.010, +0.3%). "
        "Other text "
        "may name other blocks."
    )
    # The loss of random weights is chance: the output is looked at in its place.
    words = said(frame, loss=3.0, weights={"look": "initialised"})
    assert words["half"].startswith("Most of the work is in 3 of 4 blocks (1–3)")
    assert words["could go"].startswith("No block could go so that the output moves by less than 10%")
    counts = counts_of(frame, {"loss": 3.0})["blocks"]
    assert counts["are missed"] == 3
    assert counts["carry most of it"] == 2


def test_equal_blocks_are_not_ranked():
    words = said(table(skip_output=[0.22, 0.22, 0.22, 0.23]))
    assert words["half"] == (
        "The work is spread evenly over the 4 blocks: skipping any costs about the same (the output moves by 23%)."
    )
    assert said(table(skip_output=[0.2, 0.2, 0.2, 0.23]))["half"].startswith("Most of the work is in 3 of 4 blocks")


def test_one_block_is_said_to_be_no_depth():
    assert DepthUse(table(skip_output=[0.4])).headline.startswith("1 block is no depth")


def test_one_pass_alone_says_what_it_measures_and_nothing_of_skips():
    use = depth_use(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
        torch.randn(2, 5, 16),
        lens=False,
        skips=False,
    )
    assert use.headline.startswith("One pass alone was asked for")
    assert use.headline[:20] in str(use)
    assert not any("skipping" in note for note in use.metadata["notes"])


def test_where_the_prediction_is_settled():
    shares = {"lens_top5": [0.5] * 4, "lens_kl": [3.0, 1.0, 0.05, 0.0]}
    late = table(lens_top1=[0.1, 0.95, 0.6, 1.0], **shares)
    assert said(late)["settled"].startswith("The prediction is not settled before the last block: 60%")
    early = table(lens_top1=[0.1, 0.6, 0.92, 1.0], **shares)
    assert said(early)["settled"].startswith("The prediction is settled after block 3 of 4: 92% of the tokens")
    assert counts_of(early, {}).loc["until the prediction is settled", "blocks"] == 3
    assert "settled" not in said(table(skip_output=[1.0, 2.0]))


def test_public_names():
    assert depthscope.depth_use is depth_use
    assert depthscope.DepthUse is DepthUse


def test_the_encoder_of_a_pair_has_no_lens_and_no_crash():
    """Its decoder reads what the encoder returned, and ids too: it is no module of the encoder's tail."""
    found = depth_use(hf.T5ForConditionalGeneration(_T5).eval(), {"input_ids": IDS, "decoder_input_ids": IDS},
                      part="encoder")  # fmt: skip
    assert found.frame["lens_kl"].isna().all()
    assert any("no logit lens" in note for note in found.metadata["notes"])


_T5 = hf.T5Config(vocab_size=64, d_model=16, d_kv=4, num_layers=2, num_heads=4, d_ff=32, decoder_start_token_id=0)


def test_the_lens_sees_through_a_cap_that_nearly_all_logits_have_reached():
    model, inputs = make("gemma2")
    model.config.final_logit_softcapping = 0.02  # tanh of 5 and more, from which float32 gives nothing back
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4)
        assert model(**inputs).logits.abs().amax() > 0.0199999
    found = depth_use(model.eval(), inputs, skips=False)
    assert found.frame["lens_kl"].notna().all()
    assert found.frame["lens_kl"].iloc[0] > 0


def test_numbers_that_are_not_finite_are_said():
    model, inputs = make("gpt2")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[0, 0] = math.nan
    found = depth_use(model.eval(), inputs)
    assert any(
        "numbers that are not finite" in note and "the output of block 2" in note for note in found.metadata["notes"]
    )


def test_no_half_does_the_work_where_no_block_is_missed(used: DepthUse):
    frame = used.frame.assign(skip_loss=[0.004, 0.0, -0.01])
    metadata = used.metadata | {"loss": 4.0, "weights": {"look": "trained"}}
    rules_of = {finding.rule: finding.sentence for finding in findings_of(frame, metadata)}
    assert "half" not in rules_of
    assert rules_of["could go"].startswith("Blocks 1–3 could go, one at a time")
    assert "half" in {finding.rule for finding in findings_of(frame.assign(skip_loss=[0.1, 0.0, 0.0]), metadata)}


def test_a_wrong_loss_is_one_line():
    model, inputs = make("gpt2")
    with pytest.raises(ValueError, match="expected loss= to be a function of what the model returns"):
        depth_use(model.eval(), inputs, loss="cross_entropy")  # type: ignore[arg-type]


def test_a_name_is_no_model():
    for measure in (depth_use, depthscope.probe, depthscope.skip_loss):
        with pytest.raises(ValueError, match=r"expected a model, a torch.nn.Module, got 'gpt2'"):
            measure("gpt2", IDS)  # type: ignore[operator]


def test_of_an_odd_number_of_blocks_half_of_the_middle_one_is_in_each_half(used: DepthUse):
    metadata = used.metadata | {"loss": 4.0, "weights": {"look": "trained"}}
    found = next(f for f in findings_of(used.frame.assign(skip_loss=[2.0, 9.0, 1.0]), metadata) if f.rule == "half")
    assert found.sentence.startswith("Most of the work is in 1 of 3 blocks (2)")
    assert found.numbers["first_half"] == pytest.approx(6.5 / 12)
