"""What packers share: the check of their items, and bin numbers turned into bins."""

from evenstep.core.ragged import IntArray, Ragged
from evenstep.errors import InputError
from evenstep.planning.kernel import kernel


def check_items(lengths: IntArray, capacity: int) -> None:
    """Raise if an item is shorter than 1 or longer than a bin."""
    shortest, longest = extent(lengths)
    if shortest < 1:
        at = int(lengths.argmin())
        raise InputError(
            f"item {at} has length {lengths[at]}; expected 1 or more. Remove the item."
        )
    if longest > capacity:
        at = int(lengths.argmax())
        raise InputError(
            f"item {at} has length {lengths[at]} but a bin holds {capacity}. Raise the capacity, "
            f"or split or drop the item."
        )


@kernel
def extent(lengths: IntArray) -> tuple[int, int]:
    """The shortest and the longest length."""
    low, high = lengths[0], lengths[0]
    for i in range(lengths.shape[0]):
        low = min(low, lengths[i])
        high = max(high, lengths[i])
    return low, high


def bins_in_order(bin_of: IntArray) -> Ragged:
    """The items of each bin, by index: bins [1, 0, 1] -> [[1], [0, 2]]."""
    return Ragged.group(bin_of, int(bin_of.max(initial=-1)) + 1)


def bins_by(bin_of: IntArray, order: IntArray) -> Ragged:
    """The items of each bin, in `order`: bins [1, 0, 1], order [2, 1, 0] -> [[1], [2, 0]]."""
    grouped = bins_in_order(bin_of[order])
    return Ragged(order[grouped.values], grouped.offsets)
