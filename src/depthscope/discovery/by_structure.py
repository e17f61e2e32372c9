"""The stations inside the blocks of a model of no known family: guessed from the names of their parts, then tried.

A guess (`anatomy.layout`) is believed in a block only if in a pass of the user's own inputs every residual addition
that it implies holds: trunk + branch = result, to rounding. Blocks where none holds keep what is certain, their input
and output, and the notes say so.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from depthscope.anatomy import Anatomy, BlockAnatomy
from depthscope.anatomy.layout import guesses
from depthscope.hooks.machine import Listen, Machine, Visit
from depthscope.inputs.batches import Batch, call
from depthscope.stations import IN_WORDS

ROUNDING = 4  # machine epsilons of the largest term: each sum is rounded once or twice
VISIBLE = 100  # times what rounding may change: a branch that is smaller would be missed by no sum


def seen_by_structure(model: nn.Module, anatomy: Anatomy, batch: Batch) -> Anatomy:
    """The anatomy with the stations that the structure of its blocks shows, where they have been tried.

    One more pass of the model per guess, at most three for most structures, and none where no block has a known one.
    """
    if anatomy.family != "unknown":
        return anatomy
    open_guesses = {id(block): list(guesses(block)) for block in anatomy.blocks}
    if not any(open_guesses.values()):
        return anatomy
    settled: dict[int, BlockAnatomy] = {}
    for number in range(max(map(len, open_guesses.values()))):
        trial = {
            key: found[number] for key, found in open_guesses.items() if number < len(found) and key not in settled
        }
        blocks = tuple(settled.get(id(block), trial.get(id(block), block)) for block in anatomy.blocks)
        holding = _holding(model, replace(anatomy, blocks=blocks), batch) if trial else set()
        settled |= {key: block for key, block in trial.items() if id(block) in holding}
    notes = list(anatomy.notes)
    kinds = sorted({IN_WORDS[block.placement] for block in settled.values() if block.placement})
    if kinds:
        where = "" if len(settled) == len(anatomy.blocks) else " in some blocks"
        shown = f"stations inside the blocks by their structure{where} ({'; '.join(kinds)})"
        notes.append(f"{shown}, where every addition was seen to hold")
    failed = [block.name for block in anatomy.blocks if open_guesses[id(block)] and id(block) not in settled]
    if failed:
        which = repr(failed[0]) + (f" and {len(failed) - 1} more" if len(failed) > 1 else "")
        notes.append(
            f"{which} looks like a known structure, but its additions do not hold: only input and output are seen"
        )
    blocks = tuple(settled.get(id(block), block) for block in anatomy.blocks)
    return replace(anatomy, blocks=blocks, notes=tuple(notes))


def _holding(model: nn.Module, anatomy: Anatomy, batch: Batch) -> set[int]:
    """The blocks, by id, of which every addition holds in every application."""
    kept: dict[str, Tensor] = {}
    verdicts: dict[int, list[bool]] = {}

    def keep(_visit: Visit, station: str, tokens: Tensor, _source: Tensor) -> None:
        kept[station] = tokens.clone()

    def judge(visit: Visit) -> None:
        if visit.block.additions:
            verdicts.setdefault(id(visit.block), []).append(_adds_up(visit.block, kept))
        kept.clear()

    stations = {station for block in anatomy.blocks for station in block.spots}
    try:
        with Machine(model, anatomy, Listen(stations, keep), on_block_end=judge):
            call(model, batch)
    except ValueError:  # what passes at a station is no token matrix
        return set()
    return {key for key, held in verdicts.items() if all(held)}


def _adds_up(block: BlockAnatomy, at: dict[str, Tensor]) -> bool:
    """Whether all stations were seen, of one shape, and all additions hold, none of them for want of a branch."""
    if set(block.spots) - at.keys() or len({tokens.shape for tokens in at.values()}) != 1:
        return False
    for addition in block.additions:
        *summands, result = (at[station] for station in addition.stations)
        sizes = [float(term.abs().max()) for term in (*summands, result)]
        allowed = ROUNDING * torch.finfo(result.dtype).eps * max(sizes)
        apart = torch.stack([term.double() for term in summands]).sum(dim=0) - result.double()
        if min(sizes[1:-1]) <= VISIBLE * allowed or not float(apart.abs().max()) <= allowed:
            return False
    return True
