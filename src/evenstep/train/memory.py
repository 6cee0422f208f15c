"""Out of memory: ranks agree whether a micro-batch is divided, or that it cannot be."""

from __future__ import annotations

from typing import NamedTuple

import torch

from evenstep.train.collectives import Collective
from evenstep.train.step_checks import check_counts
from evenstep.train.work import Ready

_DIVISIBLE, _SEGMENT, _GROUP = 1, 2, 3  # what ran out of memory; 0 if nothing did
_INDIVISIBLE = {
    _SEGMENT: "ran out of memory with a single segment, which cannot be divided. Lower max_tokens, "
    "set overflow='split', or use context parallelism.",
    _GROUP: "ran out of memory with a single group, which groups='micro_batch' keeps together. "
    "Lower max_tokens or the samples per group, or plan with groups='step'.",
}


class TooLargeError(Exception):
    """A micro-batch ran out of memory on some rank; raised on every rank."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class OutOfMemory(NamedTuple):
    """A rank that ran out of memory, and why its micro-batch cannot be divided, if so."""

    rank: int
    why: str | None


def out_of_memory(ranks: Collective, count: int, failed: Ready | None) -> OutOfMemory | None:
    """What all ranks know after one exchange; None if no rank ran out of memory.

    `failed` is the micro-batch that this rank could not run, and `count` the number of its
    micro-batches, which must be the same on all ranks.
    """
    flags = torch.zeros(2, ranks.size)
    if failed is not None:
        whole = _SEGMENT if len(failed.sample_ids) < 2 else _GROUP
        flags[0, ranks.rank] = _DIVISIBLE if failed.parts > 1 else whole
    flags[1, ranks.rank] = count
    states, counts = ranks.all_reduce_sum(flags).tolist()
    check_counts(counts)
    alone = [rank for rank, state in enumerate(states) if state > _DIVISIBLE]
    if alone:
        rank = ranks.rank if ranks.rank in alone else alone[0]
        return OutOfMemory(rank, _INDIVISIBLE[int(states[rank])])
    return OutOfMemory(states.index(_DIVISIBLE), None) if any(states) else None
