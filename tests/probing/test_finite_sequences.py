"""A sequence that is not finite has no part in any mean: it is named, and the verdict is about the others."""

import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from depthscope import Profile, depth_use, diagnose, probe, watch
from depthscope.models import BlockConfig, Encoder
from depthscope.naming import sequences_of
from depthscope.remedies import recommend
from samples import seeded


def encoder() -> nn.Module:
    return Encoder(4, BlockConfig(16, 2), generator=seeded(0)).eval()


def broken(*samples: int, value: float = math.nan, of: int = 4) -> Tensor:
    x = torch.randn(of, 6, 16, generator=seeded(1))
    for sample in samples:
        x[sample, 2, 3] = value
    return x


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sequence_that_comes_broken_is_named_and_the_others_are_judged(
    value: float, dtype: torch.dtype, tmp_path: Path
):
    probe(encoder().to(dtype), broken(0, value=value).to(dtype)).save(tmp_path)
    profile = Profile.load(tmp_path)
    others = probe(encoder().to(dtype), broken(0).to(dtype)[1:])
    assert profile.metadata["not_finite"] == [{"sample": 0, "block": 0, "station": "output"}]
    assert any(
        "1 of 4 sequences has" in n and "sequence 0 from what enters block 1" in n for n in profile.metadata["notes"]
    )
    assert profile.curve("token_similarity") == pytest.approx(others.curve("token_similarity"), rel=1e-3)
    found, of_others = diagnose(profile), diagnose(others)
    assert found.verdict == of_others.verdict == "no collapse"
    said = "Not finite (NaN or infinity): sequence 0 from what enters block 1 on. Of the 3 other sequences: "
    assert found.headline.lower() == (said + of_others.headline).lower()


def test_sequences_that_a_block_breaks_are_named_with_the_block():
    model = encoder()

    def spoil(_block: nn.Module, _args: object, output: Tensor) -> Tensor:
        return output.index_fill(0, torch.tensor([1, 2]), math.inf)

    model.blocks[2].register_forward_hook(spoil)
    profile = probe(model, [broken(0), broken(), broken()])
    assert [tuple(item.values()) for item in profile.metadata["not_finite"]] == [
        (0, 0, "output"),
        *((sample, 3, "output") for sample in (1, 2, 5, 6, 9, 10)),
    ]
    found = diagnose(profile)
    assert found.verdict == "broken"
    assert "From block 3 on" in found.headline or "from block 3 on" in found.headline
    assert "(sequences 1–2, 5–6, 9–10)" in found.headline
    assert found.numbers == {"block": 3.0, "share": 6 / 11}


def test_without_a_finite_sequence_there_is_no_verdict():
    found = diagnose(probe(encoder(), broken(0, 1, of=2)))
    assert (found.verdict, found.findings) == ("cannot tell", ())
    assert "No sequence is finite" in found.headline
    with pytest.raises(ValueError, match="2 of 2 sequences have numbers that are not finite"):
        recommend(encoder(), broken(0, 1, of=2))


def test_padding_and_empty_sequences_are_not_broken():
    x, real = broken(0), torch.ones(4, 6, dtype=torch.bool)
    real[0, 2] = real[3] = False
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    profile = probe(model, x, mask=real, blocks="[0-2]")
    assert profile.metadata["not_finite"] == []
    assert diagnose(profile).verdict != "broken"


def test_a_profile_of_before_they_were_named_is_judged_as_it_was():
    profile = probe(encoder(), broken(0))
    del profile.metadata["not_finite"]
    assert diagnose(profile).verdict == "no collapse"


def test_watch_says_it_once():
    model = encoder().train()
    with warnings.catch_warnings(record=True) as said, watch(model, every=1):
        warnings.simplefilter("always")
        for step in range(3):
            model(broken(*[2] if step else []))
    message = "step 1: not finite (NaN or infinity), so in no mean: sequence 2 from what enters block 1 on"
    assert [str(warning.message) for warning in said] == [message]


def test_the_use_of_depth_names_it():
    found = depth_use(encoder(), [broken(), broken(1)])
    assert any(
        "1 of 8 sequences has" in n and "sequence 5 from the output of block 1" in n for n in found.metadata["notes"]
    )


def test_many_sequences_are_counted():
    assert sequences_of([4]) == "sequence 4"
    assert sequences_of(range(0, 20, 2)) == "sequences 0, 2, 4, 6, 8, 10 and 4 more"
