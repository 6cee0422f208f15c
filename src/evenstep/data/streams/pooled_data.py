"""What the cursors of a pooled stream say about its data, and whether its order is shuffled."""

from __future__ import annotations

from typing import cast

from evenstep.core.validate import truth_value
from evenstep.data.sources.source import MeasuredSource, Source, has_random_access, is_seeded
from evenstep.data.streams.digests import lengths_digest
from evenstep.data.streams.order import EpochOrder
from evenstep.errors import ConfigError


def data_of(
    source: Source, named: str | None, seed: int, shuffle: bool, measured: bool
) -> dict[str, str]:
    """Data and order, in words and digests.

    named     the user's fingerprint of the data, instead of the source's own
    measured  whether the source knows the lengths of its items
    """
    data, size = source.fingerprint if named is None else named, 0
    if has_random_access(source):
        size = len(source)
        data = f"{size} items, {data}"
    order = EpochOrder(count=size, seed=seed, epoch=0, shuffle=shuffle)
    found = {"data": data, "order": order.description}
    if measured:
        found["lengths"] = lengths_digest(cast("MeasuredSource", source))
    return {**found, "seed of samples": str(seed)} if is_seeded(source) else found


def shuffles(source: Source, given: bool | None) -> bool:
    """Whether the epoch's order is shuffled: by default, if items can be read in any order."""
    by_index = has_random_access(source)
    found = by_index if given is None else truth_value("shuffle", given)
    if found and not by_index:
        raise ConfigError(
            f"shuffle=True has no effect on {type(source).__name__}, which is read in its own "
            f"order. Shuffle inside it (Hugging Face: dataset.shuffle(seed, buffer_size)), or use "
            f"a source with items by index, and omit shuffle."
        )
    return found
