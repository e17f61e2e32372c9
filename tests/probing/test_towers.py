"""Models of several towers: every one is measured, by its own tokens and mask, and named wherever numbers are shown."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import depthscope
import zoo
from depthscope import measures as m
from depthscope.anatomy import anatomy_of
from depthscope.cli.probe import as_json
from depthscope.diagnosis.facts import Facts
from depthscope.diagnosis.summary import model_line
from depthscope.hooks.tokens import first_tokens
from depthscope.probing import Profile, probe
from zoo import IDS, IMAGE, IMAGES, MASK, TEXT, make


def vision_to_text() -> nn.Module:
    """A pre-norm encoder of images and a post-norm decoder of text: two families, two placements."""
    return hf.VisionEncoderDecoderModel(
        encoder=hf.ViTModel(hf.ViTConfig(**IMAGE)),
        decoder=hf.BertLMHeadModel(hf.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)),
    )


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    if name == "blip":
        return hf.BlipForConditionalGeneration(
            hf.BlipConfig(text_config=zoo.CLIP_TEXT, vision_config=IMAGE)
        ), zoo.image_and_text()
    if name != "vision to text":
        return make(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return vision_to_text(), {
            "pixel_values": IMAGES,
            "decoder_input_ids": IDS,
            "decoder_attention_mask": MASK,
        }


# Where the blocks of each part are in the model, and their tokens' mask, in the order in which they run; by hand.
TOWERS: dict[str, list[tuple[str, Callable[[Any], Any], Tensor | None]]] = {
    "clip": [
        ("vision", lambda model: model.vision_model.encoder.layers, None),
        ("text", lambda model: model.text_model.encoder.layers, MASK),
    ],
    "siglip": [
        ("vision", lambda model: model.vision_model.encoder.layers, None),
        ("text", lambda model: model.text_model.encoder.layers, MASK),
    ],
    "llava": [
        ("vision", lambda model: model.vision_tower.encoder.layers, None),
        ("language", lambda model: model.language_model.layers, zoo.PICTURE_MASK),
    ],
    "blip": [
        ("vision", lambda model: model.vision_model.encoder.layers, None),
        ("text_decoder", lambda model: model.text_decoder.bert.encoder.layer, MASK),
    ],
    "bart": [
        ("encoder", lambda model: model.encoder.layers, MASK),
        ("decoder", lambda model: model.decoder.layers, MASK),
    ],
    "whisper": [
        ("encoder", lambda model: model.encoder.layers, None),
        ("decoder", lambda model: model.decoder.layers, MASK),
    ],
    "vision to text": [
        ("encoder", lambda model: model.encoder.layers, None),
        ("decoder", lambda model: model.decoder.bert.encoder.layer, MASK),
    ],
}


@pytest.mark.parametrize("name", TOWERS)
def test_every_tower_equals_a_plain_loop_over_hooks(name: str):
    model, inputs = build(name)
    layers = [(part, list(find(model)), mask) for part, find, mask in TOWERS[name]]
    expected: dict[str, list[Tensor]] = {part: [] for part, _, _ in layers}
    handles = []
    for part, blocks, mask in layers:

        def keep(tokens: Any, part: str = part, mask: Tensor | None = mask) -> None:
            expected[part].append(m.token_similarity(first_tokens(tokens).detach(), mask))

        handles.append(
            blocks[0].register_forward_pre_hook(
                lambda _m, args, kwargs, keep=keep: keep((args, kwargs)), with_kwargs=True
            )
        )
        handles += [block.register_forward_hook(lambda _m, _a, out, keep=keep: keep(out)) for block in blocks]
    with torch.no_grad():
        model.eval()(**inputs)
    for handle in handles:
        handle.remove()

    profile = probe(model, inputs, measures=["token_similarity"])
    assert profile.metadata["parts"] == {part: 3 for part, _, _ in layers}
    assert list(profile.parts.values()) == [(1, 3), (4, 6)]
    for part, values in expected.items():
        found = profile.curve("token_similarity", part=part)
        np.testing.assert_allclose(found, [value.mean() for value in values], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("clip", ("vision_model_output", "text_model_output")),
        ("siglip", ("vision_model_output", "text_model_output")),
        ("bart", ("encoder_hidden_states", "decoder_hidden_states")),
    ],
)
def test_towers_equal_the_hidden_states_of_hugging_face(name: str, fields: tuple[str, str]):
    model, inputs = build(name)
    with torch.no_grad():
        output = model.eval()(**inputs, output_hidden_states=True)
    profile = probe(model, inputs, measures=["token_similarity"])
    for (part, _, mask), key in zip(TOWERS[name], fields, strict=True):
        states = output[key] if isinstance(output[key], tuple) else output[key].hidden_states
        assert len(states) == 4
        expected = [m.token_similarity(state, mask).mean() for state in states]
        np.testing.assert_allclose(profile.curve("token_similarity", part=part), expected, rtol=1e-6)


def test_each_tower_has_its_own_metadata():
    model, inputs = make("llava")
    about = probe(model, inputs).metadata
    assert about["family"] == "clip + llama"
    assert about["towers"]["vision"] == {
        "first_block": 1,
        "last_block": 3,
        "tokens": 17,
        "width": 16,
        "samples": 2,
        "family": "clip",
        "placement": "pre",
        "causal": False,
        "token_axis": 1,
    }
    assert about["towers"]["language"] == about["towers"]["vision"] | {
        "first_block": 4,
        "last_block": 6,
        "tokens": 23,
        "family": "llama",
        "causal": True,
    }
    mixed = probe(*build("vision to text")).metadata
    assert [tower["placement"] for tower in mixed["towers"].values()] == ["pre", "post"]
    assert (mixed["placement"], mixed["causal"]) == (None, None)
    assert probe(*make("bert")).metadata["towers"] == {}


@pytest.mark.parametrize("batches", [1, 3])
def test_towers_of_other_batch_sizes_keep_their_samples_apart(batches: int):
    """Three pictures and two texts, as CLIP is used to classify."""
    model, _ = make("clip")
    images = torch.cat([IMAGES, IMAGES[:1].flip(-1)])
    batch = {"pixel_values": images, "input_ids": IDS, "attention_mask": MASK}
    profile = probe(model, [batch] * batches, measures=["light", "escalation_rate"], stations="trunk")
    towers = profile.metadata["towers"]
    assert [towers[part]["samples"] for part in ("vision", "text")] == [3 * batches, 2 * batches]
    rows = profile.frame.query("measure == 'token_similarity' and station == 'output'")
    for block, count in ((2, 3), (5, 2)):
        samples = rows.loc[rows["block"] == block, "sample"]
        assert samples.is_unique
        assert len(samples) == count * batches
    with torch.no_grad():
        state = model.eval().vision_model(images, output_hidden_states=True).hidden_states[2]
    first = rows.query("block == 2 and sample < 3")["value"].to_numpy()
    np.testing.assert_allclose(first, m.token_similarity(state).numpy(), rtol=1e-6)


@pytest.mark.parametrize("name", ["clip", "bart", "llava"])
def test_every_tower_has_gradients(name: str):
    """Also one that does not lead to the other, as CLIP's; it gets those that it has alone."""
    model, inputs = make(name)
    profile = probe(model, inputs, measures=["token_similarity"], gradients=True)
    assert not np.isnan(profile.curve("output_gradient")[1:]).any()
    assert not np.isnan(profile.curve("weight_gradient")[1:]).any()
    if name == "clip":
        alone = probe(model.vision_model, IMAGES, measures=["token_similarity"], gradients=True)
        np.testing.assert_allclose(profile.curve("output_gradient")[1:4], alone.curve("output_gradient")[1:], rtol=1e-5)


