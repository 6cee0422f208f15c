"""Packs under several limits: slots, and whatever `limits` and `layout.samples` count.

Item i takes `taken[i, d]` of limit d, of which a pack holds `caps[d]`. Slots are limit 0.

    sizes [5, 5, 4] of 10 slots, patches [3, 3, 0] of 4 -> taken [[5, 3], [5, 3], [4, 0]]
    caps [10, 4]: items 0 and 1 have the slots to share a pack, but not the patches

`LimitedPacker.bins` opens packs one by one and needs few of them; `spread` fills a given number of
packs side by side. Packs that are filled one after the other reach one limit while there is room
under another: with at most seven segments per pack, the last packs hold seven short segments and
few tokens. Spread over all packs, every limit is used evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from evenstep.core.bounds import bins_bound
from evenstep.core.ragged import FloatArray, IntArray, Ragged, divided_up
from evenstep.planning.kernels import kernel, sink

_SCORES = (1, 3, 2, 0)  # of `scored_fit_kernel`, the best on average first
_FEW = 512  # items up to which all scores are tried; beyond, one finds nearly as few bins
_PART = 1024  # items packed together: scoring every bin takes items x bins steps
_WHOLE = 2**24  # items x bins up to which all items are packed together once: about 8 ms
_CHOICE = 4  # packs with room that a unit chooses from when it is spread
_LOOK = 64  # packs tried to find them, from the emptiest on


class LimitedPacker:
    """Few bins under several limits. It can be asked again: what it packed once is kept.

    Item i takes `sizes[i]` of `capacity` and `extra[i, d]` of `caps[d]`. An item that exceeds a
    limit by itself has a bin of its own.

    Best fit has several forms where an item takes of more than one limit: in which order items are
    taken, and which bin fits best. None is best for all inputs, so they are tried one after the
    other while there are too many bins; last, items are spread over fewer bins. An answer does not
    depend on what was asked before.

    >>> patches = np.array([[3.0], [3.0], [0.0], [0.0]])
    >>> LimitedPacker(np.array([5, 5, 5, 4]), patches, 10, np.array([4.0])).bins().tolist()
    [[0, 2], [1, 3]]
    """

    def __init__(self, sizes: IntArray, extra: FloatArray, capacity: int, caps: FloatArray) -> None:
        taken = np.column_stack((sizes.astype(np.float64), extra))  # slots first
        caps = np.append(float(capacity), caps)
        self._limits, self._spread = (taken, caps), dict[int, Ragged | None]()
        over = (taken > caps).any(axis=1)
        self._alone, self._fitting = np.flatnonzero(over), np.flatnonzero(~over)
        taken = taken[self._fitting]
        binding = taken.sum(axis=0) > caps  # other limits hold for all items together
        self._taken, self._caps = np.ascontiguousarray(taken[:, binding]), caps[binding]
        self._packings: list[IntArray] = []  # the bin of each fitting item, ever fewer bins
        self._more = self._tries(self._taken, self._caps)

    @cached_property
    def _bound(self) -> int:
        return bins_bound(self._taken, self._caps) if len(self._caps) else 1

    def bins(self, enough: int = 0) -> Ragged:
        """The first packing with at most `enough` bins, or as many as a lower bound, or the one
        with the fewest."""
        enough -= len(self._alone)
        for packing in self._all():
            if _count(packing) <= enough or _count(packing) <= self._bound:
                break
        bins = _count(packing)
        bin_of = np.empty(len(self._fitting) + len(self._alone), np.int64)
        bin_of[self._fitting] = packing
        bin_of[self._alone] = bins + np.arange(len(self._alone))
        return Ragged.group(bin_of, bins + len(self._alone))

    def spread(self, packs: int) -> Ragged | None:
        """The items of each of `packs` packs, spread over them; None if an item fits nowhere.

        Items are taken by the sum of their shares of all limits, largest first. Those that exceed
        a limit by themselves come before all others.
        """
        if packs not in self._spread:
            taken, caps = self._limits
            pack_of = spread_kernel(taken, self._largest_first, caps, packs)
            fits = len(pack_of) == len(taken)
            self._spread[packs] = Ragged.group(pack_of, packs) if fits else None
        return self._spread[packs]

    @cached_property
    def _largest_first(self) -> IntArray:
        return largest_first(*self._limits)

    def _all(self) -> Iterator[IntArray]:
        """The packings that are known, then further ones."""
        yield from self._packings
        for packing in self._more:
            self._packings.append(packing)
            yield packing

    def _tries(self, taken: FloatArray, caps: FloatArray) -> Iterator[IntArray]:
        """The bin of each item, packed in ever fewer bins."""
        if not len(caps):
            yield np.zeros(len(taken), np.int64)
            return
        columns, shares = np.ascontiguousarray(taken.T), taken / caps
        best = np.argsort(-shares.sum(axis=1), kind="stable")
        packing = fit_parts(columns, caps, best, _SCORES[0], len(taken))
        yield packing
        orders, most = _orders(shares), _count(packing) - 1
        for score in _SCORES if len(taken) <= _FEW else _SCORES[:1]:
            for order in orders:
                packing = fit_parts(columns, caps, order, score, most)
                if len(packing):
                    yield packing
                    best, most = order, _count(packing) - 1
        if len(taken) > _PART and len(taken) * self._bound <= _WHOLE:
            packed = scored_fit_kernel(columns, caps, best, _SCORES[0], most)
            if len(packed):
                yield packed[np.argsort(best)]
                most = _count(packed) - 1
        bin_of, packs = spread_over(taken, caps, self._bound, most)
        if packs >= 0:
            yield bin_of


def _orders(shares: FloatArray) -> list[IntArray]:
    """Items by their share of the scarcest limit, their largest share, the sum, other limits."""
    total = shares.sum(axis=1)
    scarce, *others = np.argsort(-shares.sum(axis=0), kind="stable").tolist()
    keys = [shares[:, scarce], shares.max(axis=1), total, *(shares[:, d] for d in others)]
    return [np.lexsort((-total, -key)) for key in keys]


def _count(bin_of: IntArray) -> int:
    """The number of bins."""
    return int(bin_of.max(initial=-1)) + 1


def fit_parts(
    taken: FloatArray, caps: FloatArray, order: IntArray, score: int, most: int
) -> IntArray:
    """The bin of each item, by best fit in parts; empty if more than `most` bins are needed.

    Each part has items of all sizes: with two parts, those at even and at odd places of `order`. A
    part leaves about one bin half empty, so these bins are packed again, together.
    """
    parts, bins, bin_of = divided_up(len(order), _PART), 0, np.empty(len(order), np.int64)
    for part in range(parts):
        items = order[part::parts]
        packed = scored_fit_kernel(taken, caps, items, score, most if parts == 1 else len(items))
        if not len(packed):
            return packed
        bin_of[items] = bins + packed
        bins += _count(packed)
    if parts > 1:
        full = np.bincount(bin_of, (taken / caps[:, None]).sum(axis=0), bins)
        loose = np.zeros(bins, np.bool_)
        loose[np.argsort(full, kind="stable")[:parts]] = True
        items = order[loose[bin_of[order]]]
        again = scored_fit_kernel(taken, caps, items, score, parts)
        if len(again):  # `parts` bins are enough if best fit does as well as before
            # Bins that stay are numbered anew, in order: loose [F, T, F] -> 0, -, 1
            bin_of = (np.cumsum(~loose) - 1)[bin_of]
            bin_of[items] = bins - parts + again
    return bin_of if _count(bin_of) <= most else np.empty(0, np.int64)


@kernel
def scored_fit_kernel(
    taken: FloatArray, caps: FloatArray, order: IntArray, score: int, most: int
) -> IntArray:
    """The bins of the items in `order`; empty if more than `most` bins are needed.

    Item i takes `taken[d, i]` of limit d, at most `caps[d]`, which is above 0. Of all bins with
    room, the one with the lowest score is chosen, by what it has left in shares of each limit: the
    dot product with the item, largest first (0); or, after the item, the sum of squares (1), the
    largest share (2) or the sum (3).

        caps [10, 4], bins with room [5, 1] and [6, 4], item [5, 1]
        score 3: left (0 + 0) and (0.1 + 0.75), so the item goes to the first bin and fills it
    """
    limits = taken.shape[0]
    room = np.empty((limits, most + 1))  # room[d, b]: what bin b has left of limit d
    scores = np.empty(most + 1)
    bin_of = np.empty(order.shape[0], np.int64)
    bins = 0
    for at, item in enumerate(order):
        # Score all open bins, limit by limit. A bin without room stays at infinity.
        scores[:bins] = 0.0
        for d in range(limits):
            wanted, left = taken[d, item], room[d]
            share = 1 / caps[d]
            for b in range(bins):
                rest = (left[b] - wanted) * share
                if score == 0:
                    value = scores[b] - (wanted * share) * (left[b] * share)
                elif score == 1:
                    value = scores[b] + rest * rest
                elif score == 2:
                    value = max(scores[b], rest)
                else:
                    value = scores[b] + rest
                scores[b] = value if left[b] >= wanted else np.inf
        # Take the first bin with the lowest score, or open one.
        chosen, best = -1, np.inf
        for b in range(bins):
            if scores[b] < best:
                chosen, best = b, scores[b]
        if chosen < 0:
            if bins == most:
                return np.empty(0, np.int64)
            chosen = bins
            bins += 1
            for d in range(limits):
                room[d, chosen] = caps[d]
        for d in range(limits):
            room[d, chosen] -= taken[d, item]
        bin_of[at] = chosen
    return bin_of


def largest_first(taken: FloatArray, caps: FloatArray) -> IntArray:
    """Items by the sum of their shares of all limits, those that exceed one first."""
    shares = taken / np.maximum(caps, 1e-9)
    return np.lexsort((-shares.sum(axis=1), ~(taken > caps).any(axis=1)))


def spread_over(taken: FloatArray, caps: FloatArray, least: int, most: int) -> tuple[IntArray, int]:
    """(the pack of each item, packs), in the fewest packs found; packs is -1 if none is.

    The distance from `least` is doubled until the items fit, then bisected: where they fit, they
    nearly always fit into more packs. From 10 on, where 14 are needed: 10, 11, 13, 17, 15, 14.
    """
    order = largest_first(taken, caps)
    best, packs = np.empty(0, np.int64), -1
    failed, count = least - 1, least  # items do not fit into `failed` packs, as far as tried
    while count <= most:
        pack_of = spread_kernel(taken, order, caps, count)
        if len(pack_of) == len(taken):
            best, packs, most = pack_of, count, count - 1
        else:
            failed = count
        if packs >= 0:
            count = failed + max(1, (packs - failed) // 2)
        else:
            count = min(2 * count - least + 1, most) if count < most else most + 1
    return best, packs


@kernel
def spread_kernel(taken: FloatArray, order: IntArray, caps: FloatArray, packs: int) -> IntArray:
    """The pack of each item, taken in `order`; empty if an item fits nowhere.

    An item goes to one of the emptiest packs with room: the one that it leaves emptiest. A pack is
    as full as its largest share of any limit. An item that exceeds a limit by itself takes an empty
    pack.

        caps [10, 4], packs with [5, 1] and [2, 3], which are 0.5 and 0.75 full, item [2, 1]
        the first would be 0.7 full and the second 1.0, so the item goes to the first
    """
    pack_of = np.empty(taken.shape[0], np.int64)
    used = np.zeros((packs, caps.shape[0]))
    full = np.zeros(packs)
    heap = np.arange(packs)  # the emptiest at the root, other empty ones near it
    for item in order:
        # The best of the first packs of the heap that have room.
        chosen, least, choices = -1, np.inf, 0
        for at in range(min(packs, _LOOK)):
            pack = heap[at]
            fits, share = True, 0.0
            for d in range(caps.shape[0]):
                total = used[pack, d] + taken[item, d]
                fits = fits and total <= caps[d]
                if total > 0:
                    share = max(share, total / max(caps[d], 1e-9))
            if fits or full[pack] == 0:
                choices += 1
                if share < least:
                    chosen, least = at, share
                if choices == _CHOICE:
                    break
        if chosen < 0:
            return np.empty(0, np.int64)
        pack = heap[chosen]
        pack_of[item] = pack
        used[pack] += taken[item]
        full[pack] = least
        sink(heap, packs, full, chosen, True)
    return pack_of
