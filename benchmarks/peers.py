"""Packers of other libraries under one interface.

Each gets its native input, and preparing that input is not timed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from evenstep.core.ragged import IntArray


def installed(package: str) -> bool:
    """Whether a peer can be imported."""
    return find_spec(package) is not None


@dataclass(frozen=True, slots=True)
class PackerPeer:
    """A packer of another library.

    `prepare(lengths, capacity)` makes the call to time; `bins` counts the bins of its result.
    It is only run up to `largest` items.
    """

    name: str
    largest: int
    prepare: Callable[[IntArray, int], Callable[[], Any]]
    bins: Callable[[Any], int] = len


def packer_peers() -> list[PackerPeer]:
    """The installed peers and one in plain Python."""
    peers = [PackerPeer("plain Python best-fit", 1_000_000, _plain)]
    if installed("lightbinpack"):
        peers.insert(0, PackerPeer("lightbinpack.obfd", 1_000_000, _obfd))
    if installed("trl") and installed("datasets"):
        peers.append(PackerPeer("trl.pack_dataset bfd", 10_000, _trl))
    if installed("prtpy"):
        peers.append(PackerPeer("prtpy best_fit.decreasing", 1_000, _prtpy))
    return peers


def _obfd(lengths: IntArray, capacity: int) -> Callable[[], Any]:
    import lightbinpack

    as_list = lengths.tolist()
    return lambda: lightbinpack.obfd(as_list, capacity)


def _prtpy(lengths: IntArray, capacity: int) -> Callable[[], Any]:
    import prtpy
    from prtpy.packing import best_fit

    by_name = dict(enumerate(lengths.tolist()))  # keys are indices, so the result holds assignments
    return lambda: prtpy.pack(algorithm=best_fit.decreasing, binsize=capacity, items=by_name)


def _trl(lengths: IntArray, capacity: int) -> Callable[[], Any]:
    import datasets
    import pyarrow as pa
    from trl import pack_dataset

    datasets.disable_progress_bars()
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    tokens = pa.ListArray.from_arrays(offsets, np.zeros(offsets[-1], np.int32))
    dataset = datasets.Dataset(pa.table({"input_ids": tokens}))
    # A single batch, so that it packs all lengths together like the others.
    options = {"batch_size": len(lengths), "load_from_cache_file": False}
    return lambda: pack_dataset(dataset, capacity, strategy="bfd", map_kwargs=options)


def _plain(lengths: IntArray, capacity: int) -> Callable[[], Any]:
    as_list = lengths.tolist()
    return lambda: plain_best_fit(as_list, capacity)


def plain_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing in plain Python: bins by free space, free spaces kept sorted.

    >>> plain_best_fit([4, 6, 5, 3], 9)
    [[1, 3], [2, 0]]
    """
    bins: list[list[int]] = []
    by_room: dict[int, list[list[int]]] = {}
    rooms: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[index]
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room, home = capacity, [index]
            bins.append(home)
        else:
            room = rooms[at]
            home = by_room[room].pop()
            home.append(index)
            if not by_room[room]:
                del by_room[room], rooms[at]
        room -= length
        if room in by_room:
            by_room[room].append(home)
        else:
            by_room[room] = [home]
            insort(rooms, room)
    return bins
