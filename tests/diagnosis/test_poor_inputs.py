"""Inputs that carry no verdict: unknown tokens, one line again and again, ids of another tokenizer."""

import pytest
import torch

import depthscope
from depthscope.inputs import Batch
from depthscope.models import BlockConfig, CausalLM
from depthscope.probing.poor_inputs import IdsSeen
from samples import seeded


class Words:
    """A tokenizer of 50 words, of which the first is [UNK]."""

    unk_token_id = 0

    def __len__(self) -> int:
        return 50


IDS = torch.randint(1, 50, (4, 64), generator=seeded(0))
LINE = torch.arange(1, 6).repeat(4, 64)[:, :64]
HALF_UNKNOWN = torch.where(torch.arange(64) % 2 == 0, 0, IDS)


def seen(ids: torch.Tensor, tokenizer: object = None, **more: torch.Tensor) -> dict[str, float]:
    found = IdsSeen()
    for rows in ids.split(2):
        batch = Batch((), {"input_ids": rows} | {name: mask[: len(rows)] for name, mask in more.items()})
        found.see(tokenizer, found.asked(batch))
    return found.to_dict()


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (IDS, None),
        (HALF_UNKNOWN, "the tokenizer does not know 50% of the tokens"),
        (IDS + 60, "100% of the ids are none of the tokenizer's"),
        (IDS[:1].expand(4, 64), "all sequences are the same"),
        (torch.full((4, 64), 7), "all sequences are the same"),
        (torch.stack([torch.full((64,), k) for k in (3, 4, 5, 6)]), "the text repeats itself"),
        (torch.stack([LINE[0].roll(k) for k in range(4)]), "the text repeats itself"),
    ],
)
def test_the_reason_is_said(ids: torch.Tensor, said: str | None):
    model = CausalLM(3, BlockConfig(16, 2, 32), vocabulary=120, context=64, generator=seeded(0))
    found = depthscope.diagnose(depthscope.probe(model, ids, tokenizer=Words()))
    assert (found.verdict == "cannot tell") == (said is not None)
    assert said is None or said in found.headline


def test_padding_does_not_count_and_a_text_of_four_letters_is_one():
    mask = torch.ones(2, 64, dtype=torch.long)
    mask[:, 32:] = 0
    assert (
        seen(torch.cat([IDS[:2, :32], torch.zeros(2, 32, dtype=torch.long)], 1), Words(), attention_mask=mask)[
            "unknown"
        ]
        == 0
    )
    letters = torch.randint(0, 4, (8, 128), generator=seeded(1))
    assert seen(letters)["different"] > 0.9
    assert seen(torch.randn(2, 5, 8)) == {}
    assert "unknown" not in seen(IDS)


def test_a_probe_says_it_of_what_it_was_given():
    model = CausalLM(3, BlockConfig(16, 2, 32), vocabulary=120, context=64, generator=seeded(0))
    profile = depthscope.probe(model, HALF_UNKNOWN, tokenizer=Words())
    assert profile.metadata["ids"]["unknown"] == 0.5
    assert depthscope.diagnose(profile).verdict == "cannot tell"
