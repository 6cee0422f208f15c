"""Spread units evenly over a given number of packs, under several limits.

Packs that are filled one after the other reach one limit while there is room under another. With
at most seven segments per pack, for example, the last packs hold seven short segments and few
tokens. Spread over all packs, every limit is used evenly.
"""

from __future__ import annotations

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray, Ragged
from evenstep.planning.heap import rise, sink
from evenstep.planning.kernel import kernel
from evenstep.planning.units import Units

_CHOICE = 4  # packs with room that a unit chooses from
_LOOK = 64  # packs tried to find them, from the emptiest on


def spread_units(units: Units, capacity: int, packs: int) -> Ragged | None:
    """The units of each of `packs` packs, within all limits; None if a unit fits nowhere.

    Units are taken by the sum of their shares of all limits, largest first. Units that exceed a
    limit by themselves come before all others.
    """
    shares = np.column_stack((units.size / capacity, units.extra / np.maximum(units.caps, 1e-9)))
    alone = (units.size > capacity) | (units.extra > units.caps).any(axis=1)
    order = np.lexsort((-shares.sum(axis=1), ~alone))
    pack_of = spread_kernel(units.size, units.extra, order, capacity, units.caps, packs)
    return Ragged.group(pack_of, packs) if len(pack_of) == len(units) else None


@kernel
def spread_kernel(
    sizes: IntArray, extra: FloatArray, order: IntArray, capacity: int, caps: FloatArray, packs: int
) -> IntArray:
    """The pack of each unit, taken in `order`; empty if a unit fits nowhere.

    A unit goes to one of the emptiest packs with room: the one that it leaves emptiest. A pack is
    as full as its largest share of any limit. A unit that exceeds a limit by itself takes an empty
    pack.
    """
    n = sizes.shape[0]
    pack_of = np.empty(n, np.int64)
    size = np.zeros(packs, np.int64)
    held = np.zeros((packs, caps.shape[0]))
    full = np.zeros(packs)
    heap = np.arange(packs)  # the emptiest at the root
    count = packs
    seen = np.empty(_LOOK, np.int64)
    for unit in order:
        looked, found = 0, 0
        chosen, least = -1, np.inf
        while count > 0 and looked < _LOOK and found < _CHOICE:
            pack = heap[0]
            fit = size[pack] + sizes[unit] <= capacity
            share = (size[pack] + sizes[unit]) / capacity
            for d in range(caps.shape[0]):
                taken = held[pack, d] + extra[unit, d]
                fit = fit and taken <= caps[d]
                if taken > 0:
                    share = max(share, taken / max(caps[d], 1e-9))
            if fit or full[pack] == 0:
                found += 1
                if share < least:
                    chosen, least = pack, share
            seen[looked] = pack
            looked += 1
            count -= 1
            heap[0] = heap[count]
            sink(heap, count, full, 0, True)
        if chosen < 0:
            return np.empty(0, np.int64)
        pack_of[unit] = chosen
        size[chosen] += sizes[unit]
        held[chosen] += extra[unit]
        full[chosen] = least
        for k in range(looked):
            heap[count] = seen[k]
            count += 1
            rise(heap, count, full, True)
    return pack_of
