"""The largest differencing method of Karmarkar and Karp, for any number of parts."""

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.kernels import kernel, sink


def differenced(costs: FloatArray, parts: int, equal_sizes: bool) -> IntArray:
    """The part of each item by largest differencing, for costs heaviest first."""
    if not equal_sizes:
        return differencing_kernel(costs, parts, 1)
    padded = np.concatenate((costs, np.zeros(-len(costs) % parts)))
    return differencing_kernel(padded, parts, parts)[: len(costs)]


@kernel
def differencing_kernel(costs: FloatArray, parts: int, layer: int) -> IntArray:
    """The part of each item. Each initial partition deals `layer` items, one to a part.

    Costs are heaviest first. With layer = 1 parts may hold any number of items; with layer = parts
    they hold equally many. A partition has a load per part, heaviest first, and a linked list of
    items per part. Combining two of them adds the heaviest part of one to the lightest of the
    other.
    """
    n = costs.shape[0]
    deals = n // layer
    load = np.zeros((deals, parts))
    head = np.full((deals, parts), -1, np.int64)
    tail = np.full((deals, parts), -1, np.int64)
    following = np.full(n, -1, np.int64)
    evenness = np.empty(deals)  # the lightest part minus the heaviest; lower is less even
    for d in range(deals):
        for part in range(layer):
            item = d * layer + part
            load[d, part] = costs[item]
            head[d, part] = item
            tail[d, part] = item
        evenness[d] = load[d, parts - 1] - load[d, 0]
    heap = np.arange(deals)  # the least even partition at the root
    alive = deals
    for node in range(alive // 2 - 1, -1, -1):
        sink(heap, alive, evenness, node, False)
    while alive > 1:
        a = heap[0]
        alive -= 1
        heap[0] = heap[alive]
        sink(heap, alive, evenness, 0, False)
        b = heap[0]
        for part in range(parts):
            other = parts - 1 - part
            load[a, part] += load[b, other]
            if head[b, other] >= 0:
                if head[a, part] < 0:
                    head[a, part] = head[b, other]
                else:
                    following[tail[a, part]] = head[b, other]
                tail[a, part] = tail[b, other]
        ranking = np.argsort(-load[a], kind="mergesort")
        load[b] = load[a][ranking]
        head[b] = head[a][ranking]
        tail[b] = tail[a][ranking]
        evenness[b] = load[b, parts - 1] - load[b, 0]
        sink(heap, alive, evenness, 0, False)
    part_of = np.empty(n, np.int64)
    for part in range(parts):
        item = head[heap[0], part]
        while item >= 0:
            part_of[item] = part
            item = following[item]
    return part_of
