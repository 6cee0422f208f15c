"""What segments see in front of themselves: prefixes that samples share, and parts of their own
sample on other ranks. Trees are batches in which samples that begin alike share their prefix:

    samples   a b c d     segments  0: a b  of sample 0, from 0       parents  -1
              a b c e               1: c d  of sample 0, from 2                 0
                                    2: c e  of sample 1, from 2                 0

A segment that no other sees in front of itself is a leaf; the others are nodes. A node ends one
token before the segments behind it differ, so the token after every slot is the same in all samples
that use it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenstep.core.layout import Placement
from evenstep.core.plan import MicroBatch
from evenstep.core.ragged import IntArray, Segments, offsets_of, ranges_of, seen_before, sum_by
from evenstep.errors import InputError
from evenstep.tensors.batch import IGNORE_INDEX, Batch, BatchExchange, Keys, Tree


def paths_of(parent: IntArray) -> tuple[IntArray, IntArray]:
    """Each segment as often as its path is long, and the path: from the first one to itself.

    parents [-1, 0, 0] -> segments [0, 1, 1, 2, 2], paths [0, 0, 1, 0, 2]
    """
    segments, paths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    here = above = np.arange(len(parent))
    while len(here):
        segments.append(here)
        paths.append(above)
        above = parent[above]
        here, above = here[above >= 0], above[above >= 0]
    # What was found last is nearest to the beginning of a sample.
    segment, path = np.concatenate(segments[::-1]), np.concatenate(paths[::-1])
    order = np.argsort(segment, kind="stable")
    return segment[order], path[order]


def whole_samples(micro: MicroBatch) -> MicroBatch:
    """The samples of a micro-batch whole and end to end, in the order of their leaves; of a split
    sample, its part."""
    if micro.rows != 1:
        raise InputError(
            f"a micro-batch with shared prefixes has {micro.rows} rows; expected one. Use the "
            f"layout Packed(max_tokens=...), or plan without prefixes."
        )
    segments = micro.segments
    assert segments.parent is not None
    leaves = np.flatnonzero(micro.own)
    start = np.where(segments.parent < 0, segments.start, 0)[leaves]
    parent = np.minimum(segments.parent, -1)[leaves]
    length = (segments.start + segments.length)[leaves] - start
    return replace(
        micro,
        segments=Segments(segments.sample[leaves], start, length, parent),
        row_offsets=np.array([0, len(leaves)]),
        width=int(length.sum()),
        sample_lengths=micro.sample_lengths[leaves],
        alignment=1,
        truncated_to=micro.sample_ends[leaves],
        groups=None if micro.groups is None else micro.groups[leaves],
        exchange=None if micro.exchange is None else micro.exchange.take(leaves),
    )


def keys_of(micro: MicroBatch) -> Keys:
    """The keys of each tile: what its segment sees in front of itself, then its own slots with
    their padding."""
    segments, placement, exchange = micro.segments, micro.placement, micro.exchange
    assert segments.parent is not None
    tiles = np.flatnonzero(placement.segment >= 0)
    tails = np.flatnonzero(placement.segment < 0)
    segment, path = paths_of(np.maximum(segments.parent, -1))
    owner = [tiles[segment], tails]
    first = [placement.offsets[tiles][path], placement.offsets[tails]]
    inside = np.where(path == segment, placement.slots[tiles][path], segments.length[path])
    count = [inside, placement.slots[tails]]
    if exchange is not None:
        # A part sees those of its sample before it. Those that other ranks send lie behind all
        # slots, in the order of ranks.
        own = np.flatnonzero(exchange.number >= 0)
        sample = np.append(exchange.number[own], exchange.received_number)
        start = np.append(segments.start[own], exchange.received_start)
        length = np.append(segments.length[own], exchange.received)
        behind = micro.slots + offsets_of(exchange.received)[:-1]
        slot = np.append(placement.offsets[tiles[own]], behind)
        seen, by = seen_before(sample, start)
        seen, by = seen[by < len(own)], by[by < len(own)]
        for column, values in ((owner, tiles[own[by]]), (first, slot[seen]), (count, length[seen])):
            column.insert(0, values)
    tile, counts = np.concatenate(owner), np.concatenate(count)
    by_tile = np.argsort(tile, kind="stable")
    keys = sum_by(tile, counts, len(placement.real)).astype(np.int64)
    slots = ranges_of(np.concatenate(first)[by_tile], counts[by_tile])
    return Keys(
        slots=torch.from_numpy(slots),
        cu_seqlens=torch.from_numpy(offsets_of(keys).astype(np.int32)),
        max_seqlen=int(keys.max()),
    )


def exchange_of(micro: MicroBatch) -> BatchExchange:
    """What this rank exchanges in the wave of a micro-batch, by slot."""
    exchange, placement = micro.exchange, micro.placement
    assert exchange is not None
    first = placement.offsets[:-1][placement.segment >= 0]
    length = micro.segments.length[exchange.sent]
    sent = sum_by(exchange.sent_to, length, exchange.ranks)
    received = sum_by(exchange.received_from, exchange.received, exchange.ranks)
    number = np.append(exchange.number, -1)[placement.segment]
    return BatchExchange(
        slots=torch.from_numpy(ranges_of(first[exchange.sent], length)),
        sent=tuple(sent.astype(int).tolist()),
        received=tuple(received.astype(int).tolist()),
        number=torch.from_numpy(number),
        sample_ids=tuple(exchange.samples.tolist()),
        lengths=tuple(exchange.lengths.tolist()),
        digest=exchange.digest,
    )


def tiles_of(
    micro: MicroBatch, placement: Placement, places: Tensor, segment_ids: Tensor
) -> dict[str, Any]:
    """Where the segments of a micro-batch lie, and what they see: fields of its `Batch`.

    `places` and `segment_ids` are those of slots, (rows, width).
    """
    segments, behind, positions = micro.segments, micro.segments.behind, places
    # Per segment -> per tile: the entry -1 of padding is the last one.
    sample_ids = np.concatenate((segments.sample, (-1,)))[placement.segment]
    starts = np.concatenate((segments.start, (0,)))[placement.segment]
    if behind is not None:
        before = np.concatenate((behind, (0,)))[placement.segment]
        positions = places + torch.from_numpy(before)[segment_ids]
    return {
        "position_ids": positions,
        "place_ids": None if behind is None else places,
        "segment_ids": segment_ids,
        "cu_seqlens": torch.from_numpy(placement.offsets.astype(np.int32)),
        "seqlens": torch.from_numpy(np.array(placement.real)),
        "sample_ids": torch.from_numpy(sample_ids),
        "starts": torch.from_numpy(starts),
        "max_seqlen": int(placement.slots.max(initial=0)),
        "keys": None if behind is None else keys_of(micro),
        "exchange": None if micro.exchange is None else exchange_of(micro),
    }


def share(micro: MicroBatch, samples: Batch, pad_token: int) -> Batch:
    """The batch of `micro`, whose `whole_samples` are collated in `samples`."""
    segments, placement = micro.segments, micro.placement
    assert segments.parent is not None
    tiles = np.flatnonzero(placement.segment >= 0)  # of the segments
    first, own = placement.offsets[tiles], micro.own
    segment, path = paths_of(np.maximum(segments.parent, -1))
    _check_preorder(segments.parent, segment, path)
    path = path[own[segment]]
    slots = torch.from_numpy(ranges_of(first[path], segments.length[path]))
    tree = Tree(samples=samples, slots=slots)
    number = np.repeat(np.arange(len(placement.real)), placement.slots)  # the tile of each slot
    place = np.arange(micro.slots) - placement.offsets[number]
    loss_tokens = torch.zeros(len(placement.real), dtype=torch.int64)
    loss_tokens[torch.from_numpy(tiles[own])] = samples.loss_tokens
    shape, weights = (1, micro.width), samples.loss_weights.flatten()
    loss_weights = weights.new_zeros(micro.width)
    of_slots = (torch.from_numpy(each).view(shape) for each in (place, number))
    batch = Batch(
        **tiles_of(micro, placement, *of_slots),
        tokens=tree.of_slots(samples.tokens, micro.width, pad_token),
        targets=tree.of_slots(samples.targets, micro.width, IGNORE_INDEX),
        labels=tree.of_slots(samples.labels, micro.width, IGNORE_INDEX),
        loss_weights=loss_weights.index_add_(0, tree.slots, weights).view(shape),
        loss_tokens=loss_tokens,
        tree=tree,
    )
    _check_equal(tree, batch.tokens, samples.tokens, "tokens")
    labels = torch.where(
        samples.labels == IGNORE_INDEX, tree.of_samples(batch.labels), samples.labels
    )
    _check_equal(tree, batch.labels, labels, "labels")
    return batch


def _check_preorder(parent: IntArray, segment: IntArray, path: IntArray) -> None:
    """Raise unless all segments behind another one follow it directly: masks rely on it."""
    behind = np.flatnonzero(parent >= 0)
    before = np.isin((behind - 1) * len(parent) + parent[behind], segment * len(parent) + path)
    if not before.all():
        raise InputError(
            f"segment {behind[~before][0]} of a micro-batch is apart from others behind its "
            f"parent. Check the plan with evenstep check, or plan the samples again."
        )


def _check_equal(tree: Tree, slots: Tensor, samples: Tensor, what: str) -> None:
    """Raise if samples that share a slot have different values there."""
    differ = (tree.of_samples(slots) != samples).flatten()
    if bool(differ.any()):
        at = int(differ.nonzero()[0, 0])
        sharing = (tree.slots == tree.slots[at]).nonzero()[:, 0]
        numbers = tree.samples.segment_ids.flatten()[sharing]
        names = ", ".join(str(name) for name in tree.samples.sample_ids[numbers].tolist()[:4])
        raise InputError(
            f"samples {names} share a prefix in the plan, but have different {what} in it. Make "
            f"the prefixes from these samples, or plan without prefixes."
        )
