"""How many heads a path may take in one block: the numbers of paths must be those of the lengths in the table."""

from __future__ import annotations

from collections.abc import Sequence

from depthscope.decomposition.path_tensor import Attended, NotFollowed


def heads_passed(seen: Sequence[Attended], tokens: int, grown: int, *, may_have_none: bool) -> int:
    """The heads of a block in which these calls of attention were passed, and paths became longer by `grown`.

    Several calls side by side are one attention whose heads are computed in turn: their numbers add up, if each mixes
    all tokens and no two have the same P. Anything else is not the block of the theorem, at which a path takes one head
    or none, and is refused: queries in pieces, the same attention twice, one attention behind another. So is a block
    that mixes tokens, if at all, in a way that is not P V with P of a softmax, unless it is known to have no attention.
    """
    if not seen:
        if may_have_none:
            return 0
        raise NotFollowed(
            "it was not seen to multiply values by what a softmax gave of its tokens: if tokens are mixed in it, it is "
            "not known how, and no lengths of paths can be told"
        )
    if grown != 1:
        raise NotFollowed(
            f"expected one self-attention, found {len(seen)} calls of it one behind another: paths through it would "
            f"be {grown} longer, not 1; name smaller blocks with blocks="
        )
    if len(seen) > 1 and not _are_heads_in_turn(seen, tokens):
        raise NotFollowed(
            f"expected one self-attention, or its heads in turn, found {len(seen)} calls of it that are not different "
            "heads for all tokens (queries in pieces, or the same attention twice): its heads cannot be counted"
        )
    return sum(each.heads for each in seen)


def _are_heads_in_turn(seen: Sequence[Attended], tokens: int) -> bool:
    alike = all(each.start == seen[0].start and each.queries == tokens for each in seen)
    if not alike or any(each.sizes.numel() % each.heads for each in seen):
        return False
    told = [set(each.sizes.reshape(-1, each.heads).sum(dim=0).tolist()) for each in seen]
    return len(set.union(*told)) == sum(map(len, told))
