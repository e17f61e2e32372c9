"""What a training run is: frozen values, changed by name, compared by field. Imports nothing heavy.

Everything that changes the numbers of a run stands here, so that two equal configurations give the same
run, and a run is continued only with the configuration it was begun with. Where it runs and what it writes
does not (`run.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, Self, get_origin, get_type_hints

from depthscope.naming import unknown_name
from depthscope_lab.training.notation import Named
from depthscope_lab.training.settings import check_type, written

Schedule = Literal["drops", "cosine", "constant"]
Precision = Literal["float32", "float64", "bfloat16", "float16"]
HeldOut = Literal["test", "validation"]

_GREATEST_SIZE = 2**63 - 1  # what torch counts with
_GREATEST_FLOAT32 = 3.4028234e38
_POSITIVE = (
    *("depth", "width", "ffn_width", "heads", "batch_size", "epochs", "steps", "lr", "accumulate", "clip_norm"),
    *("patch_size", "segment", "init_std", "eval_rows", "eval_segment", "eval_memory", "eval_segments"),
    *("context", "eval_windows"),
)
_GONE = {"at_once": False}  # settings of earlier versions, as every run now has them
_NOT_NEGATIVE = ("warmup_steps", "weight_decay", "drop_factor", "seed", "memory", "eval_clamp", "hidden_segments")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What every task has. The text beside a field is its help on the command line.

    `variant` is the name; what it stands for (`variants.py`) is in the fields below it, so that a configuration says by
    itself what was trained. A recipe fills them in; "": not filled in yet.
    """

    recipe: str = ""
    variant: str = ""
    wiring: str = ""
    remedies: tuple[Named, ...] = ()
    initialiser: str | None = None  # None: the model's own
    final_norm: Annotated[bool | None, "A norm after the last block; by default as the wiring asks for."] = None
    depth: Annotated[int, "Number of blocks."]
    width: Annotated[int, "Width of a token."]
    ffn_width: Annotated[int, "Hidden width of the FFN."]
    heads: Annotated[int, "Attention heads per block."]
    batch_size: Annotated[int, "Samples per step, over all processes and accumulated parts."]
    lr: Annotated[float, "Learning rate; every variant has its own default."]
    epochs: Annotated[int, "Passes over the training data."]
    steps: Annotated[int | None, "Steps in all, instead of epochs."] = None
    schedule: Annotated[Schedule, "How the learning rate falls."] = "drops"
    drop_at: Annotated[tuple[float, ...], "Schedule drops: at which shares of the run."] = (0.7, 0.9)
    drop_factor: Annotated[float, "Schedule drops: by which factor."] = 0.2
    warmup_steps: Annotated[int, "Steps over which the learning rate first rises."] = 0
    beta1: Annotated[float, "AdamW: memory of the mean gradient."] = 0.9
    beta2: Annotated[float, "AdamW: memory of its square."] = 0.999
    weight_decay: Annotated[float, "AdamW: weight decay."] = 0.0
    clip_norm: Annotated[float | None, "Largest norm of the gradient; not clipped if not given."] = None
    seed: Annotated[int, "Seed of weights, order and augmentation."] = 0
    precision: Annotated[Precision, "bfloat16 and float16 are mixed with float32."] = "float32"
    accumulate: Annotated[int, "Parts in which each process computes its share of a batch."] = 1
    evaluate_on: Annotated[
        HeldOut, "What is looked at: test data, or validation data (a fifth of the training images, not trained on)."
    ] = "test"
    checkpoint_activations: Annotated[bool, "Keep only what enters a block, compute the rest again."] = False
    compile: Annotated[bool, "Compile the model with torch.compile."] = False

    def __post_init__(self) -> None:
        for name, kind in field_types(type(self)).items():
            check_type(name, getattr(self, name), kind)
            _check_finite(name, getattr(self, name))
        for name in _POSITIVE:
            if (value := getattr(self, name, None)) is not None and not value > 0:
                raise ValueError(f"expected {name} greater than 0, got {value}")
        for name in _NOT_NEGATIVE:
            if not (value := getattr(self, name, 0)) >= 0:
                raise ValueError(f"expected {name} of at least 0, got {value}")
        for name in ("beta1", "beta2", "dropout"):
            if not 0 <= (value := getattr(self, name, 0)) < 1:
                raise ValueError(f"expected {name} from 0 up to, not including, 1, got {value}")
        # AdamW divides the rate by 1 − beta1 at first, and multiplies it by the decay.
        if self.lr > (most := _GREATEST_FLOAT32 / max(1 / (1 - self.beta1), self.weight_decay)):
            raise ValueError(f"expected lr of at most {most:.3g}, as float32 holds no longer steps, got {self.lr}")
        if not all(0 <= share <= 1 for share in self.drop_at):
            raise ValueError(f"expected drop_at to be shares of the run from 0 to 1, got {written(self.drop_at)}")

    def changed(self, **changes: Any) -> Self:
        """A copy with other values; an unknown name is refused, with the nearest one."""
        known = list(field_help(type(self)))
        for name in changes:
            if name not in known:
                raise unknown_name("setting", name, known, "some of", owner=self.recipe)
        return replace(self, **changes)

    def as_json(self) -> dict[str, Any]:
        """Plain values; tuples become lists, as JSON has them, and remedies the records of `depthscope.remedies`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["remedies"] = [remedy.record("remedy") for remedy in self.remedies]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class ImageConfig(TrainingConfig):
    """A Vision Transformer that classifies images."""

    dataset: Literal["cifar10", "digits"]
    patch_size: Annotated[int, "Side of a patch in pixels."]
    augment: Annotated[bool, "Change every training image by the AutoAugment policy for CIFAR-10."] = False


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(TrainingConfig):
    """A Transformer-XL that reads a text in rows, segment by segment, and remembers."""

    dataset: Literal["wikitext103", "manual"]
    evaluate_on: Annotated[HeldOut, "Which text is looked at: validation or test."] = "validation"
    segment: Annotated[int, "Tokens per row and step."]
    memory: Annotated[int, "Tokens that are remembered from before a segment."]
    dropout: Annotated[float, "Dropout."] = 0.0
    init_std: Annotated[float, "Standard deviation of the weights at the start."] = 0.02
    eval_rows: Annotated[int, "Evaluation: rows."] = 10
    eval_segment: Annotated[int, "Evaluation: tokens per row and pass."] = 64
    eval_memory: Annotated[int, "Evaluation: how many tokens each token sees."] = 640
    eval_clamp: Annotated[int, "Evaluation: greater distances count as this one."] = 400
    eval_segments: Annotated[int | None, "Evaluation: how many segments of each row; by default all."] = None
    hidden_segments: Annotated[int, "Models that see the future: segments that are also read without it."] = 4


@dataclass(frozen=True, kw_only=True)
class CharacterConfig(TrainingConfig):
    """A plain causal Transformer that reads windows of letters."""

    evaluate_on: Annotated[HeldOut, "Which part of the text is looked at: validation or test."] = "validation"
    context: Annotated[int, "Letters in a window."]
    eval_windows: Annotated[int | None, "Evaluation: how many windows; by default all."] = None


def _check_finite(name: str, value: Any) -> None:
    for one in value if isinstance(value, tuple) else (value,):
        if isinstance(one, float) and not math.isfinite(one):
            raise ValueError(f"expected {name} to be finite, got {one}")
        if isinstance(one, int) and abs(one) > _GREATEST_SIZE:
            raise ValueError(f"expected {name} of at most {_GREATEST_SIZE} (2^63 − 1), got {one}")


def field_types(config: type) -> dict[str, Any]:
    """Field → type without its help."""
    return get_type_hints(config)


def changeable(config: type) -> dict[str, Any]:
    """The same of the fields that a user may change."""
    return {name: kind for name, kind in field_types(config).items() if name in field_help(config)}


def field_help(config: type) -> dict[str, str]:
    """Field → help, for the fields that have one: those a user may change."""
    hints = get_type_hints(config, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}


def as_now(before: Mapping[str, Any], config: TrainingConfig) -> dict[str, Any]:
    """What an earlier version recorded, as this one would: a setting that came since has its default, and one that went
    is left out where all runs now have its value.
    """
    since = {f.name: f.default for f in fields(config) if isinstance(f.default, str | int | float | bool)}
    return since | {name: value for name, value in before.items() if _GONE.get(name, ...) != value}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`name: before → now` for every field in which two configurations, as JSON, differ."""
    names = list(dict.fromkeys([*before, *now]))
    return [f"{name}: {before.get(name)} → {now.get(name)}" for name in names if before.get(name) != now.get(name)]
