"""Sample ids: the stored item that a sample comes from, and which sample of that item it is.

Most items are one sample, whose id is the item's number. Further samples of an item (its parts)
have ids above `MOST_ITEMS`, so that one integer identifies any sample in plans, batches and
cursors.
"""

from __future__ import annotations

MOST_ITEMS = 1 << 40
"""Items are numbered below this; parts of one item, below 2**22."""


def sample_number(item: int, part: int = 0) -> int:
    """The id of a part of an item.

    >>> sample_number(7), sample_number(7, 1) == 7 + MOST_ITEMS
    (7, True)
    """
    return item + part * MOST_ITEMS


def item_and_part(sample: int) -> tuple[int, int]:
    """The inverse of `sample_number`.

    >>> item_and_part(sample_number(7, 2))
    (7, 2)
    """
    return sample % MOST_ITEMS, sample // MOST_ITEMS


def sample_name(sample: int) -> str:
    """What an error message calls a sample.

    >>> sample_name(7), sample_name(sample_number(7, 2))
    ('7', '7 (part 2)')
    """
    item, part = item_and_part(sample)
    return f"{item} (part {part})" if part else str(item)
