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
    return fewest_spread(units, capacity, packs, packs)


def fewest_spread(
    units: Units, capacity: int, least: int, most: int, multiple: int = 1
) -> Ragged | None:
    """The units of each pack, in the fewest packs found; None if no number of packs works.

    The numbers tried are among `least`, `least + multiple` and so on up to `most`.
    """
    taken = np.column_stack((units.size.astype(np.float64), units.extra))
    caps = np.append(float(capacity), units.caps)
    pack_of, packs = spread_over(taken, caps, least, most, multiple)
    return Ragged.group(pack_of, packs) if packs >= 0 else None


def spread_over(
    taken: FloatArray, caps: FloatArray, least: int, most: int, multiple: int = 1
) -> tuple[IntArray, int]:
    """(the pack of each item, packs), in the fewest packs found; packs is -1 if none is.

    Item i takes `taken[i, d]` of `caps[d]`. The distance from `least` is doubled until the items
    fit, then bisected: where they fit, they nearly always fit into more packs.
    """
    shares = taken / np.maximum(caps, 1e-9)
    alone = (taken > caps).any(axis=1)
    order = np.lexsort((-shares.sum(axis=1), ~alone))
    best, packs = np.empty(0, np.int64), -1
    failed, step, last = -1, 0, (most - least) // multiple
    while step <= last:
        count = least + step * multiple
        found = spread_kernel(taken, order, caps, count)
        if len(found) == len(taken):
            best, packs, last = found, count, step - 1
        else:
            failed = step
        step = failed + max(1, (last + 1 - failed) // 2) if packs >= 0 else 2 * step + 1
        if packs < 0 and failed < last < step:
            step = last
    return best, packs


@kernel
def spread_kernel(taken: FloatArray, order: IntArray, caps: FloatArray, packs: int) -> IntArray:
    """The pack of each item, taken in `order`; empty if an item fits nowhere.

    An item goes to one of the emptiest packs with room: the one that it leaves emptiest. A pack is
    as full as its largest share of any limit. An item that exceeds a limit by itself takes an empty
    pack.
    """
    pack_of = np.empty(taken.shape[0], np.int64)
    held = np.zeros((packs, caps.shape[0]))
    full = np.zeros(packs)
    heap = np.arange(packs)  # the emptiest at the root
    count = packs
    seen = np.empty(_LOOK, np.int64)
    for item in order:
        looked, found = 0, 0
        chosen, least = -1, np.inf
        while count > 0 and looked < _LOOK and found < _CHOICE:
            pack = heap[0]
            fit, share = True, 0.0
            for d in range(caps.shape[0]):
                total = held[pack, d] + taken[item, d]
                fit = fit and total <= caps[d]
                if total > 0:
                    share = max(share, total / max(caps[d], 1e-9))
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
        pack_of[item] = chosen
        held[chosen] += taken[item]
        full[chosen] = least
        for k in range(looked):
            heap[count] = seen[k]
            count += 1
            rise(heap, count, full, True)
    return pack_of
