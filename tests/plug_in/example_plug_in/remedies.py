"""A remedy: tokens times a factor at the end of a block."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from depthscope.anatomy import BlockAnatomy
from depthscope.hooks.staying import TokenHook
from depthscope.remedies import Remedy, Site


@dataclass(frozen=True)
class Shrink(Remedy):
    """Multiplies what leaves a block by `factor`."""

    factor: float = 0.5
    name: ClassVar[str] = "shrink"

    def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
        return ("output",)

    def install(self, site: Site) -> None:
        site.put(self, Times(self.factor), "output")


class Times(TokenHook):
    """The hook of one block."""

    def __init__(self, factor: float):
        self.factor = factor

    def change(self, tokens: Tensor) -> Tensor:
        return self.factor * tokens
