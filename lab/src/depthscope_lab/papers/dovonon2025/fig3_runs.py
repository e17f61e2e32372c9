"""The models of Fig. 3's study: pre-norm ViTs with H as it comes, steered to smooth, steered to sharpen, and a control.

The control has the same form and size as the steered ones (eigenvalues drawn evenly from an interval, root mean square
.58) and the signs of neither: what it gains against H as it comes is not the steering's.

Each kind gets the learning rate that is best on images held back from training (never the test images), with a seed of
its own, and is then trained with fresh seeds on all training images.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from torch import nn

from depthscope.anatomy import anatomy_of
from depthscope.probing import probe
from depthscope.probing.weight_spectra import WHOLE, spectra
from depthscope.progress import Tick
from depthscope.remedies.reparameterise import INTERVALS
from depthscope_lab.papers.dovonon2025.fig5_runs import Training, fit
from depthscope_lab.training.data import LabelledImages, load_cifar10, load_digits
from depthscope_lab.training.images import ImageClassification
from depthscope_lab.training.recipes import RECIPES
from depthscope_lab.training.task import Share

KINDS = {
    "plain": "pre",
    "both": "pre+reparameterise(interval=[-1, 1], start=fresh)",
    "smooth": "pre+reparameterise(interval=smooth, start=fresh)",
    "sharpen": "pre+reparameterise(interval=sharpen, start=fresh)",
}
MEASURES = ("frequency_ratio", "cosine_similarity", "effective_rank")
TUNING_SEED = 1000  # added to the study's own
_ALL, _CPU = Share(0, 1), torch.device("cpu")


@dataclass(frozen=True)
class Subject:
    """What the models are trained on, and in which form."""

    data: LabelledImages
    recipe: str
    patch_size: int
    shape: Training
    images: int  # of the test images, that the three measures are taken on


def subject_of(source: str | None, patch_size: int, shape: Training, images: int) -> Subject:
    """scikit-learn's digits, or CIFAR-10 from a folder, as far as it is there."""
    if source is None:
        return Subject(load_digits(), "vit-digits", patch_size, shape, images)
    return Subject(load_cifar10(source, allow_incomplete=True), "vit-cifar10", patch_size, shape, images)


def tuned(kind: str, subject: Subject, rates: tuple[float, ...], seed: int, advance: Tick) -> pd.DataFrame:
    """One row per learning rate: the loss and the accuracy on images that were held back."""
    held_back = replace(subject, data=subject.data.for_tuning())
    rows = []
    for rate in rates:
        _, found = _trained(kind, held_back, rate, seed + TUNING_SEED, advance)
        rows.append({"kind": kind, "state": "tuning", "seed": seed + TUNING_SEED, "rate": rate, **found})
    return pd.DataFrame(rows)


def best_rate(tuning: pd.DataFrame) -> float:
    return float(tuning.sort_values("loss")["rate"].iloc[0])


def before_and_after(kind: str, subject: Subject, rate: float, seed: int, advance: Tick) -> pd.DataFrame:
    """The three measures of test images by block, in the model as drawn and as trained, with what it has reached."""
    about: dict[str, Any] = {"kind": kind, "seed": seed, "rate": rate}
    fresh, task = _model(kind, subject, seed)
    pixels = task.normalised(subject.data.test_images[: subject.images])
    frames = [_measured(fresh, pixels).assign(**about, state="fresh", **_score(fresh, task))]
    trained, found = _trained(kind, subject, rate, seed, advance)
    frames.append(_measured(trained, pixels).assign(**about, state="trained", **found))
    return pd.concat(frames, ignore_index=True)


def _model(kind: str, subject: Subject, seed: int) -> tuple[nn.Module, ImageClassification]:
    shape = subject.shape
    config = RECIPES[subject.recipe](KINDS[kind]).changed(
        depth=shape.depth,
        width=shape.width,
        ffn_width=2 * shape.width,
        heads=shape.heads,
        patch_size=subject.patch_size,
        batch_size=shape.batch,
        augment=False,
        seed=seed,
    )
    task = ImageClassification(config, subject.data)  # type: ignore[arg-type]
    return task.build(), task


def _trained(kind: str, subject: Subject, rate: float, seed: int, advance: Tick) -> tuple[nn.Module, dict[str, float]]:
    model, task = _model(kind, subject, seed)
    fit(
        model.train(),
        lambda own, step: task.loss(own, task.batch(step, _ALL, _CPU), None)[0],
        replace(subject.shape, rate=rate),
        advance,
    )
    return model, _score(model, task)


@torch.no_grad()
def _score(model: nn.Module, task: ImageClassification) -> dict[str, float]:
    found = task.evaluate(model.eval(), _ALL, _CPU)
    return {"loss": found["test_loss"] / found["count"], "accuracy": found["test_accuracy"] / found["count"]}


def _measured(model: nn.Module, pixels: Any) -> pd.DataFrame:
    """Of block 0 (what enters) and every block: the three measures, mean over images; the spectrum of H; LN's weights.

    outside: how far an eigenvalue of the block's H lies outside [−1, 0] and [0, 1] at the most (imaginary part
    included); negative_gains: the share of the weights < 0 of the norm that attention reads.
    """
    frame = probe(model, pixels, measures=MEASURES).frame
    frame = frame[frame["station"] == "output"]
    wide = frame.groupby(["block", "measure"])["value"].mean().unstack("measure").reset_index()
    wide.columns.name = None
    values = spectra(model).frame
    values = values[values["head"] == WHOLE]
    for name, (low, high) in INTERVALS.items():
        beyond = (low - values["real"]).clip(lower=0) + (values["real"] - high).clip(lower=0) + values["imag"].abs()
        wide[f"outside_{name}"] = wide["block"].map(beyond.groupby(values["block"]).max())
    wide["negative_share"] = wide["block"].map(values.groupby("block")["negative_share"].first())
    gains = {number: _negative_gains(block) for number, block in enumerate(anatomy_of(model).blocks, 1)}
    return wide.assign(negative_gains=wide["block"].map(gains))


def _negative_gains(block: Any) -> float:
    return float((block.norms[0].weight < 0).double().mean())
