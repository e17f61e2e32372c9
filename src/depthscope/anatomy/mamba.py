"""Hugging Face Mamba, Mamba 2 and Falcon Mamba: one mixer per block, causal by its recurrence, and no attention."""

from __future__ import annotations

from typing import Any

from depthscope.anatomy.structure import BlockAnatomy, Family, Spot, always


def describe(name: str, block: Any) -> BlockAnatomy:
    return BlockAnatomy(
        name,
        block,
        spots={
            "input": Spot(block, "in"),
            "attention_input": Spot(block.norm, "out"),
            "attention_branch": Spot(block.mixer, "out"),
            "output": Spot(block, "out"),
        },
        placement="mixer",
        norms=(block.norm,),
    )


MAMBA = Family(
    "mamba",
    "transformers",
    ("MambaBlock", "Mamba2Block", "FalconMambaBlock"),
    describe,
    always(True),
    notes=("no attention: each block has a mixer in its place, whose branch is at attention_branch",),
)
