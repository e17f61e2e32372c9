"""Recipes: functions that return the training configuration of a variant. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from depthscope.registry import Registry
from depthscope_lab.training.config import CharacterConfig, ImageConfig, LanguageConfig, TrainingConfig
from depthscope_lab.training.variants import DEESCALATION, VARIANTS, Variant, learning_rate_for, variant_of

if TYPE_CHECKING:
    from depthscope_lab.training.task import Task

# Where the papers' experiments put a remedy, if the variant does not say it: remedy → options.
IN_IMAGES = {DEESCALATION: {"at": "output"}}
IN_LANGUAGE = {DEESCALATION: {"at": "ffn_input", "mixing": "prefix"}}

# The authors of Transformer-XL have no final norm in either of their two wirings; others follow their wiring.
TXL_FINAL_NORM = {"post": False, "pre": False}

Config = TypeVar("Config", bound=TrainingConfig)


def configure_vit_cifar10(variant: Variant) -> ImageConfig:
    """Yu & Zhang 2024, §3.3 and Table 1: a ViT of 80 blocks on CIFAR-10, 150 epochs; needs a GPU.

    The paper names neither warm-up, dropout, gradient clipping nor random crops and flips: there are none.
    "Auto-augmentation" is AutoAugment's policy for CIFAR-10 (the paper's reference is RandAugment's).
    The FFN is Algorithm 1's (ReLU), the weights PyTorch's default. The last, incomplete batch of an
    epoch is left out.
    """
    return ImageConfig(
        initialiser="pytorch_default",
        dataset="cifar10",
        depth=80,
        width=192,
        ffn_width=384,
        heads=8,
        patch_size=4,
        batch_size=128,
        lr=learning_rate_for(variant, {"post": 0.5e-4, "pre": 1e-4, "deescalated": 1e-4}),
        epochs=150,
        weight_decay=0.1,
        augment=True,
    )


def configure_vit_digits(variant: Variant) -> ImageConfig:
    """The same experiment in minutes on two cores: scikit-learn's 8 × 8 digits, 48 blocks of width 64.

    The learning rates are starting points, not the result of a search: pre-norm's is larger than the others'.
    """
    return ImageConfig(
        initialiser="pytorch_default",
        dataset="digits",
        depth=48,
        width=64,
        ffn_width=128,
        heads=4,
        patch_size=2,
        batch_size=64,
        lr=learning_rate_for(variant, {"post": 0.5e-4, "pre": 1e-3, "deescalated": 1e-4}),
        epochs=15,
        weight_decay=0.1,
    )


def configure_txl_wikitext103(variant: Variant) -> LanguageConfig:
    """Yu & Zhang 2024, Fig. 7: a Transformer-XL of 60 blocks on WikiText-103, 200,987,338 parameters; needs GPUs.

    What the paper changes of the authors' base model: 60 blocks (16), FFN 820 (2100), batch 40 (60), no dropout
    (.1), no clipping (.25), 50 000 steps (200 000). All else is theirs: Adam, cosine to 0, no warm-up.
    """
    return LanguageConfig(
        final_norm=TXL_FINAL_NORM.get(variant.wiring),
        dataset="wikitext103",
        depth=60,
        width=410,
        ffn_width=820,
        heads=10,
        segment=150,
        memory=150,
        batch_size=40,
        lr=2.5e-4,
        epochs=1,
        steps=50_000,
        schedule="cosine",
    )


def configure_txl_manual(variant: Variant) -> LanguageConfig:
    """The same depth in minutes on two cores: Python's manual, 60 blocks of width 64.

    Weights are drawn with .02·√(410/64), so that dσ², the gain of a matrix, is that of the model of width 410: with
    .02 the branches would be six times weaker, and 60 blocks hardly a deep model. The learning rate is
    2.5e-4·410/64: an aligned update then changes what a matrix gives as much as it does there.
    """
    return LanguageConfig(
        final_norm=TXL_FINAL_NORM.get(variant.wiring),
        dataset="manual",
        depth=60,
        width=64,
        ffn_width=128,
        heads=4,
        segment=32,
        memory=32,
        batch_size=8,
        lr=1.6e-3,
        epochs=2,
        schedule="cosine",
        init_std=0.0506,
        eval_segment=32,
        eval_memory=64,
        eval_clamp=64,
    )


def configure_lm_manual(variant: Variant) -> CharacterConfig:
    """A plain causal Transformer on the letters of Python's manual, 48 blocks of width 64: for remedies in language.

    It has no memory that a remedy would have to carry, so that every causal remedy can be put in. The learning rates
    are those of `vit-digits`: starting points, not the result of a search.
    """
    return CharacterConfig(
        initialiser="pytorch_default",
        depth=48,
        width=64,
        ffn_width=128,
        heads=4,
        context=64,
        batch_size=16,
        lr=learning_rate_for(variant, {"post": 0.5e-4, "pre": 1e-3, "deescalated": 1e-4}),
        epochs=1,
        weight_decay=0.1,
        eval_windows=128,
    )


@dataclass(frozen=True)
class Recipe(Generic[Config]):
    """A recipe with its name. Another package names one in the entry-point group `depthscope.recipes`.

    `configure` gives the configuration of a variant, and names only what is the recipe's own: what the variant stands
    for is filled in, unless `configure` has named the variant itself. `config` is the class of the configuration: its
    fields with a help text are the settings that a user can change. `without` are variants that would only repeat
    another one here. `places` (remedy → options) completes remedies where the variant leaves something open. `task`
    makes the task of a configuration and of `--data` (None: not given, also where only sizes are asked for); a recipe
    on the data and models of this package needs none.
    """

    name: str
    configure: Callable[[Variant], Config]
    config: type[Config]
    title: str
    cost: str
    without: tuple[str, ...] = ()
    task: Callable[[TrainingConfig, str | None], Task] | None = None
    places: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __call__(self, variant: str | Variant) -> Config:
        """The configuration of a variant; one that the recipe does not have is refused."""
        chosen = variant_of(variant)
        if (chosen.based_on or chosen.name) in self.without:
            raise ValueError(f"{self.name} has no variant {chosen.name!r}: expected one of {', '.join(self.variants)}")
        found = self.configure(chosen)
        return found if found.variant else fill(found, self.name, chosen, self.places)

    @property
    def variants(self) -> list[str]:
        """The variants that it has, by name."""
        return [name for name in VARIANTS if name not in self.without]


def fill(
    config: Config, recipe: str, variant: Variant, places: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
) -> Config:
    """The configuration with what the variant stands for; initialiser and final norm only where the variant has one."""
    return replace(
        config,
        recipe=recipe,
        variant=variant.name,
        wiring=variant.wiring,
        remedies=variant.completed(places),
        initialiser=variant.initialiser or config.initialiser,
        final_norm=config.final_norm if variant.final_norm is None else variant.final_norm,
    )


# In these models pre-norm has its final norm, and nothing comes later than a token, or is not shown to it.
_NO_FUTURE = ("pre-final-norm", "deescalated-leaking")

vit_digits = Recipe(
    "vit-digits",
    configure_vit_digits,
    ImageConfig,
    "ViT, 48 blocks, on scikit-learn's digits",
    "minutes on 2 cores",
    _NO_FUTURE,
    places=IN_IMAGES,
)
vit_cifar10 = Recipe(
    "vit-cifar10",
    configure_vit_cifar10,
    ImageConfig,
    "ViT, 80 blocks, on CIFAR-10 (Yu & Zhang 2024, Fig. 6)",
    "a GPU",
    _NO_FUTURE,
    places=IN_IMAGES,
)
lm_manual = Recipe(
    "lm-manual",
    configure_lm_manual,
    CharacterConfig,
    "causal Transformer, 48 blocks, on the letters of Python's manual",
    "minutes on 2 cores",
    _NO_FUTURE,
    places=IN_LANGUAGE,
)
txl_manual = Recipe(
    "txl-manual",
    configure_txl_manual,
    LanguageConfig,
    "Transformer-XL, 60 blocks, on Python's manual",
    "minutes on 2 cores",
    places=IN_LANGUAGE,
)
txl_wikitext103 = Recipe(
    "txl-wikitext103",
    configure_txl_wikitext103,
    LanguageConfig,
    "Transformer-XL, 60 blocks, on WikiText-103 (Yu & Zhang 2024, Fig. 7)",
    "GPUs",
    places=IN_LANGUAGE,
)

RECIPES: Registry[Recipe[Any]] = Registry(
    "recipe", "depthscope.recipes", [vit_digits, vit_cifar10, lm_manual, txl_manual, txl_wikitext103]
)
