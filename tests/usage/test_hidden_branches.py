"""Branches that no module shows are measured by what they change."""

import pytest
import torch
import transformers as hf
from torch.nn import functional as F

from depthscope import depth_use
from depthscope.models import BlockConfig, Encoder, pre_norm
from depthscope.usage import forward
from zoo import GROUPED, IDS, MASK, make

BATCH = {"input_ids": IDS, "attention_mask": MASK}
FACTOR = 0.3


def medians(branch: torch.Tensor, trunk: torch.Tensor) -> tuple[float, float]:
    ratio = (branch.norm(dim=-1) / trunk.norm(dim=-1))[MASK.bool()]
    cosine = F.cosine_similarity(branch, trunk, dim=-1)[MASK.bool()]
    return ratio.quantile(0.5).item(), cosine.quantile(0.5).item()


def test_granite_whose_branches_are_multiplied():
    """By hooks on the modules, times the factor that the model's own code applies."""
    torch.manual_seed(0)
    model = hf.GraniteModel(hf.GraniteConfig(**GROUPED, residual_multiplier=FACTOR)).eval()
    kept: dict[tuple[int, str], torch.Tensor] = {}
    handles = []
    for number, layer in enumerate(model.layers, start=1):
        for name, module in (
            ("attention", layer.self_attn),
            ("ffn", layer.mlp),
            ("norm", layer.post_attention_layernorm),
        ):

            def keep(_m, args, output, key=(number, name)):
                kept[key] = args[0] if key[1] == "norm" else output[0] if isinstance(output, tuple) else output

            handles.append(module.register_forward_hook(keep))
    with torch.no_grad():
        states = model(**BATCH, output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()
    found = depth_use(model, BATCH, skips=False, linear=False)
    frame = found.frame.set_index("block")
    for block in range(1, len(frame) + 1):
        for name, trunk in (("attention", states[block - 1]), ("ffn", kept[block, "norm"])):
            ratio, cosine = medians(FACTOR * kept[block, name], trunk)
            assert frame.loc[block, f"{name}_ratio"] == pytest.approx(ratio, rel=1e-4)  # a difference of trunks
            assert frame.loc[block, f"{name}_cosine"] == pytest.approx(cosine, abs=1e-4)
            without, _ = medians(kept[block, name], trunk)
            assert frame.loc[block, f"{name}_ratio"] != pytest.approx(without, rel=0.1)
    assert not any("branch of" in note for note in found.metadata["notes"])


def test_mpt_whose_ffn_adds_to_the_trunk_itself():
    model, batch = make("mpt")
    found = depth_use(model.eval(), batch, skips=False, linear=False).frame
    assert found[["attention_ratio", "ffn_ratio", "sink_rate"]].notna().all(axis=None)
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
        block = model.transformer.blocks[0]
        kept: list[torch.Tensor] = []
        handle = block.norm_2.register_forward_hook(lambda _m, args, _o: kept.append(args[0]))
        model(**batch)
        handle.remove()
    real = batch["attention_mask"].bool()
    ratio = ((states[1] - kept[0]).norm(dim=-1) / kept[0].norm(dim=-1))[real].quantile(0.5).item()
    assert found["ffn_ratio"][0] == pytest.approx(ratio, rel=1e-4)


def test_what_is_seen_by_its_change_is_what_is_seen_directly(monkeypatch: pytest.MonkeyPatch):
    """Of our own pre-norm model, whose branches are shown: the change of the trunk gives the same numbers."""
    torch.manual_seed(0)
    model, x = Encoder(3, BlockConfig(16, 4, placement=pre_norm)).eval(), torch.randn(2, 9, 16)
    names = [f"{branch}_{what}" for branch in ("attention", "ffn") for what in ("ratio", "cosine")]
    shown = depth_use(model, x, skips=False, linear=False).frame[names]
    monkeypatch.setattr(forward, "_pairs", lambda block: {})
    monkeypatch.setattr(forward, "_hidden", lambda block: {a.result: (a.trunk, a.branch) for a in block.all_additions})
    changed = depth_use(model, x, skips=False, linear=False).frame[names]
    assert changed.to_numpy() == pytest.approx(shown.to_numpy(), rel=1e-4, abs=1e-5)
