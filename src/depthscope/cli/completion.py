"""Names that are known without importing anything heavy: what the shell completes, and which MODEL is a typo.

Those of other packages are not completed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from depthscope.naming import unknown_name

FORMS = "a family's name (bert, gpt2, vit, …), hf:NAME_OR_FOLDER, or module:factory"

# As in models/families.py, which imports torch; a test compares them.
FAMILIES = [
    *("bert", "roberta", "albert", "distilbert", "mpnet", "electra", "modernbert", "deberta", "xlnet"),
    *("gpt2", "opt", "llama", "qwen2", "mistral", "gemma", "qwen3", "gemma2", "gemma3"),
    *("olmo2", "phi3", "cohere", "gpt-neox", "falcon", "bloom", "t5", "bart", "pegasus"),
    *("vit", "deit", "dinov2", "encoder"),
]


def beginning(names: list[str], incomplete: str) -> list[str]:
    """Those that begin with what was typed."""
    return [name for name in names if name.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Families; the other two forms of MODEL begin as their owners please."""
    return beginning(FAMILIES, incomplete)


def refuse_a_typo(model: str) -> None:
    """Refuses a MODEL that cannot exist, before torch is imported; of what may exist `load_model` knows more."""
    module, colon, place = model.partition(":")
    if module == "states" and colon:
        return  # `probe` alone takes these
    if module == "hf" and colon:
        if is_a_place(place) and not Path(place).exists() and (meant := near_folder(place)):
            raise ValueError(f"there is no {place!r}: {meant.strip()}")
    elif colon:
        package = module.partition(".")[0]
        try:
            is_nowhere = not package or (find_spec(package) or PathFinder.find_spec(package, [os.getcwd()])) is None
        except ValueError:  # a module that was made by hand
            is_nowhere = False
        if is_nowhere:
            raise ValueError(f"no module {module!r} from here: expected {FORMS}, got {model!r}")
    elif model not in FAMILIES and not (
        "depthscope.models.families" in sys.modules or entry_points(group="depthscope.models")  # may have added it
    ):
        raise unknown_model(model, FAMILIES)


def is_a_place(name: str) -> bool:
    """Whether what follows hf: can only be a file or a folder, and no name on the hub."""
    return not name or name.startswith((".", "/", "~")) or name.count("/") > 1


def near_folder(name: str) -> str:
    """ "did you mean 'hf:models/smol'? ", if that is there and is called nearly as what is not."""
    place = Path(name)
    if place.parent == Path() or not place.parent.is_dir():
        return ""
    near = get_close_matches(place.name, [other.name for other in place.parent.iterdir()], n=1, cutoff=0.8)
    return f"did you mean 'hf:{place.parent / near[0]}'? " if near else ""


def unknown_model(name: str, families: Iterable[str]) -> ValueError:
    if name and Path(name).is_dir():
        return ValueError(f"unknown model {name!r}: it is a folder, say hf:{name}")
    if "/" in name:
        return ValueError(f"unknown model {name!r}: of a folder or of a name on the hub, say hf:{name}")
    return unknown_name("model", name, families, f"{FORMS}; families:")
