"""Spectra of every family against its projections, in memory and from disk, also under a limit of memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

import depthscope
from depthscope.anatomy import anatomy_of
from depthscope.models import BlockConfig, Encoder
from depthscope.value_spectra.weights import SUMMARIES, norm_map
from samples import seeded
from traces import state_of
from zoo import GROUPED, TEXT, ZOO

T5 = {"vocab_size": 50, "d_model": 16, "d_kv": 4, "num_heads": 4, "num_layers": 2}


def same(found: np.ndarray, expected: np.ndarray) -> None:
    """Every eigenvalue of one list has its own in the other, to rounding."""
    assert len(found) == len(expected)
    left = list(expected)
    for value in found:
        nearest = min(range(len(left)), key=lambda place: abs(left[place] - value))
        assert abs(left.pop(nearest) - value) < 1e-5 * abs(expected).max()


@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_family_against_the_products_formed_from_its_projections(name: str):
    torch.manual_seed(0)
    model = ZOO[name].build()
    blocks = anatomy_of(model).blocks
    if any(b.projections is None or b.projections().latent is not None for b in blocks):
        pytest.skip("some block has no product of projections")
    before = state_of(model)
    found = depthscope.spectra(model)
    assert state_of(model) == before
    assert {"block", "head", "real", "imag", *SUMMARIES} <= set(found.frame)
    w = blocks[-1].projections()  # type: ignore[misc]
    value = w.value.double()
    output = torch.eye(value.shape[0] * value.shape[2], dtype=torch.float64).unflatten(0, (len(value), -1))
    output = output if w.output is None else w.output.double()
    products = value @ output  # (h, d, d)
    dense = torch.linalg.eigvals(products.sum(dim=0)).numpy()
    whole = found.of(len(blocks))
    strongest = np.argsort(-abs(dense))[: len(whole)]
    same(whole, dense[strongest])
    own = torch.linalg.eigvals(products[0]).numpy()
    head = found.of(len(blocks), 0)
    same(head, own[np.argsort(-abs(own))[: len(head)]])


def test_what_is_said_of_a_block_is_the_same_with_and_without_the_sum_of_its_heads():
    model = hf.LlamaModel(hf.LlamaConfig(**GROUPED))
    with_sum, heads_alone = depthscope.spectra(model), depthscope.spectra(model, whole=False)
    assert with_sum.by_block.equals(heads_alone.by_block)
    assert len(with_sum.by_block) == with_sum.depth == 3
    heads = heads_alone.summary.query("block == 2")["negative_share"]
    assert heads_alone.by_block.loc[2, "negative_share"] == pytest.approx(heads.mean())


@pytest.mark.parametrize(
    "build",
    [
        lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT)),  # saved with "bert." before its names
        lambda: hf.BertModel(hf.BertConfig(**TEXT)),
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=4)),
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
        lambda: hf.ViTForImageClassification(hf.ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=4)),
    ],
    ids=["bert-mlm", "bert", "llama", "gpt2", "t5", "vit"],
)
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_from_disk_it_is_the_same_as_in_memory(tmp_path: Path, build, shard: str):
    model = build()
    model.save_pretrained(tmp_path, max_shard_size=shard)
    in_memory, from_disk = depthscope.spectra(model), depthscope.spectra(tmp_path)
    assert in_memory.frame.drop(columns="part").equals(from_disk.frame.drop(columns="part"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from Linux's /proc")
def test_a_checkpoint_larger_than_the_memory_is_read(tmp_path: Path):
    """A file of 3 GB, nearly all of it never written: the process holds less than half of it, libraries included."""
    config = hf.LlamaConfig(**(GROUPED | {"vocab_size": 50}))
    hf.LlamaModel(config).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    size, end = 3 << 30, len(raw) - 8 - length
    header["unused"] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
    written = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(written).to_bytes(8, "little") + written + raw[8 + length :])
        file.truncate(8 + len(written) + end + size)
    script = (
        "import re, sys, depthscope\n"
        "print(depthscope.spectra(sys.argv[1]).depth, end=' ')\n"
        # not ru_maxrss, which begins at what the parent process held
        "print(int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]) < 1_500 << 10)\n"
    )
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, env=alone)
    assert found.stdout.strip() == "3 True", found.stderr[-500:]


def test_the_norm_is_folded_in():
    model = hf.GPT2Model(hf.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=4))
    norm = model.h[0].ln_1
    nn.init.normal_(norm.weight, 1, 0.3, generator=seeded(0))
    nn.init.normal_(norm.bias, 0, 0.3, generator=seeded(1))
    w = anatomy_of(model).blocks[0].projections()  # type: ignore[misc]
    centre = torch.eye(16, dtype=torch.float64) - 1 / 16
    h = (w.value.double() @ w.output.double()).sum(dim=0)
    same(
        depthscope.spectra(model, fold_norm=True).of(1),
        torch.linalg.eigvals(centre @ norm.weight.detach().double().diag() @ h).numpy(),
    )
    with pytest.raises(ValueError, match="block 1 has no norm before its attention"):
        depthscope.spectra(hf.BertModel(hf.BertConfig(**TEXT)), fold_norm=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [8, 15])
@pytest.mark.parametrize("centres", [True, False])
def test_a_norm_is_known_by_what_it_does(centres: bool, width: int, dtype: torch.dtype):
    """In half precision too, and where the middle one of evenly spread features would be their mean."""
    norm = nn.LayerNorm(width) if centres else nn.RMSNorm(width)
    nn.init.normal_(norm.weight, generator=seeded(0))
    norm.to(dtype)
    gain, found = norm_map(norm, width)
    assert found == centres
    assert torch.allclose(gain, norm.weight.double(), rtol=1e-6)


def test_the_norm_is_folded_in_from_disk_and_beside_remedies(tmp_path: Path):
    model = hf.GPT2Model(hf.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4))
    for block in model.h:
        nn.init.normal_(block.ln_1.weight, 1, 0.3, generator=seeded(0))
    model.bfloat16().save_pretrained(tmp_path)
    in_memory = depthscope.spectra(model, fold_norm=True)
    assert in_memory.frame.equals(depthscope.spectra(tmp_path, fold_norm=True).frame)
    exact = depthscope.spectra(model.double(), fold_norm=True)
    same(in_memory.of(2), exact.of(2))
    depthscope.apply(model, depthscope.remedies.DeEscalate(0.5, at="ffn_input"))
    assert depthscope.spectra(model, fold_norm=True).frame.equals(exact.frame)


def test_norms_of_queries_are_told_of():
    plain, normed = (hf.LlamaModel(hf.LlamaConfig(**GROUPED)), hf.Qwen3Model(hf.Qwen3Config(**GROUPED, head_dim=4)))
    said = [depthscope.spectra(model, product="query-key").metadata["notes"] for model in (plain, normed)]
    assert said[0] == []
    assert "norms its queries and keys" in said[1][0]
    assert depthscope.spectra(normed).metadata["notes"] == []


def test_queries_and_keys_are_read_too():
    model = hf.BertModel(hf.BertConfig(**TEXT))
    w = anatomy_of(model).blocks[0].projections()  # type: ignore[misc]
    own = torch.linalg.eigvals(w.query[0].double() @ w.key[0].double().mT).numpy()
    found = depthscope.spectra(model, product="query-key").of(1, 0)
    same(found, own[np.argsort(-abs(own))[: len(found)]])


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path):
    model = hf.BertModel(hf.BertConfig(**TEXT))
    with torch.no_grad():
        model.encoder.layer[1].attention.self.value.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="block 2: expected finite weights"):
        depthscope.spectra(model)
    with pytest.raises(ValueError, match="shows no projections"):
        depthscope.spectra(nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)]))
    with pytest.raises(ValueError, match="unknown product 'values'"):
        depthscope.spectra(model, product="values")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected a folder with config\.json and safetensors"):
        depthscope.spectra(tmp_path)
    model.save_pretrained(tmp_path)
    damaged = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(damaged[:-100])
    with pytest.raises(ValueError, match="damaged or cut off"):
        depthscope.spectra(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"num_attention_heads": 4', '"num_attention_heads": 3'))
    with pytest.raises(ValueError, match=r"no model can be made of '.*config\.json': .* multiple of") as error:
        depthscope.spectra(tmp_path)
    assert "\n" not in str(error.value)
    hf.BertModel(hf.BertConfig(**(TEXT | {"hidden_size": 8}))).config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"to be \(8, 8\) numbers, got F32 \(16, 16\); check that config.json"):
        depthscope.spectra(tmp_path)


@pytest.mark.parametrize("text", ["{nope", '{"a": 1}', '{"weight_map": 3}', "[]"])
def test_a_damaged_list_of_shards_is_refused_in_one_line(tmp_path: Path, text: str):
    hf.BertModel(hf.BertConfig(**TEXT)).save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"a list of weights and their files in '.*index\.json', got another"):
        depthscope.spectra(tmp_path)


def spoilt(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.view(-1)[0] = torch.nan


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda model: model.to("meta"), {}, "on the meta device"),
        (lambda model: model.to(torch.complex64), {}, "block 1.*: expected real weights, got complex64"),
        (lambda model: spoilt(model.blocks[1].attention.value.weight), {}, "block 2.*: expected finite weights"),
        (
            lambda model: spoilt(model.blocks[0].norm1.weight),
            {"fold_norm": True},
            "finite weights of LayerNorm, got nan",
        ),
        (
            lambda model: setattr(
                model.blocks[0].attention.value,
                "weight",
                nn.Parameter(model.blocks[0].attention.value.weight.detach().to_sparse()),
            ),
            {},
            "block 1: expected dense weights, got torch.sparse_coo",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_weights_that_have_no_spectrum_are_refused_in_a_line(change, options: dict[str, bool], message: str):
    model = Encoder(2, BlockConfig(16, 2, placement="pre"))
    change(model)
    with pytest.raises(ValueError, match=message) as raised:
        depthscope.spectra(model, **options)
    assert "\n" not in str(raised.value)
