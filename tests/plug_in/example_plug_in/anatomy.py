"""A family: where the stations of its blocks are."""

from typing import Any

from depthscope.anatomy import BlockAnatomy, Family, Spot


def describe(name: str, block: Any) -> BlockAnatomy:
    return BlockAnatomy(
        name,
        block,
        spots={
            "input": Spot(block, "in"),
            "after_attention": Spot(block.second, "in"),
            "ffn_input": Spot(block.second, "out"),
            "ffn_branch": Spot(block.ffn, "out"),
            "output": Spot(block, "out"),
        },
        placement="pre",
        norms=(block.first, block.second),
        ffn=(block.ffn,),
    )


SOFT = Family("soft", "example_plug_in", ("SoftBlock",), describe, causal=lambda _model: False)
