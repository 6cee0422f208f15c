"""A binary heap of numbers for kernels, ordered by a key, least first."""

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.kernel import kernel


@kernel
def comes_before(a: int, b: int, key: FloatArray, by_number: bool) -> bool:
    """Whether a comes before b. At equal keys the lower number does, if `by_number`."""
    return key[a] < key[b] or (by_number and key[a] == key[b] and a < b)


@kernel
def sink(heap: IntArray, count: int, key: FloatArray, node: int, by_number: bool) -> None:
    """Move the entry at `node` down until neither child comes before it."""
    while True:
        child = 2 * node + 1
        if child >= count:
            return
        if child + 1 < count and comes_before(heap[child + 1], heap[child], key, by_number):
            child += 1
        if not comes_before(heap[child], heap[node], key, by_number):
            return
        heap[node], heap[child] = heap[child], heap[node]
        node = child


@kernel
def rise(heap: IntArray, count: int, key: FloatArray, by_number: bool) -> None:
    """Move the last of `count` entries up until it does not come before its parent."""
    node = count - 1
    while node > 0 and comes_before(heap[node], heap[(node - 1) // 2], key, by_number):
        parent = (node - 1) // 2
        heap[node], heap[parent] = heap[parent], heap[node]
        node = parent
