"""Pack under several limits: as few bins as several greedy ways and a local search find.

Best fit has several forms where an item takes of more than one limit: in which order items are
taken, and which bin fits best. None is best for all inputs, so all are tried until the number of
bins reaches the lower bound. Then bins are emptied into others, and items are spread over fewer
bins.

A try that scores every bin takes items x bins steps. For many items there is only the score that a
tree finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from evenstep.core.bounds import bins_bound
from evenstep.core.ragged import FloatArray, IntArray, Ragged
from evenstep.planning.kernels import kernel, rise, sink
from evenstep.planning.units import Units

_SCORES = (1, 3, 2, 0)  # of `scored_fit_kernel`, the best on average first
_WORK = 2**25  # items x bins up to which every bin is scored: about 20 ms for one try
_MANY = 1024  # items from which on the tree is faster than scoring every bin
_LOOKS = 2**25  # items looked at to empty bins: some 50 ms
_CLOSE = 1.01  # packings this close to the best are kept, to have their bins emptied
_KEPT = 3  # packings whose bins are emptied


def vector_pack(
    sizes: IntArray, extra: FloatArray, capacity: int, caps: FloatArray, enough: int = 0
) -> Ragged:
    """The items of each bin. Item i takes `sizes[i]` of `capacity` and `extra[i, d]` of `caps[d]`.

    An item that exceeds a limit by itself has a bin of its own. The search ends when the number of
    bins is the lower bound, or at most `enough`.

    >>> patches = np.array([[3.0], [3.0], [0.0], [0.0]])
    >>> vector_pack(np.array([5, 5, 5, 4]), patches, 10, np.array([4.0])).tolist()
    [[0, 2], [1, 3]]
    """
    taken = np.column_stack((sizes.astype(np.float64), extra))
    most = np.append(float(capacity), caps)
    over = (taken > most).any(axis=1)
    fitting, alone = np.flatnonzero(~over), np.flatnonzero(over)
    bin_of = np.empty(len(sizes), np.int64)
    bin_of[fitting] = _packed(taken[fitting], most, enough - len(alone))
    bins = _count(bin_of[fitting])
    bin_of[alone] = bins + np.arange(len(alone))
    return Ragged.group(bin_of, bins + len(alone))


def _packed(taken: FloatArray, caps: FloatArray, enough: int) -> IntArray:
    """The bin of each item. Limits that hold for all items together are left out."""
    binding = taken.sum(axis=0) > caps
    if not binding.any():
        return np.zeros(len(taken), np.int64)
    taken, caps = np.ascontiguousarray(taken[:, binding]), caps[binding]
    bound = bins_bound(taken, caps)
    enough = max(enough, bound)
    found = _fitted(taken, caps, bound, enough)
    if _count(found[0]) > enough:
        found = [_emptied(taken, caps, bin_of, enough) for bin_of in found[:_KEPT]]
    best = min(found, key=_count)
    if _count(best) > enough:
        spread, packs = spread_over(taken, caps, enough, _count(best) - 1)
        best = spread if packs >= 0 else best
    return best


def _fitted(taken: FloatArray, caps: FloatArray, bound: int, enough: int) -> list[IntArray]:
    """Packings, fewest bins first, until one has `enough` bins; those far from the best are left
    out."""
    found: list[IntArray] = []
    most = len(taken)
    for fit in _ways(taken, caps, bound):
        bin_of = fit(most=most)
        if len(bin_of):
            found.append(bin_of)
            most = min(most, int(_count(bin_of) * _CLOSE))
            if _count(bin_of) <= enough:
                break
    return sorted(found, key=_count)


def _ways(taken: FloatArray, caps: FloatArray, bound: int) -> Iterator[partial[IntArray]]:
    """The forms of best fit: items by each limit, by their largest share, or by their sum of
    shares; times the scores of a bin. Those that are best for most inputs come first."""
    shares = taken / caps
    total = shares.sum(axis=1)
    scarce, *others = np.argsort(-shares.sum(axis=0), kind="stable").tolist()
    keys = [shares[:, scarce], shares.max(axis=1), total, *(shares[:, d] for d in others)]
    orders = [np.lexsort((-total, -key)) for key in keys]
    scored = len(taken) * bound <= _WORK
    if len(taken) >= _MANY or not scored:
        for order in orders:
            yield partial(tightest_fit_kernel, taken, caps, order, scarce)
    if scored:
        columns = np.ascontiguousarray(taken.T)
        for score in _SCORES:
            for order in orders:
                yield partial(scored_fit_kernel, columns, caps, order, score)


def _emptied(taken: FloatArray, caps: FloatArray, bin_of: IntArray, enough: int) -> IntArray:
    """The packing after bins are emptied. Items weigh more by limits that are scarce."""
    shares = taken / caps
    weight = shares @ (shares.sum(axis=0) / shares.sum(axis=0).max())
    better = bin_of.copy()
    empty_bins_kernel(taken, weight, caps, better, _count(bin_of), enough, _LOOKS)
    return better


def _count(bin_of: IntArray) -> int:
    """The number of bins."""
    return int(bin_of.max(initial=-1)) + 1


_OPEN = 256  # bins that are considered at a time


@kernel
def scored_fit_kernel(
    taken: FloatArray, caps: FloatArray, order: IntArray, score: int, most: int
) -> IntArray:
    """The bin of each item, taken in `order`; empty if more than `most` bins are needed.

    Item i takes `taken[d, i]` of limit d, at most `caps[d]`, which is above 0. Of all bins with
    room, the one with the lowest score is chosen, by what it has left in shares of each limit: the
    dot product with the item, largest first (0); or, after the item, the sum of squares (1), the
    largest share (2) or the sum (3).
    """
    limits, n = taken.shape
    room = np.empty((limits, most + 1))
    scores = np.empty(most + 1)
    bin_of = np.empty(n, np.int64)
    bins = 0
    for item in order:
        scores[:bins] = 0.0
        for d in range(limits):
            wanted, left = taken[d, item], room[d]
            share = 1 / caps[d]
            # One loop per score and no branch inside, so that the compiler uses vectors.
            if score == 0:
                for b in range(bins):
                    value = scores[b] - (wanted * share) * (left[b] * share)
                    scores[b] = value if left[b] >= wanted else np.inf
            elif score == 1:
                for b in range(bins):
                    rest = (left[b] - wanted) * share
                    value = scores[b] + rest * rest
                    scores[b] = value if left[b] >= wanted else np.inf
            elif score == 2:
                for b in range(bins):
                    value = max(scores[b], (left[b] - wanted) * share)
                    scores[b] = value if left[b] >= wanted else np.inf
            else:
                for b in range(bins):
                    value = scores[b] + (left[b] - wanted) * share
                    scores[b] = value if left[b] >= wanted else np.inf
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
        bin_of[item] = chosen
    return bin_of


_LEVELS, _STACKS = 512, 512  # levels of the sum of room, stacks of a level
_VISITS = 2**14  # nodes and bins looked at for one item


@kernel
def has_room(room: FloatArray, wanted: FloatArray) -> bool:
    """Whether there is room for `wanted` under every limit."""
    for d in range(wanted.shape[0]):
        if room[d] < wanted[d]:
            return False
    return True


@kernel
def first_with_room(
    tree: FloatArray,
    top: IntArray,
    below: IntArray,
    room: FloatArray,
    wanted: FloatArray,
    leaf: int,
) -> int:
    """A bin with room for `wanted` in the first possible stack from `leaf` on, or -1.

    -1 also where too many nodes and bins were looked at.
    """
    leaves = top.shape[0]
    node, visits = leaves + leaf, 0
    while visits < _VISITS:
        visits += 1
        if has_room(tree[node], wanted):
            if node < leaves:
                node *= 2
                continue
            b = int(top[node - leaves])
            while b >= 0 and visits < _VISITS:
                if has_room(room[b], wanted):
                    return b
                b = below[b]
                visits += 1
        while node % 2 == 1:  # a right child: the next node on the right is its parent's
            node //= 2
        if node == 0:
            return -1
        node += 1
    return -1


@kernel
def update_tree(tree: FloatArray, node: int) -> None:
    """Correct the nodes above the leaf `node`."""
    node //= 2
    while node >= 1:
        for d in range(tree.shape[1]):
            tree[node, d] = max(tree[2 * node, d], tree[2 * node + 1, d])
        node //= 2


@kernel
def put_bin(
    b: int,
    leaf: int,
    tree: FloatArray,
    top: IntArray,
    below: IntArray,
    above: IntArray,
    room: FloatArray,
) -> None:
    """Put bin `b` onto the stack of `leaf`."""
    below[b], above[b] = top[leaf], -1
    if top[leaf] >= 0:
        above[top[leaf]] = b
    top[leaf] = b
    node = top.shape[0] + leaf
    for d in range(room.shape[1]):
        tree[node, d] = max(tree[node, d], room[b, d])
    update_tree(tree, node)


@kernel
def remove_bin(
    b: int,
    leaf: int,
    tree: FloatArray,
    top: IntArray,
    below: IntArray,
    above: IntArray,
    room: FloatArray,
) -> None:
    """Take bin `b` off the stack of `leaf`."""
    if above[b] >= 0:
        below[above[b]] = below[b]
    else:
        top[leaf] = below[b]
    if below[b] >= 0:
        above[below[b]] = above[b]
    node = top.shape[0] + leaf
    for d in range(room.shape[1]):
        most = tree[node, d]
        if room[b, d] < most:
            continue
        tree[node, d] = -1.0
        other = top[leaf]
        while other >= 0 and tree[node, d] < most:
            tree[node, d] = max(tree[node, d], room[other, d])
            other = below[other]
    update_tree(tree, node)


@kernel
def tightest_fit_kernel(
    taken: FloatArray, caps: FloatArray, order: IntArray, scarce: int, most: int
) -> IntArray:
    """The bin of each item, taken in `order`; empty if more than `most` bins are needed.

    Item i takes `taken[i, d]` of limit d, at most `caps[d]`, which is above 0. Stacks of a level
    are by room under the limit `scarce`.
    """
    n, limits = taken.shape
    tree = np.full((2 * _LEVELS * _STACKS, limits), -1.0)
    top = np.full(_LEVELS * _STACKS, -1, np.int64)
    below = np.empty(most, np.int64)
    above = np.empty(most, np.int64)
    leaf_of = np.empty(most, np.int64)
    room = np.empty((most, limits))
    bin_of = np.empty(n, np.int64)
    scale = (_LEVELS - 1) / limits
    bins = 0
    for item in order:
        wanted = taken[item]
        total = 0.0
        for d in range(limits):
            total += wanted[d] / caps[d]
        level = int(total * scale * (1 - 1e-9))
        chosen = first_with_room(tree, top, below, room, wanted, level * _STACKS)
        if chosen < 0:
            if bins == most:
                return np.empty(0, np.int64)
            chosen = bins
            bins += 1
            room[chosen] = caps
        else:
            remove_bin(chosen, leaf_of[chosen], tree, top, below, above, room)
        left = 0.0
        for d in range(limits):
            room[chosen, d] -= wanted[d]
            left += room[chosen, d] / caps[d]
        stack = int(room[chosen, scarce] / caps[scarce] * (_STACKS - 1))
        leaf_of[chosen] = int(left * scale) * _STACKS + stack
        put_bin(chosen, leaf_of[chosen], tree, top, below, above, room)
        bin_of[item] = chosen
    return bin_of


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


_FAILED = 24  # bins in a row that could not be emptied, after which to stop


@kernel
def room_for(wanted: FloatArray, room: FloatArray, caps: FloatArray, source: int, bins: int) -> int:
    """The bin other than `source` with room for `wanted` and the least left afterwards, or -1."""
    chosen, least = -1, np.inf
    for b in range(bins):
        rest = 0.0
        for d in range(caps.shape[0]):
            left = room[b, d] - wanted[d]
            rest += left / caps[d]
            if left < 0:
                rest = np.inf
                break
        if rest < least and b != source:
            chosen, least = b, rest
    return chosen


@kernel
def swap_for(
    item: int,
    taken: FloatArray,
    weight: FloatArray,
    bin_of: IntArray,
    room: FloatArray,
    source: int,
) -> int:
    """The lightest item that can be swapped for `item` of bin `source`, or -1 if none is lighter.

    Both bins keep all limits.
    """
    chosen, least = -1, weight[item] * (1 - 1e-9)
    for other in range(weight.shape[0]):
        b = bin_of[other]
        if weight[other] >= least or b == source:
            continue
        fit = True
        for d in range(taken.shape[1]):
            fit = (
                fit
                and taken[item, d] <= room[b, d] + taken[other, d]
                and taken[other, d] <= room[source, d] + taken[item, d]
            )
        if fit:
            chosen, least = other, weight[other]
    return chosen


@kernel
def move(
    item: int, taken: FloatArray, bin_of: IntArray, room: FloatArray, source: int, target: int
) -> None:
    """Move an item from bin `source` to bin `target`."""
    bin_of[item] = target
    for d in range(taken.shape[1]):
        room[target, d] -= taken[item, d]
        room[source, d] += taken[item, d]


@kernel
def items_of(bin_of: IntArray, source: int, weight: FloatArray) -> IntArray:
    """The items of a bin, heaviest first."""
    count = 0
    for b in bin_of:
        count += b == source
    items = np.empty(count, np.int64)
    at = 0
    for item in range(bin_of.shape[0]):
        if bin_of[item] == source:
            k = at
            while k > 0 and weight[items[k - 1]] < weight[item]:
                items[k] = items[k - 1]
                k -= 1
            items[k] = item
            at += 1
    return items


@kernel
def give_away(
    source: int,
    taken: FloatArray,
    weight: FloatArray,
    caps: FloatArray,
    bin_of: IntArray,
    room: FloatArray,
    bins: int,
) -> tuple[int, int]:
    """(items that remain in bin `source`, steps). Moves and swaps its items, in place."""
    items = items_of(bin_of, source, weight)
    remaining, steps = items.shape[0], 0
    changed = True
    while changed and remaining > 0:
        changed = False
        for k in range(items.shape[0]):
            while items[k] >= 0:
                steps += 1
                item = items[k]
                target = room_for(taken[item], room, caps, source, bins)
                if target >= 0:
                    move(item, taken, bin_of, room, source, target)
                    items[k] = -1
                    remaining -= 1
                    changed = True
                    break
                other = swap_for(item, taken, weight, bin_of, room, source)
                if other < 0:
                    break
                target = bin_of[other]
                move(other, taken, bin_of, room, target, source)
                move(item, taken, bin_of, room, source, target)
                items[k] = other
                changed = True
    return remaining, steps


@kernel
def empty_bins_kernel(
    taken: FloatArray,
    weight: FloatArray,
    caps: FloatArray,
    bin_of: IntArray,
    bins: int,
    least: int,
    looks: int,
) -> int:
    """Empty bins, in place, until there are `least` or no more can be; return their number.

    Item i takes `taken[i, d]` of limit d; `weight` is how hard it is to place. About `looks` items
    are looked at.
    """
    n, limits = taken.shape
    room = np.empty((bins, limits))
    load = np.empty(bins)
    tried = np.zeros(bins, np.bool_)
    failed = 0
    while bins > least and looks > 0 and failed < _FAILED:
        for b in range(bins):
            load[b] = 0.0
            for d in range(limits):
                room[b, d] = caps[d]
        for i in range(n):
            load[bin_of[i]] += weight[i]
            for d in range(limits):
                room[bin_of[i], d] -= taken[i, d]
        source = -1
        for b in range(bins):
            if not tried[b] and (source < 0 or load[b] < load[source]):
                source = b
        if source < 0:
            break
        tried[source] = True
        remaining, steps = give_away(source, taken, weight, caps, bin_of, room, bins)
        looks -= (steps + 1) * n
        if remaining > 0:
            failed += 1
            continue
        # The last bin takes the number of the empty one.
        bins -= 1
        for i in range(n):
            if bin_of[i] == bins:
                bin_of[i] = source
        for b in range(bins):
            tried[b] = False
        failed = 0
    return bins