def test_a_tower_that_does_not_run_is_said():
    model, _ = make("llava")
    profile = probe(model, {"input_ids": IDS, "attention_mask": MASK})
    assert profile.depth == 3
    assert profile.metadata["parts"] == {"language": 3}
    assert "not run with these inputs, and not counted: vision" in profile.metadata["notes"]


def test_a_tower_of_no_known_family_is_said():
    """Nobody here took OpenAI's GPT apart: it stands beside a BERT, and is not passed over in silence."""
    model = nn.ModuleDict(
        {
            "known": hf.BertModel(hf.BertConfig(**TEXT)),
            "other": hf.OpenAIGPTModel(hf.OpenAIGPTConfig(vocab_size=50, n_embd=16, n_layer=2, n_head=4)),
            "heads": nn.ModuleList([nn.Linear(16, 2) for _ in range(3)]),
        }
    )
    assert anatomy_of(model).notes == ("of no known family, and not measured (blocks= names them): other.h",)


class TakesTurns(nn.Module):
    """Two towers that run one block each in turn, and a third that runs before its place in the model."""

    def __init__(self):
        super().__init__()
        layer = {"d_model": 16, "nhead": 4, "dim_feedforward": 24, "batch_first": True}
        self.late = nn.ModuleList([nn.TransformerEncoderLayer(**layer) for _ in range(2)])
        self.left = nn.ModuleList([nn.TransformerEncoderLayer(**layer) for _ in range(2)])
        self.right = nn.ModuleList([nn.TransformerEncoderLayer(**layer) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        left, right = x, x.flip(1)
        for a, b in zip(self.left, self.right, strict=True):
            left, right = a(left), b(right)
        for block in self.late:
            left = block(left + right)
        return left


def test_towers_that_take_turns_are_told_apart():
    profile = probe(TakesTurns(), zoo.TOKENS, measures=["token_similarity"])
    assert profile.metadata["parts"] == {"left": 1, "right": 1, "left (2)": 1, "right (2)": 1, "late": 2}
    assert any("numbered as they ran" in note for note in profile.metadata["notes"])


def test_trocr_shows_its_stations_and_not_its_attention():
    """Its attention is a softmax of three axes, of heads and sequences at once: it is said that it is not seen."""
    decoder = hf.TrOCRForCausalLM(hf.TrOCRConfig(**zoo.BART, is_decoder=True, add_cross_attention=True))
    model = hf.VisionEncoderDecoderModel(encoder=hf.ViTModel(hf.ViTConfig(**IMAGE)), decoder=decoder)
    batch = {"pixel_values": IMAGES, "decoder_input_ids": IDS}
    profile = probe(model, batch, measures=["token_similarity", "attention_entropy"], stations="all")
    rows = profile.frame.query("block == 5 and measure == 'token_similarity'")
    assert {"cross_attention_input", "after_cross_attention", "cross_attention_branch"} <= set(rows["station"])
    assert "attention was not seen in blocks 4, 5, 6" in profile.metadata["notes"]


# --- names of parts --------------------------------------------------------------------------------------


class At(nn.Module):
    """Blocks at these paths; never run."""

    def __init__(self, *paths: str):
        super().__init__()
        for path in paths:
            *parents, last = path.split(".")
            here: nn.Module = self
            for parent in parents:
                if not hasattr(here, parent):
                    here.add_module(parent, nn.Module())
                here = here.get_submodule(parent)
            here.add_module(last, nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 8) for _ in range(2)]))


