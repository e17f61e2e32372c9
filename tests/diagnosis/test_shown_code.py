"""What `fix` says is what can be run, and it says something also where nothing can be measured."""

import torch

import depthscope
from depthscope.diagnosis.summary import of_fix


def encoder(blocks: int, *, norm_first: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, norm_first=norm_first)
    return torch.nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)


def test_the_lines_that_are_shown_put_the_remedy_in():
    model, x = encoder(24), torch.randn(2, 12, 32)
    fixed = depthscope.fix(model, x)
    assert fixed.remedies
    exec(of_fix(fixed).code, {"depthscope": depthscope, "model": model})
    with torch.no_grad():
        shown = depthscope.probe(model, x).curve("token_similarity")
    assert list(shown) == list(fixed.after.curve("token_similarity"))
    assert of_fix(fixed).code in str(fixed.verdicts[0].render(1000)).replace("\n    ", "\n")


class Block(torch.nn.Module):
    """A block with a norm first, of no known family."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.linear(normed + normed.mean(dim=1, keepdim=True))


def test_a_collapse_whose_odds_cannot_be_measured_gets_no_remedy():
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(*(Block() for _ in range(3))), 1e-30 * torch.randn(2, 6, 8)
    fixed = depthscope.fix(model, x)
    assert fixed.verdicts[0].verdict == "collapsed"
    assert "no remedy could be measured" in fixed.recommendation.reason
    assert fixed.remedies == ()
