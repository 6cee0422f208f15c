"""Items that can be packed: every one between 1 and the capacity of a bin."""

from evenstep.core.ragged import IntArray
from evenstep.errors import InputError
from evenstep.planning.kernel import kernel


def check_items(lengths: IntArray, capacity: int) -> None:
    """Raise an error that names the item if one is empty or longer than a bin."""
    shortest, longest = extent(lengths)
    if shortest < 1:
        at = int(lengths.argmin())
        raise InputError(
            f"item {at} has length {lengths[at]}; it holds nothing to pack. Remove it."
        )
    if longest > capacity:
        at = int(lengths.argmax())
        raise InputError(
            f"item {at} has length {lengths[at]} but a bin holds {capacity}; it could never be "
            f"packed. Raise the capacity, or split or drop the item."
        )


@kernel
def extent(lengths: IntArray) -> tuple[int, int]:
    """The shortest and the longest, in one pass."""
    low, high = lengths[0], lengths[0]
    for i in range(lengths.shape[0]):
        low = min(low, lengths[i])
        high = max(high, lengths[i])
    return low, high
