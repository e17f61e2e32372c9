"""Which tokens are real: whatever a model takes for a mask, the numbers are those of a loop over the real tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import depthscope
from depthscope import probe
from depthscope.discovery import pieces_of, unpacked
from depthscope.inputs import Batch
from depthscope.inputs.mask_names import meant_for
from depthscope.remedies import DeEscalate, recommend, restore
from oracles import similarity
from samples import seeded
from zoo import IDS, MASK, TEXT, TOKENS

REAL = MASK.bool()
PAIRS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
SEQ2SEQ = PAIRS | {"vocab_size": 50, "d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24} | {
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "decoder_start_token_id": 2,
}  # fmt: skip


def made(build: Callable[[], nn.Module]) -> nn.Module:
    """With weights that are large enough that tokens and padding differ."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build().eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
    return model


def measured(model: nn.Module, inputs: Any, **hints: Any) -> Tensor:
    """(blocks + 1, samples) token similarity at the blocks' outputs."""
    frame = probe(model, inputs, measures=["token_similarity"], **hints).frame
    table = frame[frame["station"] == "output"].pivot_table(index="block", columns="sample", values="value")
    return torch.tensor(table.to_numpy())


def looped(states: Any, real: Tensor) -> Tensor:
    """The same from a model's own hidden states, sequence by sequence."""
    return torch.tensor(
        [[float(similarity(row[: len(keep)][keep])) for row, keep in zip(state, real, strict=True)] for state in states]
    )


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=0, atol=2e-6)  # float32 models


# --- masks that are read wrongly, or not at all -----------------------------------------------------------


@pytest.mark.parametrize("padded", [True, False])
def test_a_mask_of_numbers_that_are_added_is_not_read_the_wrong_way_round(padded: bool):
    config = hf.LongformerConfig(**TEXT, attention_window=[4] * 3, max_position_embeddings=64, pad_token_id=1)
    model = made(lambda: hf.LongformerModel(config))
    mask = MASK if padded else torch.ones_like(MASK)
    with torch.no_grad():
        states = model(IDS, attention_mask=mask, output_hidden_states=True).hidden_states
    assert_close(measured(model, {"input_ids": IDS, "attention_mask": mask}), looped(states, mask.bool()))
    if not padded:  # the model pads to a multiple of its window, and only its own mask says so
        assert_close(measured(model, {"input_ids": IDS}), looped(states, mask.bool()))


@pytest.mark.parametrize("kind", ["block_sparse", "original_full"])
@pytest.mark.parametrize("with_mask", [True, False])
@pytest.mark.parametrize("n", [50, 52])
def test_tokens_that_a_model_adds_are_not_real(kind: str, with_mask: bool, n: int):
    config = hf.BigBirdConfig(**TEXT, attention_type=kind, block_size=4, num_random_blocks=1, sep_token_id=3)
    model = made(lambda: hf.BigBirdModel(config))
    ids = torch.randint(5, 50, (2, n), generator=seeded(3))
    mask = torch.ones(2, n, dtype=torch.long)
    mask[1, 44:] = 0 if with_mask else 1
    inputs = {"input_ids": ids} | ({"attention_mask": mask} if with_mask else {})
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
    assert states[1].shape[1] == (52 if kind == "block_sparse" else n)
    assert_close(measured(model, inputs), looped(states, mask.bool()))


def test_a_model_that_puts_text_and_image_together_makes_a_mask_of_both():
    model = made(lambda: hf.ViltModel(hf.ViltConfig(**TEXT, image_size=8, patch_size=4, max_position_embeddings=64)))
    inputs = {"input_ids": IDS, "attention_mask": MASK, "pixel_values": torch.randn(2, 3, 8, 8, generator=seeded(4))}
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
    real = torch.cat([REAL, torch.ones(2, 5, dtype=torch.bool)], dim=1)  # a class token and four pieces of the image
    # It shuffles the pieces of the image in every pass, so that the axis of the batch cannot be found by trying.
    assert_close(measured(model, inputs, token_axis=1), looped(states, real))


def encoder_decoder() -> nn.Module:
    encoder, decoder = hf.BertConfig(**TEXT), hf.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    return hf.EncoderDecoderModel(hf.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder))


DECODERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "t5": (
        lambda: hf.T5Model(hf.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=3, num_heads=4)),
        "decoder.block.*",
    ),
    "marian": (lambda: hf.MarianModel(hf.MarianConfig(**SEQ2SEQ)), "decoder.layers.*"),
    "bart": (lambda: hf.BartModel(hf.BartConfig(**SEQ2SEQ)), "decoder.layers.*"),
    "pegasus": (lambda: hf.PegasusModel(hf.PegasusConfig(**SEQ2SEQ)), "decoder.layers.*"),
    "encoder-decoder": (encoder_decoder, "decoder.bert.encoder.layer.*"),
}


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("mask_of_its_own", [None, MASK[:, :5], MASK])
@pytest.mark.parametrize("n", [5, 7])
def test_a_decoder_has_a_mask_of_its_own_or_none(name: str, mask_of_its_own: Tensor | None, n: int):
    build, blocks = DECODERS[name]
    if mask_of_its_own is not None and mask_of_its_own.shape[1] != n:
        pytest.skip("a mask of another length")
    model = made(build)
    inputs = {"input_ids": IDS, "attention_mask": MASK.flip(0), "decoder_input_ids": IDS.flip(0)[:, :n]}
    if mask_of_its_own is not None:
        inputs["decoder_attention_mask"] = mask_of_its_own
    seen: list[Tensor] = []
    handles = [
        model.get_submodule(blocks.replace("*", str(index))).register_forward_hook(
            lambda _module, _args, output: seen.append(output[0] if isinstance(output, tuple) else output)
        )
        for index in range(2)
    ]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    real = torch.ones(2, n, dtype=torch.bool) if mask_of_its_own is None else mask_of_its_own.bool()
    assert_close(measured(model, inputs, blocks=blocks)[1:3], looped(seen, real))


@pytest.mark.parametrize("wrapped", [False, True])
def test_masks_of_padding_of_pytorchs_decoder(wrapped: bool):
    whole = nn.Transformer(16, 2, 2, 2, 24, batch_first=True)
    model = made(lambda: whole if wrapped else whole.decoder)
    other = torch.randn(2, 7, 16, generator=seeded(5))
    padding = {"tgt_key_padding_mask": ~REAL, "memory_key_padding_mask": ~REAL.flip(0)}
    inputs = {"tgt": TOKENS, **padding} | (
        {"src": other, "src_key_padding_mask": ~REAL.flip(0)} if wrapped else {"memory": other}
    )
    decoder = model.decoder if wrapped else model
    seen: list[Tensor] = []
    for block in decoder.layers:  # type: ignore[union-attr]
        block.register_forward_hook(lambda _module, _args, output: seen.append(output.detach()))  # type: ignore[union-attr]
    model(**inputs)  # with gradients: else PyTorch's encoder takes another path
    found = measured(model, inputs, blocks="decoder.layers.*" if wrapped else None)
    assert_close(found[1:], looped(seen[:2], REAL))


# --- which mask is whose, and what it means ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "below", "has_encoder", "own"),
    [
        (["attention_mask", "decoder_attention_mask"], "decoder.layers.0", True, {"decoder_attention_mask"}),
        (["attention_mask", "decoder_attention_mask"], "encoder.layers.0", False, {"attention_mask"}),
        (["attention_mask", "decoder_attention_mask"], "layers.0", False, set()),
        (["attention_mask", "encoder_attention_mask"], "layers.0", False, {"attention_mask"}),
        (["attention_mask", "encoder_attention_mask"], "encoder.layer.0", False, {"attention_mask"}),
        (["attention_mask"], "decoder.layers.0", False, {"attention_mask"}),  # OPT
        (["attention_mask"], "decoder.layers.0", True, set()),
        (["src_key_padding_mask"], "layers.0", False, {"src_key_padding_mask"}),
        (["tgt_key_padding_mask", "memory_key_padding_mask"], "layers.0", False, {"tgt_key_padding_mask"}),
    ],
)
def test_the_name_says_whose_mask_it_is(names: list[str], below: str, has_encoder: bool, own: set[str]):
    assert meant_for(names, "", below, has_encoder).own == own


