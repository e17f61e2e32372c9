"""Random small models and hostile inputs: what `probe` says is what 80-bit arithmetic says of the tokens that passed.

The tokens are taken by hooks of the test's own. Models, sizes, padding, number formats and inputs are drawn by a seed.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

import depthscope
import long_double as naive
from depthscope.half_precision import require_half_precision
from depthscope.measures import MEASURES
from depthscope.models import BlockConfig, Encoder
from samples import seeded

pytestmark = pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="long double is no wider than double here")

SEEDS = range(8)  # cases per kind of model
OF_TOKENS = [n for n, measure in MEASURES.items() if measure.of not in ("attention", "branch")]
SCALES = [-42, -36, -30, -15, 0, 0, 0, 0, 5, 15, 30]  # powers of ten
FORMATS = [torch.float32, torch.float32, torch.float64, torch.bfloat16]


class Strange(nn.Module):
    """A block of no known family, with the norm between its two branches."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.mix, self.out, self.up, self.down = (nn.Linear(width, k * width) for k in (3, 1, 1, 1))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.mix(x).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, mask[:, None, None, :]).transpose(1, 2).flatten(2))
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class HandWritten(nn.Module):
    def __init__(self, depth: int, width: int, heads: int):
        super().__init__()
        self.rounds = nn.ModuleList(Strange(width, heads) for _ in range(depth))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.rounds:
            x = block(x, mask)
        return x


@dataclass
class Case:
    """A model, what it is given, and the mask of its tokens, known here by construction."""

    model: nn.Module
    inputs: dict[str, Tensor]
    blocks: nn.ModuleList
    mask: Tensor
    hints: dict[str, Any] = field(default_factory=dict)


@dataclass
class Draw:
    """The sizes of a case, and its tokens."""

    dice: random.Random
    dtype: torch.dtype
    depth: int
    heads: int
    width: int
    tokens: Tensor  # (batch, n, width)
    mask: Tensor  # (batch, n)


def draw(kind: str, seed: int) -> Draw:
    dice = random.Random(f"{kind} {seed}")
    heads = dice.choice([1, 2, 4])
    width, batch, n = heads * 2 * dice.randint(1, 4), dice.randint(1, 3), dice.randint(1, 9)
    dtype = dice.choice(FORMATS)
    generator = seeded(dice.randrange(2**20))
    x = torch.randn(batch, n, width, generator=generator, dtype=torch.float64)
    way = dice.choice(["as they are", "nearly equal", "equal", "one zero", "one huge", "one tiny", "all zero"])
    if way in ("nearly equal", "equal"):
        x = x[:, :1] + (way == "nearly equal") * 10.0 ** -dice.randint(1, 7) * x
    elif way != "as they are":
        x[dice.randrange(batch), ... if way == "all zero" else dice.randrange(n)] *= {
            "one huge": 10.0 ** dice.randint(2, 6),
            "one tiny": 10.0 ** -dice.randint(2, 20),
        }.get(way, 0.0)
    x = (x * 10.0 ** dice.choice(SCALES)).to(dtype)
    return Draw(dice, dtype, dice.randint(1, 6), heads, width, x, draw_mask(dice, batch, n))


def draw_mask(dice: random.Random, batch: int, n: int) -> Tensor:
    mask = torch.ones(batch, n, dtype=torch.bool)
    way = dice.choice(["none", "right", "left", "holes", "one left", "nothing left"])
    for row in mask:
        cut = dice.randrange(n)
        if way == "right":
            row[n - cut :] = False
        elif way == "left":
            row[:cut] = False
        elif way == "holes":
            row[[i for i in range(n) if dice.random() < 0.4]] = False
        elif way == "one left":
            row[:] = torch.arange(n) == cut
    if way == "nothing left":
        mask[dice.randrange(batch)] = False
    if not mask.any():  # a batch without a real token is refused
        mask[0, 0] = True
    return mask


