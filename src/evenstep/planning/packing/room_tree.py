"""Best fit under several limits for very many bins.

The best bin is the one with the least room left, summed over all limits in shares. Open bins are
kept in stacks: by levels of that sum, and within a level by their room under one limit. The stacks
are the leaves of a tree, in this order. Each node holds the most room of any bin below it, limit by
limit. Walking the tree from left to right, and skipping nodes without room, finds the first level
with a bin for an item.
"""

from __future__ import annotations

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.kernel import kernel

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
