"""Branches that no module shows are measured by what they change."""

import pytest
import torch

from depthscope import depth_use
from depthscope.models import BlockConfig, Encoder, pre_norm
from depthscope.usage import forward
from zoo import make


def test_mpt_whose_ffn_adds_to_the_trunk_itself():
    model, batch = make("mpt")
    found = depth_use(model.eval(), batch, skips=False).frame
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
    shown = depth_use(model, x, skips=False).frame[names]
    monkeypatch.setattr(
        forward,
        "_sums",
        lambda block: {a.result: (a.trunk, a.branch.removesuffix("_branch"), True) for a in block.all_additions},
    )
    changed = depth_use(model, x, skips=False).frame[names]
    assert changed.to_numpy() == pytest.approx(shown.to_numpy(), rel=1e-4, abs=1e-5)