@pytest.mark.parametrize(
    ("paths", "parts"),
    [
        (("encoder.layer",), ("",)),
        (("text_model.encoder.layers", "vision_model.encoder.layers"), ("vision", "text")),
        (("model.vision_tower.layers", "model.language_model.layers"), ("vision", "language")),
        (("decoder.blocks", "encoder.blocks"), ("encoder", "decoder")),
        (("teacher.encoder.layer", "student.encoder.layer"), ("teacher", "student")),
        (("image_encoder.layers", "image_tower.layers"), ("image_encoder", "image_tower")),
        (("a.visual.blocks", "a.audio_tower.layers", "b.layers"), ("a.visual", "a.audio", "b")),
    ],
)
def test_names_and_order_of_parts(paths: tuple[str, ...], parts: tuple[str, ...]):
    anatomy = anatomy_of(At(*paths))
    assert anatomy.parts == parts
    assert [len(anatomy.of_part(part)) for part in parts] == [2] * len(parts)


def test_stages_are_parts_and_not_blocks():
    """Swin: patches are merged between two stages; a block's tokens are those of the whole image."""
    config = hf.SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=4)
    torch.manual_seed(0)
    model = hf.SwinModel(config).eval()
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    profile = probe(model, images, measures="all", stations="trunk")
    towers = profile.metadata["towers"]
    assert profile.metadata["parts"] == {"stage 1": 2, "stage 2": 2}
    assert [(tower["tokens"], tower["width"]) for tower in towers.values()] == [(64, 8), (16, 16)]
    with torch.no_grad():
        states = model(images, output_hidden_states=True).hidden_states  # before, after stage 1 merged, after stage 2
    expected = m.token_similarity(states[1]).mean().item()
    assert profile.curve("token_similarity", part="stage 2")[0] == pytest.approx(expected, rel=1e-6)
    notes = " ".join(profile.metadata["notes"])
    assert "similarity is over all tokens of an image" in notes
    assert "attention was not seen in blocks 1, 2" in notes  # within windows; stage 2 has one
    assert "between the blocks" not in notes  # merging stands between two parts


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # DeBERTa, of transformers
def test_deberta_says_what_stands_between_its_blocks():
    model = hf.DebertaV2Model(hf.DebertaV2Config(**TEXT, conv_kernel_size=3)).eval()
    notes = probe(model, zoo.text()).metadata["notes"]
    assert "something else changes the tokens between the blocks, before block 2" in notes


