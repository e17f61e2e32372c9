"""A remedy: tokens times a factor at the end of a block."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from depthscope.anatomy import BlockAnatomy
from depthscope.passes.hooks import TokenHook, hang
from depthscope.remedies import Remedy, Site


@dataclass(frozen=True)
class Shrink(Remedy):
    """Multiplies what leaves a block by `factor`."""

    factor: float = 0.5
    name: ClassVar[str] = "shrink"

    def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
        return ("output",)

    def install(self, site: Site) -> None:
        spot = site.block.spots["output"]
        hang(spot.module, Times(self, site.block.name), spot.side)


class Times(TokenHook):
    """The hook of one block."""

    side, station = "out", "output"

    def __init__(self, remedy: Shrink, block: str):
        self.remedy, self.block = remedy, block

    def change(self, tokens: Tensor) -> Tensor:
        return self.remedy.factor * tokens
