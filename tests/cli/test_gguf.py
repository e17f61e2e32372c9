"""`hf:FILE.gguf`: read by transformers where the package gguf is there, and one line where it is not."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from depthscope.cli import models
from depthscope.cli.app import app
from depthscope.extras import MissingExtra

WIDTH, HEADS, GROUPS, INNER, WORDS, BLOCKS = 32, 4, 2, 48, 300, 2


def write(path: Path) -> None:
    """A tiny Llama with random weights and a vocabulary of bytes and words."""
    gguf: Any = pytest.importorskip("gguf")
    generator = np.random.default_rng(0)
    file = gguf.GGUFWriter(path, "llama")
    file.add_context_length(64)
    file.add_embedding_length(WIDTH)
    file.add_block_count(BLOCKS)
    file.add_feed_forward_length(INNER)
    file.add_head_count(HEADS)
    file.add_head_count_kv(GROUPS)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_freq_base(1e4)
    file.add_rope_dimension_count(WIDTH // HEADS)
    file.add_vocab_size(WORDS)
    file.add_tokenizer_model("llama")
    words = WORDS - 259
    file.add_token_list(
        ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *(f"▁w{i}" for i in range(words))]
    )
    file.add_token_scores([0.0] * WORDS)
    file.add_token_types([2, 3, 3, *[6] * 256, *[1] * words])
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_unk_token_id(0)
    kept = WIDTH * GROUPS // HEADS
    shapes = {"token_embd": (WORDS, WIDTH), "output": (WORDS, WIDTH), "output_norm": (WIDTH,)}
    for block in range(BLOCKS):
        shapes |= {f"blk.{block}.{name}_norm": (WIDTH,) for name in ("attn", "ffn")}
        shapes |= {f"blk.{block}.attn_{name}": (WIDTH, WIDTH) for name in ("q", "output")}
        shapes |= {f"blk.{block}.attn_{name}": (kept, WIDTH) for name in ("k", "v")}
        shapes |= {f"blk.{block}.ffn_{name}": (INNER, WIDTH) for name in ("gate", "up")}
        shapes |= {f"blk.{block}.ffn_down": (WIDTH, INNER)}
    for name, shape in shapes.items():
        values = np.ones(shape) if len(shape) == 1 else 0.2 * generator.normal(size=shape)
        file.add_tensor(f"{name}.weight", values.astype(np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def test_a_file_is_probed_and_has_a_loss(tmp_path: Path):
    write(tmp_path / "tiny.gguf")
    asked = ["probe", f"hf:{tmp_path / 'tiny.gguf'}", "--tokens", "16", "--samples", "2", "--skip-loss"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert "2 blocks of width 32" in result.output
    assert "Loss" in result.output


def test_where_and_which_file_is_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "some.gguf").touch()
    asked: list[Any] = []
    monkeypatch.setattr(models, "_require_gguf", lambda: None)
    monkeypatch.setattr(
        models, "_pretrained", lambda _transformers, name, _options, **where: asked.append((name, where))
    )
    models._from_hugging_face(str(tmp_path / "some.gguf"), None)  # type: ignore[arg-type]
    assert asked == [(str(tmp_path), {"gguf_file": "some.gguf", "local_files_only": True})]


def test_without_the_package_one_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "some.gguf").touch()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtra, match=r"^reading a GGUF file needs gguf: pip install 'gguf>=0\.10'$"):
        models._from_hugging_face(str(tmp_path / "some.gguf"), None)  # type: ignore[arg-type]