def ours(d: Draw) -> Case:
    config = BlockConfig(d.width, d.heads, placement=d.dice.choice(["post", "pre"]), causal=d.dice.random() < 0.3)
    model = Encoder(d.depth, config, generator=seeded(0))
    return Case(model, {"x": d.tokens, "mask": d.mask}, model.blocks, d.mask)


def of_torch(d: Draw) -> Case:
    layer = nn.TransformerEncoderLayer(
        d.width, d.heads, 2 * d.width, dropout=0.0, batch_first=True, norm_first=d.dice.random() < 0.5
    )
    model = nn.TransformerEncoder(layer, d.depth, enable_nested_tensor=False)
    return Case(model, {"src": d.tokens, "src_key_padding_mask": ~d.mask}, model.layers, d.mask)


def _embedded(model: nn.Module, d: Draw, blocks: nn.ModuleList) -> Case:
    return Case(model, {"inputs_embeds": d.tokens, "attention_mask": d.mask.long()}, blocks, d.mask)


def _sizes(d: Draw) -> dict[str, int]:
    return {
        "hidden_size": d.width,
        "num_attention_heads": d.heads,
        "num_hidden_layers": d.depth,
        "intermediate_size": 2 * d.width,
    }


def bert(d: Draw) -> Case:
    model = hf.BertModel(hf.BertConfig(**_sizes(d), vocab_size=9, max_position_embeddings=16))
    return _embedded(model, d, model.encoder.layer)


def llama(d: Draw) -> Case:
    model = hf.LlamaModel(hf.LlamaConfig(**_sizes(d), vocab_size=9, max_position_embeddings=16))
    return _embedded(model, d, model.layers)


def gpt2(d: Draw) -> Case:
    sizes = {"n_embd": d.width, "n_layer": d.depth, "n_head": d.heads, "n_positions": 16}
    model = hf.GPT2Model(hf.GPT2Config(**sizes, vocab_size=9, bos_token_id=0, eos_token_id=0))
    return _embedded(model, d, model.h)


def vit(d: Draw) -> Case:
    """Of images, which have no padding: 4 patches and a class token."""
    model = hf.ViTModel(hf.ViTConfig(**_sizes(d), image_size=4, patch_size=2), add_pooling_layer=False)
    pixels = d.tokens.flatten()[torch.arange(2 * 3 * 4 * 4) % d.tokens.numel()].reshape(2, 3, 4, 4)
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    return Case(model, {"pixel_values": pixels}, blocks, torch.ones(2, 5, dtype=torch.bool))


def hand_written(d: Draw) -> Case:
    model = HandWritten(d.depth, d.width, d.heads)
    hints = {"blocks": "rounds.*", "token_axis": 1, "mask": "mask"}
    return Case(model, {"x": d.tokens, "mask": d.mask}, model.rounds, d.mask, hints)


KINDS: dict[str, Callable[[Draw], Case]] = {
    make.__name__: make for make in (ours, of_torch, bert, llama, gpt2, vit, hand_written)
}


