"""Moves that lower the slowest rank: cuts shift, blocks change ranks, join or are divided."""

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.batching.blocks import SortedUnits, block_cost, block_costs
from evenstep.planning.kernels import kernel

_FARTHEST = 64  # blocks between the two that exchange a unit
_LESS = 1 - 1e-9
_NARROWER, _WIDER, _SWAP, _MOVE, _MERGE, _SPLIT = -1, 1, 0, 2, 3, 4


@kernel
def chain(
    units: SortedUnits,
    ends: IntArray,
    costs: FloatArray,
    rank_of: IntArray,
    load: FloatArray,
    change: FloatArray,
    block: int,
    step: int,
    limit: float,
) -> tuple[float, int]:
    """(slowest rank it touches, the other block) of the best chain of shifted cuts.

    `block` gives a unit to a block on its narrow (step -1) or wide side (step 1). All cuts between
    the two shift by one unit, so that the blocks between keep their number of units. Only chains
    that end below `limit` are found; the block is -1 if there is none.
    """
    count = ends.shape[0]
    heavy = rank_of[block]
    start = ends[block - 1] if block > 0 else 0
    end = ends[block]
    best, found = limit, -1
    if end - start < 2:
        return best, found
    if step < 0:
        given = block_cost(units, start + 1, end)
    else:
        given = block_cost(units, start, end - 1)
    change[heavy] += given - costs[block]
    peak = 0.0
    other = block + step
    last = block
    while 0 <= other < count and abs(other - block) <= _FARTHEST:
        last = other
        r = rank_of[other]
        start = ends[other - 1] if other > 0 else 0
        end = ends[other]
        # The other block takes the unit and gives none on.
        first, final = (start, end + 1) if step < 0 else (start - 1, end)
        if units.starts[final] <= first:
            taken = block_cost(units, first, final) - costs[other]
            reached = max(peak, load[r] + change[r] + taken, load[heavy] + change[heavy])
            if r == heavy:
                reached = max(peak, load[r] + change[r] + taken)
            if reached < best:
                best, found = reached, other
        # It takes one and gives one on.
        first, final = (start + 1, end + 1) if step < 0 else (start - 1, end - 1)
        if units.starts[final] > first:
            break
        change[r] += block_cost(units, first, final) - costs[other]
        peak = max(peak, load[r] + change[r])
        if peak >= best:
            break
        other += step
    change[heavy] = 0.0
    for other in range(min(block, last), max(block, last) + 1):
        change[rank_of[other]] = 0.0
    return best, found


@kernel
def best_merge(
    units: SortedUnits,
    ends: IntArray,
    costs: FloatArray,
    rank_of: IntArray,
    load: FloatArray,
    block: int,
    limit: float,
) -> tuple[float, int]:
    """(slower of the two ranks, the neighbour) if `block` joins a neighbour on another rank."""
    heavy = rank_of[block]
    best, found = limit, -1
    for other in (block - 1, block + 1):
        if not 0 <= other < ends.shape[0] or rank_of[other] == heavy:
            continue
        low, high = min(block, other), max(block, other)
        start = ends[low - 1] if low > 0 else 0
        if units.starts[ends[high]] > start:
            continue
        joined = block_cost(units, start, ends[high]) - units.empty
        r = rank_of[other]
        reached = max(load[heavy] - costs[block], load[r] - costs[other] + joined)
        if reached < best:
            best, found = reached, other
    return best, found


@kernel
def best_split(
    units: SortedUnits,
    ends: IntArray,
    load: FloatArray,
    heavy: int,
    spare: int,
    block: int,
    limit: float,
) -> tuple[float, int, bool]:
    """(slower rank, where `block` is cut, whether its narrow part leaves) of the best split.

    The part that leaves goes to the rank `spare`, which may be the same one.
    """
    start = ends[block - 1] if block > 0 else 0
    end = ends[block]
    best, found, narrow = limit, -1, True
    whole = block_cost(units, start, end)
    for cut in range(start + 1, end, max(1, (end - start) // _FARTHEST)):
        below, above = block_cost(units, start, cut), block_cost(units, cut, end)
        if spare == heavy:
            reached = load[heavy] - whole + below + above - units.empty
            if reached < best:
                best, found = reached, cut
            continue
        for leaving, staying in ((below, above), (above, below)):
            reached = max(load[heavy] - whole + staying, load[spare] + leaving - units.empty)
            if reached < best:
                best, found, narrow = reached, cut, leaving == below
    return best, found, narrow


@kernel
def slowest_lowered(
    units: SortedUnits, ends: IntArray, rank_of: IntArray, ranks: int, waves: int, work: int
) -> tuple[IntArray, IntArray, float]:
    """(ends, rank of each block, time it reaches) after moves that lower the slowest rank.

    A rank runs at most `waves` blocks; the time counts empty ones as 0. Stops after about `work`
    blocks are looked at.
    """
    ends, rank_of = ends.copy(), rank_of.copy()
    load = np.zeros(ranks)
    held = np.zeros(ranks, np.int64)
    change = np.zeros(ranks)
    while True:
        count = ends.shape[0]
        costs = block_costs(units, ends) - units.empty
        load[:] = 0.0
        held[:] = 0
        for b in range(count):
            load[rank_of[b]] += costs[b]
            held[rank_of[b]] += 1
        heavy, spare = 0, -1
        for r in range(ranks):
            heavy = r if load[r] > load[heavy] else heavy
            if held[r] < waves and (spare < 0 or load[r] < load[spare]):
                spare = r
        if work <= 0:
            break
        best = load[heavy] * _LESS
        block, other, kind, narrow = -1, -1, _SWAP, True
        for b in range(count):
            if rank_of[b] != heavy or work <= 0:
                continue
            for step in (_NARROWER, _WIDER):
                reached, c = chain(units, ends, costs, rank_of, load, change, b, step, best)
                if c >= 0:
                    best, block, other, kind = reached, b, c, step
            for c in range(count):
                r = rank_of[c]
                reached = max(load[heavy] - costs[b] + costs[c], load[r] + costs[b] - costs[c])
                if r != heavy and reached < best:
                    best, block, other, kind = reached, b, c, _SWAP
            reached, c = best_merge(units, ends, costs, rank_of, load, b, best)
            if c >= 0:
                best, block, other, kind = reached, b, c, _MERGE
            if spare >= 0:
                reached = max(load[heavy] - costs[b], load[spare] + costs[b])
                if spare != heavy and reached < best:
                    best, block, kind = reached, b, _MOVE
                reached, c, lower = best_split(units, ends, load, heavy, spare, b, best)
                if c >= 0:
                    best, block, other, kind, narrow = reached, b, c, _SPLIT, lower
            work -= 3 * _FARTHEST + count
        work -= count + ranks
        if block < 0:
            break
        if kind == _MOVE:
            rank_of[block] = spare
        elif kind == _SWAP:
            rank_of[block], rank_of[other] = rank_of[other], heavy
        elif kind == _MERGE:
            low = min(block, other)
            kept = rank_of[other]
            ends = np.concatenate((ends[:low], ends[low + 1 :]))
            rank_of = np.concatenate((rank_of[:low], rank_of[low + 1 :]))
            rank_of[low] = kept
        elif kind == _SPLIT:
            ends = np.concatenate((ends[:block], np.array([other]), ends[block:]))
            rank_of = np.concatenate((rank_of[:block], rank_of[block : block + 1], rank_of[block:]))
            rank_of[block if narrow else block + 1] = spare
        else:
            for b in range(min(block, other), max(block, other)):
                ends[b] -= kind
    return ends, rank_of, load.max()