class Attention(nn.Module):
    """One head, with a mask of real keys (batch, n) or of pairs (n, n), true for what is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        scores = self.mix(x) @ x.transpose(1, 2) / 4
        if visible is not None:
            scores = scores.masked_fill(~(visible if visible.ndim == 3 else visible.unsqueeze(1)), -torch.inf)
        return self.norm(x + scores.softmax(dim=-1) @ x)


class Own(nn.Module):
    """A model of nobody's family, whose arguments have names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def run(self, x: Tensor, visible: Tensor | None) -> Tensor:
        for block in self.blocks:
            x = block(x, visible)
        return x

    def forward(
        self, x: Tensor, attention_mask: Any = None, lengths: Any = None, pad: Any = None, weights_mask: Any = None
    ) -> Tensor:
        if attention_mask is not None:
            pairs = attention_mask.ndim == 2 and attention_mask.shape[0] == attention_mask.shape[1] == x.shape[1]
            flat = attention_mask[:, 0, 0] if attention_mask.ndim == 4 else attention_mask
            return self.run(x, flat.unsqueeze(0) > 0 if pairs else flat >= 0 if (flat < 0).any() else flat > 0)
        if lengths is not None:
            return self.run(x, torch.arange(x.shape[1]) < lengths[:, None])
        return self.run(x, None if pad is None else ~pad)


def expected_of(model: nn.Module, real: Tensor, x: Tensor = TOKENS) -> Tensor:
    """Each sequence alone, cut to its real tokens."""
    columns = []
    for row, keep in zip(x, real, strict=True):
        states = [row[keep][None]]
        with torch.no_grad():
            for block in model.blocks:  # type: ignore[union-attr]
                states.append(block(states[-1]))
        columns.append([float(similarity(state[0])) for state in states])
    return torch.tensor(columns).T


@pytest.mark.parametrize(
    "mask",
    [
        MASK,
        MASK.bool(),
        MASK.float(),
        (1 - MASK.float()) * -10000.0,
        torch.where(REAL, 0.0, -torch.inf),
        MASK.flip(1),
        MASK[:, None, None, :].float(),
        MASK[:, None, None, :].bool(),
        torch.where(REAL, 0.0, torch.finfo(torch.float32).min)[:, None, None, :],
    ],
    ids=["int", "bool", "float", "-10000", "-inf", "left", "row of floats", "row of bools", "row that is added"],
)
def test_a_mask_means_what_its_values_say(mask: Tensor):
    model = made(Own)
    real = REAL.flip(1) if mask.equal(MASK.flip(1)) else REAL
    assert_close(measured(model, {"x": TOKENS, "attention_mask": mask}), expected_of(model, real))


def test_what_cannot_be_read_is_named_or_refused():
    model = made(Own)
    with pytest.raises(ValueError, match="0 everywhere"):
        probe(model, {"x": TOKENS, "attention_mask": torch.zeros(2, 7)})
    notes = probe(model, {"x": TOKENS, "attention_mask": torch.rand(2, 7) + 0.1}).metadata["notes"]
    assert "not used as masks of real tokens: attention_mask" in notes
    for given in ({"lengths": torch.tensor([7, 4])}, {"pad": ~REAL}, {"weights_mask": torch.ones(2, 7, 7)}):
        notes = probe(model, {"x": TOKENS, **given}).metadata["notes"]
        assert f"not used as masks of real tokens: {next(iter(given))}" in notes


def test_a_mask_of_pairs_is_not_a_mask_of_tokens():
    model, later = made(Own), torch.ones(7, 7).tril()
    square = torch.randn(7, 7, 16, generator=seeded(6))
    with pytest.raises(ValueError, match=r"attention_mask is \(7, 7\), and the tokens are 7 sequences of 7"):
        probe(model, {"x": square, "attention_mask": later})
    profile = probe(model, {"x": square[:2], "attention_mask": later})
    assert "not used as masks of real tokens: attention_mask" in profile.metadata["notes"]
    with torch.no_grad():
        last = model(square[:2], attention_mask=later)
    assert_close(measured(model, {"x": square[:2], "attention_mask": later})[2:], looped([last], REAL | True))
    bert = made(lambda: hf.BertModel(hf.BertConfig(**TEXT)))  # there two axes are (batch, n) by contract
    ids, mask = torch.randint(5, 50, (7, 7), generator=seeded(7)), torch.ones(7, 7, dtype=torch.long).tril()
    with torch.no_grad():
        states = bert(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    assert_close(measured(bert, {"input_ids": ids, "attention_mask": mask}), looped(states, mask.bool()))


def test_a_mask_that_does_not_hide_is_told_of():
    model = made(Own)
    note = "tokens that the mask hides change the others"
    honest = probe(model, {"x": TOKENS, "attention_mask": MASK}).metadata["notes"]
    assert not any(note in text for text in honest)
    inverted = probe(model, {"x": TOKENS, "pad": ~REAL}, mask="pad").metadata["notes"]
    assert any(note in text for text in inverted)


class Towers(nn.Module):
    """The mask is of the text, and the images are not told of it."""

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Attention() for _ in range(2))

        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            for block in self.blocks:
                x = block(x, attention_mask)
            return x

    class Sight(Tower):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    def __init__(self, sight: type[nn.Module]) -> None:
        super().__init__()
        self.text, self.vision = self.Tower(), sight()

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.text(x, attention_mask) + self.vision(x + 1)


