"""The same numbers the naive way: all hidden states kept, attention as n × n matrices, a loop over hooks."""

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

from depthscope import depth_use
from depthscope.measures import ScoredAttention, against_trunk, first_token, median
from depthscope.measures.branches import AgainstTrunk
from samples import seeded
from zoo import GROUPED, IDS, MASK, TEXT, make

BATCH = {"input_ids": IDS, "attention_mask": MASK}
REAL = MASK.bool()


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:
    model, _ = make("gpt2")
    return model.eval()


def naive_median(values: torch.Tensor) -> float:
    return values[REAL].double().quantile(0.5).item()


def branches_by_hooks(
    model: nn.Module, layers: list[tuple[nn.Module, nn.Module, nn.Module]]
) -> dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]:
    """Of a pre-norm model whose blocks have these (attention, FFN, norm before the FFN): by block and branch, what the
    module returns, and the trunk that it is added to."""
    kept: dict[tuple[int, str], torch.Tensor] = {}
    handles = []
    for number, modules in enumerate(layers, start=1):
        for name, module in zip(("attention", "ffn", "norm"), modules, strict=True):

            def keep(_m, args, output, key=(number, name)):
                kept[key] = args[0] if key[1] == "norm" else output[0] if isinstance(output, tuple) else output

            handles.append(module.register_forward_hook(keep))
    with torch.no_grad():
        states = model(**BATCH, output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()
    trunks = {"attention": lambda block: states[block - 1], "ffn": lambda block: kept[block, "norm"]}
    return {(block, name): (kept[block, name], trunks[name](block)) for block, name in kept if name != "norm"}


def test_branches_of_gpt2(gpt2: nn.Module):
    """Pre-norm: each branch against what it is added to, by hooks."""
    naive = branches_by_hooks(gpt2, [(block.attn, block.mlp, block.ln_2) for block in gpt2.transformer.h])
    frame = depth_use(gpt2, BATCH, skips=False).frame.set_index("block")
    assert len(naive) == 6
    for (block, name), (branch, trunk) in naive.items():
        ratio = naive_median(branch.norm(dim=-1) / trunk.norm(dim=-1))
        cosine = naive_median(F.cosine_similarity(branch, trunk, dim=-1))
        assert frame.loc[block, f"{name}_ratio"] == pytest.approx(ratio, rel=1e-5)
        assert frame.loc[block, f"{name}_cosine"] == pytest.approx(cosine, abs=1e-6)


def test_branches_of_granite_which_are_multiplied():
    """No module shows what is added: by hooks, times the factor that the model's own code applies."""
    torch.manual_seed(0)
    model = hf.GraniteModel(hf.GraniteConfig(**GROUPED, residual_multiplier=0.3)).eval()
    naive = branches_by_hooks(model, [(m.self_attn, m.mlp, m.post_attention_layernorm) for m in model.layers])
    found = depth_use(model, BATCH, skips=False)
    frame = found.frame.set_index("block")
    assert len(naive) == 2 * len(frame)
    for (block, name), (branch, trunk) in naive.items():
        ratio = naive_median(0.3 * branch.norm(dim=-1) / trunk.norm(dim=-1))
        cosine = naive_median(F.cosine_similarity(branch, trunk, dim=-1))
        assert frame.loc[block, f"{name}_ratio"] == pytest.approx(ratio, rel=1e-4)  # a difference of trunks
        assert frame.loc[block, f"{name}_cosine"] == pytest.approx(cosine, abs=1e-4)
    assert not any("branch of" in note for note in found.metadata["notes"])


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_sinks_and_logits_of_matrices(how: str):
    """All attention matrices kept; the logits again from queries and keys."""
    torch.manual_seed(0)
    model = hf.BertModel(hf.BertConfig(**TEXT, attn_implementation=how)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.5)
    frame = depth_use(model, BATCH, skips=False).frame
    model.set_attn_implementation("eager")
    with torch.no_grad():
        returned = model(**BATCH, output_attentions=True, output_hidden_states=True)
    for block, (p, x) in enumerate(zip(returned.attentions, returned.hidden_states, strict=False)):
        counted = REAL.clone()
        counted[:, 0] = False
        given = [[p[s, h, counted[s], 0].mean().item() for s in range(2)] for h in range(4)]
        rate = sum(sum(head) / 2 > 0.3 for head in given) / 4
        own = model.encoder.layer[block].attention.self
        q, k = (linear(x).unflatten(-1, (4, 4)).transpose(1, 2) for linear in (own.query, own.key))
        scores = q @ k.mT / 2
        seen = REAL[:, None, :, None] & REAL[:, None, None, :]
        largest = scores.masked_fill(~seen, -torch.inf).max().item()
        assert frame["sink_rate"][block] == rate
        assert frame["largest_logit"][block] == pytest.approx(largest, rel=1e-5)


def test_first_token_in_pieces(monkeypatch: pytest.MonkeyPatch):
    """A causal head of 50 tokens in pieces of 7 rows, against its dense matrix."""
    monkeypatch.setattr("depthscope.measures.operators.TILE", 7 * 3 * 50)
    monkeypatch.setattr("depthscope.measures.operators._FEWEST", 7)
    q, k = (3 * torch.randn(3, 50, 4, generator=seeded(seed)) for seed in (0, 1))
    real = torch.ones(3, 50, dtype=torch.bool)
    real[1, 40:] = False
    real[2, 1:] = False
    found = first_token(ScoredAttention(q, k, 0.5, causal=True), real)
    scores = (q @ k.mT * 0.5).masked_fill(~torch.ones(50, 50).tril().bool(), -torch.inf)
    p = torch.softmax(scores, dim=-1)
    for sample, n in enumerate((50, 40)):
        assert found.mass[sample].item() == pytest.approx(p[sample, 1:n, 0].mean().item(), rel=1e-5)
        assert found.largest_logit[sample].item() == pytest.approx(scores[sample, :n].max().item(), rel=1e-6)
    assert found.mass[2].isnan()  # one token has no other to look at the first


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_against_trunk_at_any_size(size: float):
    """Squares that float32 cannot hold; zeros and what is not finite have no number."""
    x, b = (torch.randn(4, 5, 6, generator=seeded(seed)) for seed in (0, 1))
    found = against_trunk(size * b, size * x)
    assert torch.allclose(found.ratio, (b.double().norm(dim=-1) / x.double().norm(dim=-1)), rtol=1e-5)
    assert torch.allclose(found.cosine, F.cosine_similarity(b.double(), x.double(), dim=-1), atol=1e-6)
    b[0, 0], x[0, 1], b[0, 2, 0] = 0, 0, torch.nan
    one: AgainstTrunk = against_trunk(b, x)
    assert one.ratio[0, 0] == 0
    assert one.cosine[0, 0].isnan()
    assert one.ratio[0, 1].isnan()
    assert one.ratio[0, 2].isnan()
    assert one.ratio[1:].isfinite().all()


def test_median_of_real_tokens():
    values = torch.tensor([[1.0, 2.0, 9.0], [3.0, torch.nan, 4.0]])
    assert median(values) == 3.0
    assert median(values, torch.tensor([[True, True, False], [False, True, False]])) == 1.5
    assert median(values, torch.zeros(2, 3, dtype=torch.bool)).isnan()


HEADS = {
    "gpt2": lambda: make("gpt2")[0],
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT)),
    "cohere": lambda: make("cohere")[0],
    "gemma2": lambda: make("gemma2")[0],
    "opt": lambda: make("opt")[0],
}


