"""Batches for every kind of model: the same in every run, honest about what they were made from."""

import hashlib
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast

from depthscope import text as text_module
from depthscope.cli.inputs import make_inputs
from depthscope.cli.models import LoadedModel
from depthscope.cli.options import ProbeOptions
from depthscope.models import BlockConfig, CausalLM, Encoder, VisionTransformer
from depthscope.models.families import build_family
from depthscope.text import Text, cut, read_text, train_tokenizer

SMALL = BlockConfig(16, 4)


def made(model: nn.Module, **asked):
    return make_inputs(LoadedModel(model), ProbeOptions(**({"model": "test"} | asked)))


# --- text ---------------------------------------------------------------------------------------------


def test_pythons_manual_is_the_default_text():
    text = read_text(None)
    assert text.source == "pydoc_data.topics"
    assert len(text.content) > 100_000
    assert text.sha256 == hashlib.sha256(text.content.encode()).hexdigest()


def test_a_file_that_is_not_utf8_is_named_with_its_byte(tmp_path: Path):
    path = tmp_path / "latin.txt"
    path.write_bytes("naïve café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"UTF-8 in '.*latin\.txt', got byte 0xef at position 2"):
        read_text(path)


def test_a_large_file_is_read_to_a_limit_that_may_cut_a_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "long.txt"
    path.write_text("aéé", encoding="utf-8")
    monkeypatch.setattr(text_module, "_BYTES_READ", 4)
    assert read_text(path).content == "aé"
    monkeypatch.setattr(text_module, "_BYTES_READ", 5)
    assert read_text(path).content == "aéé"
    path.write_bytes("aéé".encode()[:4])  # the same bytes as a whole file are broken
    with pytest.raises(ValueError, match="position 3"):
        read_text(path)


def test_the_tokenizer_is_the_same_every_time():
    text = read_text(None)
    first, second = (train_tokenizer(text, 2000) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()
    ids = first.encode(text.content).ids
    assert min(ids) > 7  # neither reserved nor unknown
    assert max(ids) < 2000
    pieces = [first.id_to_token(i).removeprefix("##") for i in ids]
    assert "".join(pieces) == "".join(text.content.split())


@pytest.mark.parametrize("vocabulary", [10, 99, 300])
def test_a_small_vocabulary_is_kept(vocabulary: int):
    text = read_text(None)
    ids = train_tokenizer(text, vocabulary).encode(text.content).ids
    assert max(ids) < vocabulary
    assert min(ids) >= 7


def test_cut_is_consecutive_and_refuses_what_is_too_short():
    text = Text("a b c d e f g", "letters")
    tokenizer = train_tokenizer(text, 100)
    ids = tokenizer.encode(text.content).ids
    assert cut(text, tokenizer, tokens=3, samples=2) == [ids[:3], ids[3:6]]
    with pytest.raises(ValueError, match=r"at least 3 × 3 tokens in 'letters', got 7; give a longer text"):
        cut(text, tokenizer, tokens=3, samples=3)
    with pytest.raises(ValueError, match="got 0"):
        cut(Text("", "nothing"), train_tokenizer(Text("", "nothing"), 100), 1, 1)


def test_pieces_are_spread_over_the_text(tmp_path: Path):
    """Consecutive pieces of one article would make what a sequence has of its own too small."""
    text = Text(" ".join(letter for letter in "abcdefgh" for _ in range(6)), "letters")
    tokenizer = train_tokenizer(text, 100)
    pieces = cut(text, tokenizer, tokens=3, samples=4, spread=True)
    assert [tokenizer.id_to_token(piece[0]) for piece in pieces] == ["a", "c", "e", "g"]
    (path := tmp_path / "letters.txt").write_text(text.content)
    model = build_family("bert", 1, 32, 4)
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    options = ProbeOptions(model="test", samples=4, tokens=3, text=path)
    inputs = make_inputs(LoadedModel(model, tokenizer=own), options)
    assert inputs.batches[0]["input_ids"].tolist() == pieces
    assert inputs.tokenizer is own


def test_what_stands_in_for_the_inputs_of_a_model_is_said(tmp_path: Path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    vit = VisionTransformer(1, SMALL, image_size=8)
    assert made(vit, samples=1).metadata["stand_in"] == "random normal pixels"
    assert "stand_in" not in made(vit, samples=1, images=tmp_path).metadata
    assert made(Encoder(1, SMALL)).metadata["stand_in"] == "random normal tokens"


@pytest.mark.usefixtures("short_manual")
def test_text_for_a_hugging_face_model():
    inputs = made(build_family("bert", 1, 32, 4), samples=5, batch=2, tokens=9)
    assert [batch["input_ids"].shape for batch in inputs.batches] == [(2, 9), (2, 9), (1, 9)]
    assert inputs.count == 3
    assert inputs.batches[0]["attention_mask"].all()
    assert inputs.metadata["text"] == {"source": "pydoc_data.topics", "sha256": read_text(None).sha256}


@pytest.mark.usefixtures("short_manual")
@pytest.mark.parametrize(("name", "most"), [("bert", 512), ("roberta", 512), ("mpnet", 512), ("gpt2", 1024)])
def test_no_more_tokens_than_positions(name: str, most: int):
    model = build_family(name, 1, 32, 4)
    batch = made(model, samples=1, tokens=most).batches[0]
    with torch.no_grad():
        assert model(**batch).last_hidden_state.shape == (1, most, 32)
    with pytest.raises(ValueError, match=f"at most {most} tokens.*--tokens {most + 1}"):
        made(model, samples=1, tokens=most + 1)


@pytest.mark.usefixtures("short_manual")
def test_the_default_number_of_tokens_gives_way_to_the_positions():
    model = CausalLM(1, SMALL, vocabulary=50, context=20)
    assert made(model, samples=2).batches[0]["ids"].shape == (2, 20)


# --- images -------------------------------------------------------------------------------------------


def test_random_images_are_a_function_of_the_seed():
    model = build_family("vit", 1, 32, 4)
    first, second, other = (made(model, samples=1, seed=seed).batches[0]["pixel_values"] for seed in (0, 0, 1))
    assert first.shape == (1, 3, 224, 224)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_images_of_a_folder(tmp_path: Path):
    for name, colour in (("b.png", (255, 0, 0)), ("a.JPG", (0, 0, 0)), ("c.jpeg", (128, 128, 128))):
        Image.new("RGB", (40, 30), colour).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("not an image")
    model = VisionTransformer(1, SMALL, image_size=8)
    pixels = made(model, samples=2, images=tmp_path).batches[0]["images"]
    assert pixels.shape == (2, 3, 8, 8)
    assert_close(pixels[0], torch.full((3, 8, 8), -1.0))  # a.JPG first: black
    assert_close(pixels[1], torch.tensor([1.0, -1.0, -1.0])[:, None, None].expand(3, 8, 8))
    with pytest.raises(ValueError, match=r"at least 4 images .* got 3"):
        made(model, samples=4, images=tmp_path)
    (tmp_path / "b.png").write_bytes(b"no png")
    with pytest.raises(ValueError, match=r"a PNG or JPEG image in '.*b\.png', but it cannot be read"):
        made(model, samples=2, images=tmp_path)


def test_no_images(tmp_path: Path):
    model = VisionTransformer(1, SMALL, image_size=8)
    with pytest.raises(ValueError, match="got 0"):
        made(model, images=tmp_path)
    with pytest.raises(ValueError, match="a folder of images"):
        made(model, images=tmp_path / "missing")
    with pytest.raises(ValueError, match="1 channels"):
        made(VisionTransformer(1, SMALL, image_size=8, channels=1), images=tmp_path)


# --- tokens, and what a factory brings ----------------------------------------------------------------


def test_random_tokens_for_an_encoder():
    inputs = made(Encoder(1, SMALL).double(), samples=3, tokens=7)
    (batch,) = inputs.batches
    assert batch["x"].shape == (3, 7, 16)
    assert batch["x"].dtype == torch.float64


@pytest.mark.parametrize(("tokens", "samples"), [(4096, 8), (4097, 7), (16_384, 2), (40_000, 1)])
def test_of_long_sequences_there_are_fewer_unless_told(tokens: int, samples: int):
    """32,768 tokens in all, and one sequence at least."""
    model = Encoder(1, BlockConfig(2, 1))
    (batch,) = made(model, tokens=tokens).batches
    assert batch["x"].shape == (samples, tokens, 2)
    (batch,) = made(model, tokens=tokens, samples=3).batches
    assert batch["x"].shape == (3, tokens, 2)


def test_a_factorys_own_input_takes_the_dtype():
    model = Encoder(1, SMALL).double()
    x, ids = torch.zeros(1, 2, 16), torch.zeros(1, 2, dtype=torch.int64)
    options = ProbeOptions("test:it", dtype="float64")
    given = make_inputs(LoadedModel(model, {"x": x, "ids": ids}), options)
    assert (given.batches["x"].dtype, given.batches["ids"].dtype) == (torch.float64, torch.int64)
    given = make_inputs(LoadedModel(model, iter([x, (x, ids)])), options)
    assert given.count is None
    assert [type(item) for item in given.batches] == [torch.Tensor, list]
    with pytest.raises(ValueError, match="from the factory, got int"):
        make_inputs(LoadedModel(model, 3), options)


@pytest.mark.parametrize(
    ("loaded", "asked", "message"),
    [
        (LoadedModel(Encoder(1, SMALL)), {"text": Path("x")}, "--text does not fit"),
        (LoadedModel(VisionTransformer(1, SMALL)), {"tokens": 5}, "--tokens does not fit"),
        (LoadedModel(CausalLM(1, SMALL, vocabulary=50)), {"images": Path("x")}, "--images does not fit"),
        (LoadedModel(Encoder(1, SMALL), torch.zeros(1, 2, 16)), {"samples": 5}, "--samples does not fit"),
        (LoadedModel(nn.PReLU()), {}, r"got PReLU: let module:factory return \(model, inputs\)"),
    ],
)
def test_options_that_do_not_fit_are_refused(loaded: LoadedModel, asked: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_inputs(loaded, ProbeOptions("test", **asked))
