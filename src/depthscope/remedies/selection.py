"""Which blocks a remedy is put into."""

from __future__ import annotations

from collections.abc import Iterable

from depthscope.anatomy import Anatomy, BlockAnatomy


def check_selection(blocks: Iterable[int] | None, every: int) -> tuple[int, ...] | None:
    """The numbers of blocks as a tuple, counted from 1."""
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"expected every to be a whole number of at least 1, got {every}")
    if blocks is None:
        return None
    chosen = tuple(blocks)
    if every != 1:
        raise ValueError("expected blocks or every, got both")
    if not chosen or any(not isinstance(number, int) or number < 1 for number in chosen):
        raise ValueError(f"expected blocks to hold numbers from 1, got {chosen}")
    return chosen


def chosen_blocks(
    anatomy: Anatomy, depth: int, blocks: tuple[int, ...] | None, every: int
) -> list[tuple[int, BlockAnatomy]]:
    """The blocks with their numbers. Blocks that share weights are one module, and cannot be chosen one by one."""
    if (blocks is not None or every != 1) and depth > len(anatomy.blocks):
        raise ValueError("the blocks of this model share their weights: a remedy goes into all of them or none")
    if every > len(anatomy.blocks):
        raise ValueError(f"expected every of at most {len(anatomy.blocks)}, the model's depth, got {every}")
    if blocks is not None and max(blocks) > len(anatomy.blocks):
        raise ValueError(f"expected blocks from 1 to {len(anatomy.blocks)}, the model's depth, got {max(blocks)}")
    return [
        (number, block)
        for number, block in enumerate(anatomy.blocks, start=1)
        if (number % every == 0 if blocks is None else number in blocks)
    ]