@pytest.mark.parametrize("sight", [Towers.Tower, Towers.Sight])
def test_a_mask_of_one_tower_is_not_that_of_the_other(sight: type[nn.Module]):
    model = made(lambda: Towers(sight))
    inputs = {"x": TOKENS, "attention_mask": REAL}
    assert_close(measured(model, inputs, blocks="text.blocks.*"), expected_of(model.text, REAL))  # type: ignore[arg-type]
    whole = expected_of(model.vision, torch.ones_like(REAL), TOKENS + 1)  # type: ignore[arg-type]
    assert_close(measured(model, inputs, blocks="vision.blocks.*"), whole)


# --- what the user can say --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "mask"),
    [
        ({"lengths": torch.tensor([7, 4])}, "lengths"),
        ({"pad": ~REAL}, "~pad"),
        ({"pad": ~REAL}, REAL),
        ({"lengths": torch.tensor([7, 4])}, MASK),
    ],
    ids=["lengths", "name of padding", "tensor", "numbers"],
)
def test_the_user_says_which_tokens_are_real(given: dict[str, Tensor], mask: Any):
    model = made(Own)
    assert_close(measured(model, {"x": TOKENS, **given}, mask=mask), expected_of(model, REAL))


@pytest.mark.parametrize(
    ("hints", "message"),
    [
        ({"mask": torch.ones(2, 5)}, r"mask= is \(2, 5\), but the tokens of the blocks are \(2, 7\)"),
        ({"mask": torch.ones(2, 7, 7)}, r"expected mask= \(batch, n\)"),
        ({"mask": "paddings"}, "no module around 'blocks.0' was given an argument 'paddings'"),
        ({"part": "encoder"}, "this model has no parts"),
        ({"token_axis": 2}, "expected token_axis 1"),
    ],
)
def test_what_cannot_be_is_refused(hints: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        probe(made(Own), {"x": TOKENS, "pad": ~REAL}, **hints)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="unexpected option 'token_axes': did you mean 'token_axis'"):
        probe(made(Own), TOKENS, token_axes=1)  # type: ignore[call-arg]


def test_one_part_of_a_model():
    model = made(DECODERS["t5"][0])
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    both = measured(model, inputs)
    assert both.shape[0] == 7
    encoder, decoder = (probe(model, inputs, part=part) for part in ("encoder", "decoder"))
    assert (encoder.depth, decoder.depth) == (3, 3)
    assert (encoder.metadata["causal"], decoder.metadata["causal"]) == (False, True)
    assert encoder.metadata["notes"] == ["only the part encoder is looked at, not decoder (3 blocks)"]
    torch.testing.assert_close(measured(model, inputs, part="encoder"), both[:4])
    torch.testing.assert_close(measured(model, inputs, part="decoder")[1:], both[4:])
    with pytest.raises(ValueError, match="unknown part 'decode': did you mean 'decoder'"):
        probe(model, inputs, part="decode")


def test_a_remedy_in_one_part_comes_back_there(tmp_path: Any):
    model = made(DECODERS["t5"][0])
    inputs = {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS.flip(0)}
    depthscope.apply(model, DeEscalate(0.5), part="decoder")
    assert {item.block.split(".")[0] for item in depthscope.remedies.applied(model)} == {"decoder"}
    with torch.no_grad():
        before = model(**inputs)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    again = restore(hf.T5Model.from_pretrained(tmp_path).eval())
    with torch.no_grad():
        after = again(**inputs)
    assert torch.equal(before.last_hidden_state, after.last_hidden_state)
    assert torch.equal(before.encoder_last_hidden_state, after.encoder_last_hidden_state)


def test_a_remedy_reads_the_mask_that_the_user_names():
    model, x = made(Own), TOKENS.clone()
    depthscope.apply(model, DeEscalate(0.5), causal=False, mask="~pad")
    with torch.no_grad():
        before = model(x, pad=~REAL)
        x[1, 4:] += 3
        assert torch.equal(model(x, pad=~REAL)[REAL], before[REAL])
    with pytest.raises(ValueError, match="say mask= with the name of the argument"):
        depthscope.apply(made(Own), DeEscalate(0.5), mask=REAL)


