"""Which branch weights α and which strengths τ of de-escalation let 100 blocks train? Theory's lines, drawn before.

A map of τ × α for post-norm and for pre-norm: Vision Transformers of width 32 on scikit-learn's digits. Of every cell,
new: both exponents, in closed form and measured, and what they lead to over the whole depth. Then it is trained for a
short time, at two learning rates; the loss on the last fifth of the training images chooses the rate. A cell is
expected to train if t_div after the last block is at least one threshold, and the gradient grows or shrinks by at most
another over the whole depth. Both are fitted on another map, of 50 blocks and of other values of α and τ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import depthscope.drawing as drawing
from depthscope.measures import TokenMatrix, token_similarity
from depthscope.models import BlockConfig, VisionTransformer
from depthscope.models.initialisers import HE, XAVIER, Scheme, draw_block
from depthscope.probing.roles import CAN_LEARN
from depthscope.progress import Share
from depthscope.remedies import DeEscalate, ResidualWeight, apply
from depthscope.theory import Gains, course, gradient_exponents, token_exponents
from depthscope_lab.papers.deep.narrow_vits import role_ratio
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.trained import steps
from depthscope_lab.papers.vocabulary import Claim, Work, axis, judge, rows
from depthscope_lab.training.data import LabelledImages, load_digits
from depthscope_lab.training.data.order import batch_indices
from depthscope_lab.training.kept import kept

Wiring = Literal["post", "pre"]
Row = dict[str, Any]
WIRINGS: tuple[Wiring, ...] = get_args(Wiring)
NAMES = {"post": "post-norm", "pre": "pre-norm"}
MARGINS = {  # column of the finer grid, 0 on the line → its name in the picture, its colour
    "tokens_inside": ("above it tokens are too alike", drawing.ORANGE),
    "gradient_inside": ("inside of it the gradient grows too much", drawing.SKY),
}
CHANCE = math.log(10)
TRAINS = 0.7  # of ln 10: a cell with a smaller loss at the end has trained
OTHER_SHARES = (0.5, 0.6, 0.8, 0.9)  # in place of it
LAST = 10  # steps whose mean loss counts
IMAGES = 8  # that the measured numbers of a new model are means over
WANTED = 0.9  # balanced accuracy, and the share of cells where the closed form must be near
NEAR = 0.05  # of an exponent: 5 % per block
ENOUGH = 30  # steps below which nothing is judged
# Thresholds that are tried, evenly in their logarithms: half an order of magnitude apart.
DIVERSITIES = tuple(10 ** (-half / 2) for half in range(1, 25))
GROWTHS = tuple(10 ** (half / 2) for half in range(1, 25))


@dataclass(frozen=True)
class Shape:
    """What all models of a map share. The cells are all pairs of `alphas` and `taus`."""

    depth: int
    alphas: tuple[float, ...]
    taus: tuple[float, ...]
    rates: tuple[float, ...]
    steps: int = 60
    batch: int = 32
    width: int = 32
    heads: int = 2
    seed: int = 0


@dataclass(frozen=True)
class Config:
    seed: int = 0
    depth: int = 100
    alphas: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 2.0)
    taus: tuple[float, ...] = (0.0, 0.1, 0.3, 0.5, 1.0)
    other_depth: int = 50  # of the map that the thresholds are fitted on
    other_alphas: tuple[float, ...] = (0.07, 0.14, 0.3, 0.6, 1.4, 3.0)
    other_taus: tuple[float, ...] = (0.05, 0.15, 0.25, 0.4, 0.9)
    rates: tuple[float, ...] = (1e-3, 3e-3)  # 3e-4 brings no cell of the other map below `TRAINS` in so few steps
    steps: int = 60
    points: int = 31  # of the lines, along either axis

    def maps(self) -> dict[str, Shape]:
        """The map that is fitted on, and the map that is judged."""
        rest: dict[str, Any] = {"rates": self.rates, "steps": self.steps, "seed": self.seed}
        fit = Shape(self.other_depth, self.other_alphas, self.other_taus, **rest)
        return {"fit": fit, "judged": Shape(self.depth, self.alphas, self.taus, **rest)}


@dataclass(frozen=True)
class Lines:
    """The two thresholds."""

    diversity: float
    growth: float

    def inside(self, cells: pd.DataFrame, prefix: str = "") -> pd.Series:
        """Which cells are expected to train, by their columns `diversity` and `growth` (a logarithm)."""
        apart = cells[f"{prefix}diversity"] >= self.diversity
        return apart & (cells[f"{prefix}growth"].abs() <= math.log(self.growth))


PRESCRIBED = Lines(diversity=0.5, growth=10.0)  # what `prescribe` and `recommend` hold at most: fitted on nothing


def balanced_accuracy(expected: Sequence[bool] | pd.Series, trains: Sequence[bool] | pd.Series) -> float:
    """Mean of the shares that are right among cells that train and among cells that do not; nan if one is empty."""
    came = pd.Series(list(trains), dtype=bool)
    right = pd.Series(list(expected), dtype=bool) == came
    return float(right.groupby(came).mean().mean()) if came.nunique() == 2 else math.nan


def fitted(cells: pd.DataFrame, prefix: str = "") -> Lines:
    """The pair of thresholds with the best balanced accuracy on these cells (`trains`).

    Of several that are equally good, the one nearest to the middle of them all, on logarithmic scales. Where all cells
    train, or none does, nothing can be fitted: those of the prescription.
    """
    if cells["trains"].nunique() < 2:
        return PRESCRIBED
    tried = [Lines(*pair) for pair in product(DIVERSITIES, GROWTHS)]
    found = {lines: balanced_accuracy(lines.inside(cells, prefix), cells["trains"]) for lines in tried}
    best = max(found.values())
    tied = [lines for lines, accuracy in found.items() if math.isclose(accuracy, best)]
    places = [(math.log(lines.diversity), math.log(lines.growth)) for lines in tied]
    middle = [sum(along) / len(places) for along in zip(*places, strict=True)]
    return min(zip(tied, places, strict=True), key=lambda one: math.dist(one[1], middle))[0]


def compute(config: Config, progress: Share, folder: Path) -> pd.DataFrame:
    """One row per map (fit, judged), wiring and cell; and those of a finer grid without training (lines)."""
    shapes = config.maps()
    cost = {name: len(s.alphas) * len(s.taus) * s.depth * (s.steps * len(s.rates) + 5) for name, s in shapes.items()}
    work = Work(len(WIRINGS) * sum(cost.values()), progress)
    frames = []
    for (name, shape), wiring in product(shapes.items(), WIRINGS):
        given = entrance(shape)
        for tau, alpha in product(shape.taus, shape.alphas):
            cell = Cell(shape, wiring, alpha, tau)
            measured = cell.kept("measured", folder, cell.measured)
            work(5 * shape.depth)
            row = cell.trained(folder, work) | closed_form(shape, wiring, alpha, tau, given) | measured
            frames.append({"map": name, "wiring": wiring, "depth": shape.depth, **row})
    cells = pd.DataFrame(frames).astype({"measured_lambda_t": float})
    return with_lines(cells, config)


def with_lines(cells: pd.DataFrame, config: Config) -> pd.DataFrame:
    """The cells of both maps with what is expected of them, and a finer grid for the lines of the picture."""
    cells = cells.assign(trains=cells["loss"] < TRAINS * CHANCE, prescribed=PRESCRIBED.inside(cells))
    for prefix in ("", "measured_"):
        lines = fitted(rows(cells, map="fit"), prefix)
        cells[f"{prefix}expected"] = lines.inside(cells, prefix)
        cells[f"{prefix}least_diversity"], cells[f"{prefix}most_growth"] = lines.diversity, lines.growth
    shape = config.maps()["judged"]
    alphas = np.geomspace(min(config.alphas), max(config.alphas), config.points).tolist()
    taus, given = np.linspace(min(config.taus), max(config.taus), config.points).tolist(), entrance(shape)
    places = product(WIRINGS, alphas, taus)
    fine = pd.DataFrame([{"wiring": w, **closed_form(shape, w, alpha, tau, given)} for w, alpha, tau in places])
    fine["tokens_inside"] = np.log(fine["diversity"] / cells["least_diversity"].iloc[0])
    fine["gradient_inside"] = math.log(cells["most_growth"].iloc[0]) - fine["growth"].abs()
    return pd.concat([cells, fine.assign(depth=shape.depth, map="lines")], ignore_index=True)


def entrance(shape: Shape) -> tuple[int, float, float]:
    """Tokens per image, and similarity and mean square of the tokens that enter block 1; means over images."""
    tokens = embedded(shape, "post")
    return tokens.shape[-2], token_similarity(tokens).mean().item(), tokens.double().square().mean().item()


def closed_form(shape: Shape, wiring: Wiring, alpha: float, tau: float, given: tuple[int, float, float]) -> Row:
    """λ_t and λ_g, means per block; t_div after the last block; ln of the gradient's growth over all blocks.

    λ_t is that of nearly equal tokens; infinite at τ = 1, where nothing can collapse.
    """
    count, similarity, energy = given
    gains = Gains(attention=1.0, ffn=2.0, score=1.0, tokens=count)  # of Xavier's attention and He's FFN
    found = course(shape.depth, alpha, tau, gains, placement=wiring, similarity=similarity, energy=energy)
    exponents = {"lambda_t": math.fsum(found.tokens) / shape.depth, "lambda_g": found.growth / shape.depth}
    return {"alpha": alpha, "tau": tau, **exponents, "diversity": 1 / (1 + found.odds[-1]), "growth": found.growth}


@cache
def digits() -> LabelledImages:
    """Training images, and in place of the test images those that choose the rate."""
    return load_digits().for_tuning()


def pixels(images: Tensor) -> Tensor:
    """Bytes → numbers of mean 0 and variance 1."""
    data = digits()
    return (images.float() / data.white - data.mean[0]) / data.std[0]


def build(shape: Shape, wiring: Wiring) -> VisionTransformer:
    """The plain model, without α and τ, by Xavier and He. Its class token is as large as its patches."""
    generator = torch.Generator().manual_seed(shape.seed)
    block = BlockConfig(shape.width, shape.heads, 2 * shape.width, placement=wiring, initialise=_xavier_he)
    model = VisionTransformer(shape.depth, block, image_size=8, patch_size=4, channels=1, generator=generator)
    assert model.class_token is not None
    nn.init.normal_(model.class_token, generator=generator)
    return model


def _xavier_he(attention: Any, ffn: Any, generator: torch.Generator | None = None) -> None:
    draw_block(Scheme(XAVIER, XAVIER, XAVIER, HE), attention, ffn, generator)


@torch.no_grad()
def embedded(shape: Shape, wiring: Wiring) -> Tensor:
    """What enters block 1, (images, n, d)."""
    model, heard = build(shape, wiring), []
    model.encoder.register_forward_pre_hook(lambda _module, given: heard.append(given[0]))
    model(pixels(digits().train_images[:IMAGES]))
    return heard[0]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Cell:
    """A pair (α, τ) of a map; all models have the same weights when new and see the same images in the same order."""

    shape: Shape
    wiring: Wiring
    alpha: float
    tau: float

    def model(self) -> VisionTransformer:
        remedies = [ResidualWeight(self.alpha), *([DeEscalate(self.tau, at="output")] if self.tau else [])]
        model = build(self.shape, self.wiring)
        apply(model, *remedies)  # type: ignore[arg-type]
        return model

    def kept(self, run: str, folder: Path, make: Any, **more: Any) -> Row:
        same = {name: getattr(self.shape, name) for name in ("depth", "width", "heads", "seed", "steps", "batch")}
        key = {"run": run, "wiring": self.wiring, "alpha": self.alpha, "tau": self.tau, **same, **more}
        return kept(folder, key, make)  # type: ignore[no-any-return]

    def measured(self) -> Row:
        """The four numbers of `closed_form`, of the model itself, new. λ_t is None at τ = 1."""
        blocks, tokens = list(self.model().encoder.blocks), embedded(self.shape, self.wiring)
        of_tokens, of_gradient = (
            exponents(blocks, tokens, generator=torch.Generator().manual_seed(self.shape.seed))
            for exponents in (token_exponents, gradient_exponents)
        )
        with torch.no_grad():
            x = tokens
            for block in blocks:
                x = block(x)
        end = TokenMatrix.of(x)
        usable = [number for number in of_tokens if math.isfinite(number)] if self.tau < 1 else []
        return {
            "measured_lambda_t": sum(usable) / len(usable) if usable else None,
            "measured_lambda_g": sum(of_gradient) / self.shape.depth,
            "measured_diversity": (end.deviation_norm / end.norm).square().log().mean().exp().item(),
            "measured_growth": sum(of_gradient),
        }

    def train(self, rate: float, told: Share) -> Row:
        """The losses of all steps; loss and accuracy on the images held back; where attention can learn at first."""
        model, data, shape = self.model(), digits(), self.shape
        optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1, fused=True)
        losses: list[float] = []
        about: Row = {}

        def loss_of(step: int) -> Tensor:
            chosen = batch_indices(shape.seed, step, len(data.train_images), shape.batch)
            return F.cross_entropy(model(pixels(data.train_images[chosen])), data.train_labels[chosen])

        for step, loss in steps(loss_of, optimiser, shape.steps):
            losses.append(loss)
            if not about:
                ratios = torch.tensor([role_ratio(block) for block in model.encoder.blocks])  # type: ignore[arg-type]
                can_learn = (ratios >= CAN_LEARN).double().mean().item()
                about = {"ratio": ratios.median().item(), "can_learn": can_learn}
            told((step + 1) / shape.steps)
        with torch.no_grad():
            scores = model(pixels(data.test_images))
        valid = F.cross_entropy(scores, data.test_labels).item()
        right = (scores.argmax(dim=-1) == data.test_labels).double().mean().item()
        return about | {"rate": rate, "losses": losses, "valid_loss": valid, "valid_accuracy": right}

    def trained(self, folder: Path, work: Work) -> Row:
        """At its best rate."""
        found = []
        for rate in self.shape.rates:
            told = work.part(self.shape.steps * self.shape.depth)
            found.append(self.kept("training", folder, partial(self.train, rate, told), rate=rate))
            told(1.0)
        return chosen_rate(found)


def chosen_rate(runs: list[Row]) -> Row:
    """Of one cell's runs, that with the least loss on the images held back; the least rate where all have failed.

    `loss` is the mean over the last steps; infinite where a number was not finite.
    """
    ordered = sorted(runs, key=lambda row: row["rate"])
    best = min(ordered, key=lambda row: math.inf if row["valid_loss"] is None else row["valid_loss"])
    end = best["losses"][-LAST:]
    failed = None in best["losses"] or best["valid_loss"] is None
    about, edges = {name: best[name] for name in best if name != "losses"}, (ordered[0]["rate"], ordered[-1]["rate"])
    return about | {"loss": math.inf if failed else sum(end) / len(end), "edge": best["rate"] in edges}


def draw(frame: pd.DataFrame) -> Any:
    """The loss of every cell at its best rate, the two lines over it, and rings where the lines are wrong."""
    figure, axes = drawing.panels(len(WIRINGS), width=4.6, height=4.2)
    colours: Any = None
    for ax, wiring in zip(axes, WIRINGS, strict=True):
        cells = rows(frame, map="judged", wiring=wiring)
        table = cells.pivot(index="alpha", columns="tau", values="loss")
        x, y = table.columns.to_numpy(), table.index.to_numpy()
        colours = drawing.paint_plane(ax, table.to_numpy(), x, y, limits=(0.0, CHANCE))
        for margin, (_, colour) in MARGINS.items():
            plane = rows(frame, map="lines", wiring=wiring).pivot(index="alpha", columns="tau", values=margin)
            if plane.min().min() < 0 < plane.max().max():
                ax.contour(plane.columns, plane.index, plane.to_numpy(), levels=[0.0], colors=colour, linewidths=2.2)
        wrong = cells[cells["expected"] != cells["trains"]]
        ring: dict[str, Any] = {"facecolors": "none", "edgecolors": drawing.VERMILION}
        ax.scatter(wrong["tau"], wrong["alpha"], s=260, linewidths=1.6, **ring)
        title = f"{NAMES[wiring]}, {int(cells['depth'].iloc[0])} blocks"
        axis(ax, title, "τ, strength of de-escalation", "α, weight of branches")
    for name, colour in MARGINS.values():
        axes[0].plot([], [], color=colour, linewidth=2.2, label=name)
    axes[0].scatter([], [], s=80, label="the lines are wrong", **ring)
    figure.colorbar(colours, ax=axes, label="training loss at the end")
    drawing.shared_legend(figure, axes[0], columns=3)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    """Of the map that is judged."""
    cells = rows(frame, map="judged")
    lacks = "" if config.steps >= ENOUGH else f"needs {ENOUGH} steps"
    by_wiring = {name: rows(cells, wiring=wiring) for wiring, name in NAMES.items()}
    inside = cells[cells["prescribed"]]
    forms = {"λ_t, of tokens": "lambda_t", "λ_g, of the gradient": "lambda_g"}
    apart = {words: (cells[name] - cells[f"measured_{name}"]).abs() for words, name in forms.items()}
    return [
        *(_predicted(own, name, lacks) for name, own in by_wiring.items() if len(own)),
        judge(
            "inside the bounds of the prescription, which are fitted on nothing, cells train",
            "ours: t_sim ≤ ½ after the last block, the gradient within a factor of 10",
            f"{int(inside['trains'].sum())} of {len(inside)} cells",
            "9 of 10 at least; what lies outside may train too",
            len(inside) and inside["trains"].mean() >= WANTED,
            when=len(inside) > 0,
            lacks=lacks,
        ),
        *(_agrees(words, off[off < math.inf], lacks) for words, off in apart.items()),  # τ = 1 has no λ_t
    ]


def _predicted(cells: pd.DataFrame, name: str, lacks: str) -> Claim:
    accuracy = balanced_accuracy(cells["expected"], cells["trains"])
    mixed = not math.isnan(accuracy)
    trained, right = int(cells["trains"].sum()), int((cells["expected"] == cells["trains"]).sum())
    others = {s: balanced_accuracy(cells["expected"], cells["loss"] < s * CHANCE) for s in OTHER_SHARES}
    told = ", ".join(f"{share:g}: {value:.2f}" for share, value in others.items())
    lines = cells.iloc[0]
    return judge(
        f"{name}: the theory's two lines predict which cells train",
        "ours; thresholds fitted on another map, of other depth, α and τ: t_div ≥ "
        f"{lines['least_diversity']:.2g} after the last block, the gradient within a factor of "
        f"{lines['most_growth']:.2g}",
        f"{trained} of {len(cells)} cells train, the lines are right about {right}; "
        + (f"balanced accuracy {accuracy:.2f}" if mixed else "the other side is empty"),
        f"a balanced accuracy of {WANTED:g} at least; a cell trains if its training loss ends below {TRAINS:g}·ln 10",
        accuracy >= WANTED,
        f"with other shares of ln 10: {told}" if mixed else "",
        when=mixed,
        lacks=lacks,
    )


def _agrees(words: str, off: pd.Series, lacks: str) -> Claim:
    near = float((off <= NEAR).mean())
    return judge(
        f"the closed form of {words}, is what the new blocks do",
        "ours, for many features; this width is 32",
        f"to {NEAR:g} per block in {near:.0%} of {len(off)} cells; median {off.median():.3f}, largest {off.max():.2f}",
        f"to {NEAR:g} in {WANTED:.0%} of the cells",
        near >= WANTED,
        lacks=lacks,
    )


QUICK = Config(0, 4, (0.1, 0.5, 2.0), (0.0, 1.0), 3, (0.2, 1.0), (0.5,), rates=(1e-3, 1e-2), steps=4, points=7)
STUDY = Study("depth-phase", Config(), QUICK, compute, draw, claims, in_folder=True)