# --- what is shown -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profile() -> Profile:
    return probe(*make("clip"), measures="verdict", stations="trunk")


def test_tables_name_both_towers(profile: Profile):
    summary = profile.summary()
    assert list(summary.index) == [("vision", b) for b in (0, 1, 2, 3)] + [("text", b) for b in (0, 4, 5, 6)]
    assert summary.loc[("text", 0), "token_similarity"] == profile.curve("token_similarity", part="text")[0]
    beside = profile.against(profile)
    assert set(beside["part"]) == {"vision", "text"}
    assert "6 blocks · vision 1–3 · text 4–6 · " in model_line(profile.metadata)
    with pytest.raises(ValueError, match="unknown part 'txt': did you mean 'text'"):
        profile.curve("token_similarity", part="txt")


def test_pictures_have_a_curve_per_tower(profile: Profile):
    axes = profile.plot(["token_similarity"]).axes[0]
    assert axes.get_legend_handles_labels()[1] == ["vision", "text"]
    assert [line.get_xdata().tolist() for line in axes.lines] == [[0, 1, 2, 3], [3, 4, 5, 6]]
    np.testing.assert_allclose(axes.lines[1].get_ydata(), profile.curve("token_similarity", part="text"))


def test_the_verdict_is_about_one_tower_and_names_it(profile: Profile):
    facts = Facts(profile)
    ends = {part: profile.curve("direction_similarity", part=part)[-1] for part in ("vision", "text")}
    worst = max(ends, key=ends.__getitem__)
    assert facts.span == (worst, *((0, 3) if worst == "vision" else (3, 6)))
    assert facts.blocks == 3
    assert facts.start("token_similarity") == profile.curve("token_similarity", part=worst)[0]
    assert facts.about["tokens"] == profile.metadata["towers"][worst]["tokens"]
    assert f"in the {worst} tower" in str(depthscope.diagnose(profile))


def test_json_and_gates_know_both_towers(profile: Profile):
    from depthscope.cli.probe import failures
    from depthscope.conditions import parse_condition

    found = as_json(profile, depthscope.diagnose(profile))
    assert set(found["entrances"]) == {"vision", "text"}
    assert set(found["metadata"]["towers"]) == {"vision", "text"}
    failed = list(failures(profile, [parse_condition("token_similarity>0", ("token_similarity",), "--fail-on")]))
    assert ["at block 3" in failed[0], "at block 6" in failed[1], len(failed)] == [True, True, 2]


def test_only_blocks_of_the_judged_part_are_counted():
    model, inputs = make("bart")
    facts = Facts(probe(model, inputs, measures="verdict"))
    assert facts.span[0] in ("encoder", "decoder")
    assert facts.remedied == ((1, 2, 3) if facts.span[0] == "encoder" else (4, 5, 6))