def test_the_same_words_everywhere():
    model = made(DECODERS["t5"][0])
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    found = recommend(model, inputs, part="encoder", weigh_branches=False)
    assert found.blocks == 3
    assert 'part="encoder"' in str(found.line)
    fixed = depthscope.fix(model, inputs, tau=0.5, part="encoder")
    assert (fixed.before.depth, fixed.after.depth) == (3, 3)
    assert {item.block.split(".")[0] for item in depthscope.remedies.applied(fixed.apply_to(model))} == {"encoder"}
    own = made(Own)
    named = {"x": TOKENS.transpose(0, 1).contiguous(), "pad": torch.zeros(7, 2, dtype=torch.bool)}
    assert recommend(own, named, token_axis=0, weigh_branches=False).apply_options["token_axis"] == 0
    skipped = depthscope.skip_loss(own, {"x": TOKENS}, loss=torch.Tensor.sum, token_axis=1, blocks="blocks.*")
    assert len(skipped) == 3
    with depthscope.watch(own.train(), 1, mask="~pad") as watch:
        own(TOKENS, pad=~REAL)
    shown = watch.records.query("measure == 'token_similarity'")["value"]
    assert_close(torch.tensor(shown.to_numpy()), expected_of(own, REAL).mean(dim=1))


# --- several sequences in one row -------------------------------------------------------------------------

POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])


def packed_model() -> nn.Module:
    return made(lambda: hf.LlamaModel(hf.LlamaConfig(**TEXT, num_key_value_heads=2)))


def test_packed_sequences_are_measured_one_by_one():
    model = packed_model()
    inputs = {"input_ids": IDS, "position_ids": POSITIONS}
    profile = probe(model, inputs, measures=["token_similarity"])
    assert profile.metadata["samples"] == 4
    assert any("measured one by one" in note for note in profile.metadata["notes"])
    with torch.no_grad():
        states = [model(row[None, piece], output_hidden_states=True).hidden_states
                  for row in IDS for piece in (slice(0, 4), slice(4, 7))]  # fmt: skip
    expected = torch.tensor([[float(similarity(state[0])) for state in of_one[:-1]] for of_one in states]).T
    assert_close(measured(model, inputs)[:-1], expected)  # the last hidden state has passed the final norm


def test_positions_alone_pack_nothing_where_tokens_see_each_other():
    model = made(lambda: hf.BertModel(hf.BertConfig(**TEXT)))
    profile = probe(model, {"input_ids": IDS, "position_ids": POSITIONS})
    assert profile.metadata["samples"] == 2
    assert any("see each other, and are measured as one" in note for note in profile.metadata["notes"])


@pytest.mark.parametrize("positional", [False, True])
def test_a_remedy_does_not_mix_packed_sequences(positional: bool):
    model = depthscope.apply(packed_model(), DeEscalate(0.5))
    with pytest.raises(ValueError, match="several sequences in one row"):
        model(IDS, None, POSITIONS) if positional else model(input_ids=IDS, position_ids=POSITIONS)
    model(input_ids=IDS, position_ids=torch.arange(7)[None])
    model(input_ids=IDS, position_ids=POSITIONS, attention_mask=MASK)  # then transformers packs nothing
    found = recommend(depthscope.remove(model), {"input_ids": IDS, "position_ids": POSITIONS}, weigh_branches=False)
    assert found.remedies


def test_a_watch_says_that_packed_sequences_are_one_to_it():
    model = packed_model().train()
    with depthscope.watch(model, 1):
        with pytest.warns(UserWarning, match="packed into one row"):
            model(input_ids=IDS, position_ids=POSITIONS)
        model(input_ids=IDS, position_ids=POSITIONS)  # said once: a second warning would be an error here


def test_where_packed_sequences_end_may_be_said_twice():
    ends = torch.tensor([0, 4, 7], dtype=torch.int32)
    given = {"input_ids": IDS[:1], "position_ids": POSITIONS, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    plain = {"input_ids": IDS[:1], "position_ids": POSITIONS}
    assert torch.equal(measured(packed_model(), given), measured(packed_model(), plain))


def test_what_cannot_be_unpacked_is_refused():
    batch = Batch((), {"input_ids": IDS[:1], "position_ids": POSITIONS, "token_type": torch.ones(1, 3)})
    pieces = pieces_of(batch.kwargs)
    assert pieces is not None
    with pytest.raises(ValueError, match=r"position_ids begin again.*token_type \(1, 3\)"):
        unpacked(batch, pieces)