def passes_seen(case: Case) -> tuple[depthscope.Profile, list[Tensor]]:
    """The profile, and the tokens before the first block and after each, of the pass that has the inputs as given."""
    passes: list[list[Tensor]] = []

    def enter(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        passes.append([(args[0] if args else next(iter(kwargs.values()))).detach().clone()])

    def leave(_module: nn.Module, _args: tuple, output: Any) -> None:
        passes[-1].append((output if isinstance(output, Tensor) else output[0]).detach().clone())

    hooks = [case.blocks[0].register_forward_pre_hook(enter, with_kwargs=True)]
    hooks += [block.register_forward_hook(leave) for block in case.blocks]
    case.model.eval()
    try:
        with torch.no_grad():
            case.model(**case.inputs)
        profile = depthscope.probe(case.model, case.inputs, measures=OF_TOKENS, **case.hints)
    finally:
        for hook in hooks:
            hook.remove()
    plain, *probed = passes
    same = [seen for seen in probed if torch.equal(seen[0].nan_to_num(), plain[0].nan_to_num())]
    return profile, same[0]


def wide(x: Tensor) -> np.ndarray:
    return x.double().numpy().astype(np.longdouble)


class Expected:
    """Each measure of one sequence at one station, with the error that the format of the tokens allows."""

    def __init__(self, x: np.ndarray, before: np.ndarray | None, dtype: torch.dtype):
        self.x, self.before = x, before
        self.eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        self.stored_eps = torch.finfo(dtype).eps
        self.promised = 1e-12 if dtype == torch.float64 else 1e-5  # of docs/measures.md: 12 and 5 digits

    def check(self, name: str, value: float) -> None:
        if name == "outliers":
            assert value == naive.outliers(self.x).sum()
            return
        sizes = [naive.energy(self.x)]
        if self.before is not None and name in STEPS:
            sizes.append(naive.energy(self.before))
        if not len(self.x) or not all(np.isfinite(size) for size in sizes):
            assert math.isnan(value)
        elif name == "frobenius_norm":
            self.close(value, np.sqrt(sizes[0]), self.promised)
        elif 0 in sizes and name not in ("growth_mean", "growth_diversity"):
            assert math.isnan(value)
        else:
            getattr(self, name)(value)

    @staticmethod
    def close(value: float, expected: np.longdouble, relative: float, absolute: float = 0.0) -> None:
        if np.isnan(expected):
            assert math.isnan(value)
        else:
            assert abs(value - expected) <= relative * abs(expected) + absolute, (value, expected)

    def noise(self, x: np.ndarray) -> float:
        """The mean is a sum that may cancel: its error is some ε‖X‖. Relative to ‖X‖."""
        return 4 * self.eps * math.sqrt(len(x))

    def mean_is_noise(self, x: np.ndarray) -> bool | None:
        """None: so near to the limit that either answer is right."""
        share = np.sqrt(naive.similarity(x))
        unsure = abs(share - self.stored_eps) <= self.noise(x)
        return None if unsure else bool(share <= self.stored_eps)

    def token_similarity(self, value: float) -> None:
        self.close(math.sqrt(value), np.sqrt(naive.similarity(self.x)), self.promised, self.noise(self.x))

    def token_diversity(self, value: float) -> None:
        self.close(value, naive.diversity(self.x), self.promised)

    def frequency_ratio(self, value: float) -> None:
        if self.mean_is_noise(self.x) is not False:
            assert math.isnan(value) or self.mean_is_noise(self.x) is None
            return
        mean, rest = (np.sqrt(naive.energy(part)) for part in naive.split(self.x))
        self.close(value, rest / mean, self.promised + self.noise(self.x) * np.hypot(mean, rest) / mean)

    def cosine_similarity(self, value: float) -> None:
        """√(1 − t_cos) is a distance between unit tokens, which are rounded: its error is some ε."""
        expected = naive.mean_cosine(self.x)
        distance = np.sqrt(max(1 - expected, np.longdouble(0)))
        self.close(value, expected, 2.0**-52, self.promised * distance**2 + 16 * self.eps * distance)

    def direction_similarity(self, value: float) -> None:
        u = naive.directions(self.x[~naive.outliers(self.x)])
        expected = np.sqrt(naive.similarity(u)) if len(u) else naive.NAN
        self.close(math.sqrt(value), expected, self.promised, self.noise(self.x))

    def largest_token_share(self, value: float) -> None:
        self.close(value, (naive.lengths(self.x) ** 2).max() / naive.energy(self.x), self.promised)

    @property
    def feature_shares(self) -> np.ndarray:
        x = self.x[~naive.outliers(self.x)]
        return (x * x).sum(axis=0) / naive.energy(x) if naive.energy(x) else np.full(1, naive.NAN)

    def largest_feature_share(self, value: float) -> None:
        self.close(value, self.feature_shares.max(), self.promised)

    def largest_feature(self, value: float) -> None:
        shares = self.feature_shares
        assert math.isnan(value) if np.isnan(shares).any() else shares[int(value)] >= (1 - self.promised) * shares.max()

    # The Gram matrix drops singular values below √(kε) σ₁, which moves the rank by less than k√(kε) ln(1/√(kε)):
    # 1e-5 at k = 9. What float64 does to the rest is far below.
    def effective_rank(self, value: float) -> None:
        self.close(value, naive.effective_rank(self.x), 1e-5)

    def ordinary_rank(self, value: float) -> None:
        x = self.x[~naive.outliers(self.x)]
        self.close(value, naive.effective_rank(x) if naive.energy(x) else naive.NAN, 1e-5)

    def stable_rank(self, value: float) -> None:
        self.close(value, naive.singular_values(self.x)[0] ** -2, 1e-12)

    def composite_residual(self, value: float) -> None:
        self.close(value, naive.composite(self.x), 1e-12)

    def growth_mean(self, value: float) -> None:
        if naive.energy(self.before) == 0 or self.mean_is_noise(self.before):
            assert math.isnan(value)
        elif self.mean_is_noise(self.before) is False:
            (old, all_old), (new, all_new) = (
                (np.sqrt(naive.energy(naive.split(x)[0])), np.sqrt(naive.energy(x))) for x in (self.before, self.x)
            )
            error = self.promised + self.noise(self.x) * all_old / old
            self.close(math.sqrt(value), new / old, error, self.noise(self.x) * float(all_new / old))

    def growth_diversity(self, value: float) -> None:
        old, new = (naive.energy(naive.split(x)[1]) for x in (self.before, self.x))
        self.close(value, new / old if old else naive.NAN, 2 * self.promised)

    def escalation_rate(self, value: float) -> None:
        new = naive.diversity(self.x)
        self.close(value, naive.diversity(self.before) / new if new else naive.NAN, 2 * self.promised)

    def angular_distance(self, value: float) -> None:
        """2·arcsin(‖u − v‖/2) with an error of some ε in ‖u − v‖; at opposite directions it becomes √ε."""
        found = naive.angles(self.before, self.x)
        error = [4 * self.eps / max(math.cos(angle / 2), math.sqrt(self.eps)) for angle in found]
        self.close(value, found.mean() / np.pi if len(found) else naive.NAN, 0.0, max(error, default=0.0))


STEPS = {name for name, measure in MEASURES.items() if measure.of in ("step", "block")}
SHARES = [f"energy_{part}" for part in ("shared", "sequence", "position", "token")]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_measured_is_what_passed(kind: str, seed: int):
    drawn = draw(kind, seed)
    if drawn.dtype == torch.bfloat16:
        require_half_precision()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        case = KINDS[kind](drawn)
    case.model.to(drawn.dtype)
    profile, seen = passes_seen(case)
    rows = profile.frame[profile.frame.station == "output"]
    found = {(block, name, sample): value for block, name, sample, value in zip(
        rows.block, rows.measure, rows["sample"], rows.value, strict=True)}  # fmt: skip
    checked = 0
    for block, tokens in enumerate(seen):
        real = [(wide(x)[m.numpy()], m.nonzero().flatten().numpy()) for x, m in zip(tokens, case.mask, strict=True)]
        shares = naive.energy_shares(real, tokens.shape[1])
        for name, share in zip(SHARES, shares, strict=True):
            Expected.close(found[block, name, -1], share, 0.0, 1e-12 if drawn.dtype == torch.float64 else 1e-6)
        for sample, (x, _) in enumerate(real):
            before = wide(seen[block - 1][sample])[case.mask[sample].numpy()] if block else None
            expected = Expected(x, before, drawn.dtype)
            for name in OF_TOKENS:
                if name in SHARES or (name in STEPS and before is None):
                    continue
                checked += 1
                try:
                    expected.check(name, found[block, name, sample])
                except AssertionError as error:
                    raise AssertionError(f"{name} of sequence {sample} after block {block}: {error}") from error
    assert checked >= len(case.blocks) * len(OF_TOKENS) / 2
