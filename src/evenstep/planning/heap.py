"""A binary heap of numbers by a key, least first, for kernels."""

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.kernel import kernel


@kernel
def comes_before(a: int, b: int, key: FloatArray, by_number: bool) -> bool:
    """Whether a comes before b; of equal keys the lower number does, or neither."""
    return key[a] < key[b] or (by_number and key[a] == key[b] and a < b)


@kernel
def sink(heap: IntArray, count: int, key: FloatArray, node: int, by_number: bool) -> None:
    """Let what stands at `node` sink until neither below it comes before it."""
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
    """Let the last of `count` rise until the one above it comes before it."""
    node = count - 1
    while node > 0 and comes_before(heap[node], heap[(node - 1) // 2], key, by_number):
        above = (node - 1) // 2
        heap[node], heap[above] = heap[above], heap[node]
        node = above