@pytest.mark.parametrize("name", HEADS)
def test_the_lens_is_the_model_s_own_tail(name: str):
    """The last block's output exchanged for another block's, and the model's own code does the rest."""
    torch.manual_seed(0)
    model = HEADS[name]().eval()
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 3)
    outputs: list[torch.Tensor] = []
    handles = [
        block.register_forward_hook(
            lambda _m, _a, out: outputs.append(out if isinstance(out, torch.Tensor) else out[0])
        )
        for block in blocks
    ]
    with torch.no_grad():
        final = torch.log_softmax(model(**BATCH, use_cache=False).logits.double(), dim=-1)[REAL]
    for handle in handles:
        handle.remove()
    frame = depth_use(model, BATCH, skips=False, sample=None).frame
    for block, tokens in enumerate(outputs[:3]):

        def exchange(_m, _args, out, tokens=tokens):
            return tokens if isinstance(out, torch.Tensor) else (tokens, *out[1:])

        handle = blocks[-1].register_forward_hook(exchange)
        with torch.no_grad():
            lens = torch.log_softmax(model(**BATCH, use_cache=False).logits.double(), dim=-1)[REAL]
        handle.remove()
        kl = (final.exp() * (final - lens)).sum(dim=-1).mean().item()
        top1 = (final.argmax(-1) == lens.argmax(-1)).double().mean().item()
        pairs = zip(final.topk(5).indices.tolist(), lens.topk(5).indices.tolist(), strict=True)
        top5 = sum(len({*a} & {*b}) / 5 for a, b in pairs) / len(final)
        assert frame["lens_kl"][block] == pytest.approx(kl, rel=1e-4, abs=1e-6)
        assert frame["lens_top1"][block] == pytest.approx(top1)
        assert frame["lens_top5"][block] == pytest.approx(top5)
    assert frame["lens_kl"][2] == 0


def test_skips_by_hooks(gpt2: nn.Module):
    """The matrix, the output and the loss, with one hook that passes on what a block was given."""
    from depthscope.probing import skip_loss

    def outputs(skipped: int | None) -> list[torch.Tensor]:
        kept, handles = [], []
        for number, block in enumerate(gpt2.transformer.h, start=1):

            def keep(_m, args, output, number=number):
                kept.append(args[0])
                if number == skipped:
                    kept.append(args[0])
                    return (args[0], *output[1:]) if isinstance(output, tuple) else args[0]
                kept.append(output[0] if isinstance(output, tuple) else output)
                return None

            handles.append(block.register_forward_hook(keep))
        with torch.no_grad():
            gpt2(**BATCH, use_cache=False)
        for handle in handles:
            handle.remove()
        return kept

    found = depth_use(gpt2, BATCH, sample=None)
    whole = outputs(None)
    for skipped in (1, 2, 3):
        now = outputs(skipped)
        for later in range(skipped + 1, 4):
            before, after = (x[2 * later - 1] - x[2 * later - 2] for x in (whole, now))
            moved = naive_median((after - before).norm(dim=-1) / before.norm(dim=-1))
            assert found.matrix.loc[skipped, later] == pytest.approx(moved, rel=1e-4)
        output = naive_median((now[-1] - whole[-1]).norm(dim=-1) / whole[-1].norm(dim=-1))
        assert found.frame["skip_output"][skipped - 1] == pytest.approx(output, rel=1e-4)
    losses = skip_loss(gpt2, BATCH)["change"].tolist()[1:]
    assert found.frame["skip_loss"].tolist() == pytest.approx(losses, abs=1e-6)
