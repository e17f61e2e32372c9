"""Variants by name: how the blocks are wired, which remedies are put in, how the weights are drawn. One table.

The same for images and language. A variant can also be composed where its name is asked for:

    post+residual-weight(alpha=0.3)        a variant, with a remedy more
    deescalated(tau=0.5)                   its remedy with other options
    post+de-escalation(tau=0.5)@xavier     another initialiser than the recipe's

Imports nothing heavy: remedies, wirings and initialisers are named here, and made in `building.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from depthscope.registry import Registry
from depthscope_lab.training.notation import Named, parse, split

FORM = "NAME[(option=value, …)][+REMEDY[(option=value, …)]]…[@INITIALISER]"
DEESCALATION = "de-escalation"


@dataclass(frozen=True)
class Variant:
    """What is compared with what. `None`: as the recipe has it."""

    name: str
    title: str
    wiring: str  # of `depthscope.models.WIRINGS`
    remedies: tuple[Named, ...] = ()  # by the names that `depthscope.remedies` has for them
    initialiser: str | None = None
    final_norm: bool | None = None
    based_on: str = ""  # the variant of the table that a composed one was made from
    label: str = ""  # what it is called where there is little room, as in a legend; "": as its title

    def completed(self, places: Mapping[str, Mapping[str, Any]]) -> tuple[Named, ...]:
        """Its remedies, with what `places` (remedy → options) says where the variant leaves it open."""
        return tuple(remedy.completed(places.get(remedy.name, {})) for remedy in self.remedies)


VARIANTS: Registry[Variant] = Registry(
    "variant",
    "depthscope.variants",
    [
        Variant("post", "post-norm", "post"),
        Variant("pre", "pre-norm", "pre"),
        Variant(
            "pre-final-norm",
            "pre-norm, a final norm also where the recipe has none",
            "pre",
            final_norm=True,
            label="pre-norm, final norm",
        ),
        Variant(
            "deescalated",
            "post-norm, de-escalated",
            "post",
            (Named.of(DEESCALATION, tau=1.0),),
            label="de-escalated",
        ),
        Variant(
            "deescalated-leaking",
            "post-norm, de-escalated by the paper's mean, which sees the future",
            "post",
            (Named.of(DEESCALATION, tau=1.0, mixing="full", allow_leak=True),),
            label="de-escalated, sees the future",
        ),
        # The wirings of other papers, each by the name that it has in `depthscope.models.WIRINGS`.
        *(
            Variant(wiring, title, wiring)
            for wiring, title in {
                "sandwich": "norms before and behind each branch",
                "peri": "Peri-LN",
                "res-post": "norms behind the branches",
                "rezero": "ReZero",
                "layer-scale": "LayerScale",
                "sqrt-depth": "post-norm, branches over √L",
                "ln-scaling": "LayerNorm scaling",
                "deep-norm": "DeepNorm",
                "admin": "Admin",
                "keel": "KEEL",
                "b2t": "B2T",
                "resi-dual": "ResiDual",
                "mix-ln": "Mix-LN",
                "hybrid-norm": "HybridNorm",
            }.items()
        ),
        # The remedies of other papers in a post-norm model, each by the name that it has in `depthscope.remedies`.
        Variant("residual-weight", "post-norm, branches times 0.1", "post", (Named.of("residual-weight", alpha=0.1),)),
        *(
            Variant(remedy, f"post-norm, {title}", "post", (Named.of(remedy),), label=title)
            for remedy, title in {
                "mv-split": "MV-Split",
                "contra-norm": "ContraNorm",
                "pair-norm": "PairNorm",
            }.items()
        ),
    ],
)


YU_ZHANG = ("post", "pre", "deescalated")  # those that their 2024 paper compares


def variant_of(variant: str | Variant) -> Variant:
    """The variant that is named or composed; a mistake is a ValueError of one line."""
    if isinstance(variant, Variant):
        return variant
    composed, at, initialiser = (part.strip() for part in variant.partition("@"))
    head, *added = split(composed, "+")
    if not head or not all(added) or bool(at) != bool(initialiser):
        raise ValueError(f"expected a variant as {FORM}, got {variant!r}")
    base, more = parse(head), [parse(remedy) for remedy in added]
    found = VARIANTS[base.name]
    if not (base.options or more or initialiser):
        return found
    own = (_only_remedy(found).changed(**dict(base.options)),) if base.options else found.remedies
    return replace(
        found,
        name="+".join(map(str, [base, *more])) + at + initialiser,
        remedies=(*own, *more),
        initialiser=initialiser or found.initialiser,
        based_on=base.name,
    )


def label_of(variant: str) -> str:
    """What a variant is called in a legend, as its record says; its name if it is composed, or not known any more."""
    if variant not in VARIANTS:
        return variant
    return VARIANTS[variant].label or VARIANTS[variant].title


def learning_rate_for(variant: Variant, rates: Mapping[str, float]) -> float:
    """The rate of the variant or of the one that it is based on, else of its wiring, else the least.

    A variant that is composed with a further remedy has its wiring's rate: what the remedy permits is not known.
    """
    base = VARIANTS[variant.based_on] if variant.based_on else variant
    same_remedies = [remedy.name for remedy in base.remedies] == [remedy.name for remedy in variant.remedies]
    names = [variant.name, *([base.name] if same_remedies else []), variant.wiring]
    return next((rates[name] for name in names if name in rates), min(rates.values()))


def _only_remedy(variant: Variant) -> Named:
    if len(variant.remedies) != 1:
        raise ValueError(
            f"{variant.name!r} has {len(variant.remedies)} remedies, so that options in brackets say nothing: "
            f"give them to a remedy, as in {variant.name}+{DEESCALATION}(tau=0.5)"
        )
    return variant.remedies[0]
