"""Whose word on causality is believed: ordinary use keeps the paper's mean, and a trial wins over what is known."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertEncoder, BertSelfAttention

import depthscope
import zoo
from depthscope.diagnosis import diagnose
from depthscope.discovery import anatomy_with_hints, with_sight
from depthscope.discovery.causality import sight
from depthscope.hooks import undisturbed
from depthscope.hooks.staying import hooks_in
from depthscope.inputs import batches
from depthscope.remedies import DeEscalate, ResidualWeight, recommend

IDS = torch.randint(5, 50, (3, 9), generator=torch.Generator().manual_seed(0))


def bert(**more: Any) -> hf.BertConfig:
    return hf.BertConfig(**zoo.TEXT, **more)


def drawn(model: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
    return model.eval()


def kinds(model: nn.Module) -> set[str]:
    return {hook.mean.kind for _, hook in hooks_in(model) if hook.remedy is not None}


def additive(seen: Tensor) -> Tensor:
    """(1, 1, n, n) of which tokens (columns) a token (row) sees, to be added to scores."""
    return torch.zeros(1, 1, *seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


class Pooled(nn.Module):
    """A wrapper as of sentence-transformers, around a whole model."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.inner(input_ids=input_ids)[0].mean(dim=1)


class Masked(nn.Module):
    """A library's encoder with a mask of one's own: `seen(rows, columns)`."""

    def __init__(self, seen: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.embedding, self.position = nn.Embedding(50, 16), nn.Embedding(32, 16)
        self.encoder, self.seen = BertEncoder(bert()), seen

    def forward(self, ids: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1])
        mask = additive(self.seen(place.unsqueeze(-1), place))
        return self.encoder(self.embedding(ids) + self.position(place), attention_mask=mask)[0]


SIGHTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "causal": (lambda i, j: j <= i, "earlier"),
    "all": (lambda i, j: j >= 0 * i, "all"),
    "chunks": (lambda i, j: j // 3 <= i // 3, "partly later"),
    "a look ahead": (lambda i, j: j <= i + 1, "partly later"),
    "a window": (lambda i, j: (i - j).abs() <= 1, "partly later"),
    "right to left": (lambda i, j: j >= i, "later"),
    "chunks from right to left": (lambda i, j: j // 3 >= i // 3, "later"),
    "itself alone": (lambda i, j: i == j, "nothing"),
}


@pytest.mark.parametrize("name", SIGHTS)
def test_what_tokens_see_is_found_by_trying(name: str):
    seen, expected = SIGHTS[name]
    model = drawn(Masked(seen))
    batch = next(batches(model, IDS))
    with undisturbed(model):
        assert sight(model, anatomy_with_hints(model, {}), batch) == expected


def test_a_trial_takes_five_passes_at_most_and_of_a_causal_model_three():
    def passes(run: Callable[[nn.Module], object], model: nn.Module) -> int:
        calls: list[None] = []
        handle = model.register_forward_pre_hook(lambda *_: calls.append(None))
        run(model)
        handle.remove()
        return len(calls)

    def tried(model: nn.Module, again: bool = False) -> None:
        batch, anatomy = next(batches(model, IDS)), anatomy_with_hints(model, {})
        with undisturbed(model):
            with_sight(model, anatomy, batch, again=again)

    assert passes(tried, drawn(Masked(SIGHTS["causal"][0]))) == 3
    assert passes(tried, drawn(Masked(SIGHTS["all"][0]))) == 5
    wrapped = Pooled(drawn(hf.BertModel(bert())))
    assert passes(tried, wrapped) == 0  # known
    assert passes(lambda model: tried(model, again=True), wrapped) == 2


BIDIRECTIONAL: dict[str, Callable[[], nn.Module]] = {
    "a model": lambda: hf.BertModel(bert()),
    "a model with a head": lambda: hf.BertForMaskedLM(bert()),
    "a wrapper": lambda: Pooled(hf.BertModel(bert())),
    "a wrapper of a model with a head": lambda: Pooled(hf.BertForMaskedLM(bert())),
    "data parallel": lambda: nn.DataParallel(hf.BertModel(bert())),
    "sequential": lambda: nn.Sequential(Pooled(hf.BertModel(bert()))),
    "a subclass that adds something": lambda: type("Own", (hf.BertModel,), {"pooled": lambda self: None})(bert()),
    "roberta": lambda: hf.RobertaModel(hf.RobertaConfig(**zoo.TEXT | {"pad_token_id": 1})),
    "distilbert": lambda: zoo.make("distilbert")[0],
    "our encoder": lambda: zoo.make("encoder-pre")[0],
    "vit": lambda: zoo.make("vit")[0],
}


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_ordinary_use_has_the_full_mean_without_a_word(name: str):
    model = BIDIRECTIONAL[name]().eval()
    depthscope.apply(model, DeEscalate(0.5))  # warnings are errors here
    assert kinds(model) == {"full"}


@pytest.mark.parametrize("name", ["a model", "a wrapper", "data parallel", "sequential"])
@pytest.mark.parametrize("scale", [1.0, 0.0], ids=["as drawn", "blocks that add nothing"])
def test_a_trial_does_not_unsay_it(name: str, scale: float):
    model = drawn(BIDIRECTIONAL[name]())
    for layer in (module for module in model.modules() if isinstance(module, hf.models.bert.modeling_bert.BertLayer)):
        layer.attention.output.dense.weight.data *= scale
    depthscope.apply(model, DeEscalate(0.5), inputs=IDS)
    assert kinds(model) == {"full"}
    assert depthscope.probe(drawn(BIDIRECTIONAL[name]()), IDS).metadata["causal"] is False


def test_hooks_of_libraries_and_ours_are_nobody_elses():
    model = hf.BertModel(bert()).eval()
    layer = model.encoder.layer[0]
    layer.register_forward_hook(torch.nn.modules.module._WrappedHook(nn.Identity()))
    depthscope.apply(model, ResidualWeight(0.5))
    depthscope.apply(model, DeEscalate(0.5))
    assert kinds_of(model, DeEscalate) == {"full"}


def kinds_of(model: nn.Module, kind: type) -> set[str]:
    return {hook.mean.kind for _, hook in hooks_in(model) if isinstance(hook.remedy, kind)}


def test_a_trial_wins_over_what_a_library_whose_functions_were_changed_is_known_to_be(monkeypatch: pytest.MonkeyPatch):
    plain = BertSelfAttention.forward

    def masked(self: Any, hidden: Tensor, *_: Any, **__: Any) -> Any:
        place = torch.arange(hidden.shape[1])
        return plain(self, hidden, attention_mask=additive(place <= place.unsqueeze(-1)))

    monkeypatch.setattr(BertSelfAttention, "forward", masked)
    model = drawn(hf.BertModel(bert()))
    depthscope.apply(model, DeEscalate(0.5), inputs=IDS)
    assert kinds(model) == {"causal"}
    assert "causal=True" in str(recommend(drawn(hf.BertModel(bert())), IDS, tau=0.5).line)


@pytest.mark.parametrize("name", ["causal", "chunks", "all"])
@pytest.mark.parametrize("ask", [recommend, lambda *a, **k: depthscope.fix(*a, **k).recommendation])
def test_the_line_says_what_was_tried(name: str, ask: Callable[..., Any]):
    seen, expected = SIGHTS[name]
    line = ask(drawn(Masked(seen)), IDS, tau=0.5).line
    assert f"causal={expected != 'all'}" in line
    model = drawn(Masked(seen))
    exec(line, {"depthscope": depthscope, "DeEscalate": DeEscalate, "model": model})  # and no warning
    assert kinds(model) == {"full" if expected == "all" else "causal"}


def test_the_line_of_a_plain_model_needs_no_word():
    assert "causal" not in str(recommend(drawn(hf.BertModel(bert())), IDS, tau=0.5).line)


def test_a_profile_says_what_was_tried_and_by_whom():
    about = {name: depthscope.probe(drawn(Masked(SIGHTS[name][0])), IDS).metadata for name in SIGHTS}
    assert {name: found["causal"] for name, found in about.items()} == {
        "causal": True,
        "all": False,
        "chunks": True,
        "a look ahead": True,
        "a window": True,
        "right to left": None,
        "chunks from right to left": None,
        "itself alone": True,
    }
    assert all(found["causal_by"] == "tried" for found in about.values())
    assert any("some later ones, but not all" in note for note in about["chunks"]["notes"])
    assert any("right to left" in note for note in about["right to left"]["notes"])


def test_a_model_that_reads_from_right_to_left_has_no_mean():
    model = drawn(Masked(SIGHTS["right to left"][0]))
    for mixing in ("auto", "prefix", "ema"):
        with pytest.raises(ValueError, match=r"right to left.*turned round"):
            depthscope.apply(model, DeEscalate(0.5, mixing=mixing), inputs=IDS)
    with pytest.raises(ValueError, match="right to left"):
        recommend(model, IDS)
    assert not list(hooks_in(model))
    depthscope.apply(model, ResidualWeight(0.5), inputs=IDS)  # mixes nothing
    profile = depthscope.probe(drawn(Masked(SIGHTS["right to left"][0])), IDS)
    assert not diagnose(profile).recommendation.remedies


@pytest.mark.parametrize("causal", [True, False])
def test_what_the_user_says_wins_everywhere(causal: bool):
    mean = "causal" if causal else "full"
    for make in (lambda: Masked(SIGHTS["causal"][0]), lambda: hf.BertModel(bert())):
        profile = depthscope.probe(drawn(make()), IDS, causal=causal)
        assert (profile.metadata["causal"], profile.metadata["causal_by"]) == (causal, "user")
        assert f"causal={causal}" in str(recommend(drawn(make()), IDS, tau=0.5, causal=causal).line)
        fixed = depthscope.fix(drawn(make()), IDS, tau=0.5, causal=causal)
        assert f"causal={causal}" in str(fixed.recommendation.line)
        model = fixed.apply_to(drawn(make()))
        assert kinds(model) == {mean}
        depthscope.watch(drawn(make()), causal=causal)
    with pytest.raises(ValueError, match="expected causal=True or False, got 'yes'"):
        depthscope.probe(drawn(hf.BertModel(bert())), IDS, causal="yes")


def test_somebody_elses_hook_or_forward_makes_causality_unknown():
    def exchanged(model: Any) -> None:
        model.encoder.forward = model.encoder.layer[0].forward

    def hooked(model: Any) -> None:
        model.encoder.layer[1].attention.self.register_forward_hook(lambda *_: None)

    class Own(hf.BertModel):
        def _create_attention_masks(self, *args: Any, **kwargs: Any) -> Any:
            return super()._create_attention_masks(*args, **kwargs)

    for change, make in ((exchanged, hf.BertModel), (hooked, hf.BertModel), (lambda _: None, Own)):
        model = make(bert()).eval()
        change(model)
        with pytest.warns(UserWarning, match="cannot tell whether this model is causal"):
            depthscope.apply(model, DeEscalate(0.5))
        assert kinds(model) == {"causal"}


def test_a_mask_of_pairs_is_refused_where_a_class_of_ones_own_gives_it_to_a_librarys_model():
    class Own(hf.BertPreTrainedModel):
        def __init__(self, config: hf.BertConfig):
            super().__init__(config)
            self.bert = hf.BertModel(config)

        def forward(self, input_ids: Tensor) -> Tensor:
            size, n = input_ids.shape
            seen = torch.ones(n, n, dtype=torch.bool).tril()
            return self.bert(input_ids, attention_mask=additive(seen).expand(size, 1, n, n))[0]

    model = drawn(Own(bert()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        depthscope.apply(model, DeEscalate(0.5))
    with pytest.raises(ValueError, match="a mask of pairs of tokens"):
        model(IDS)
