"""The packs of a step as kernels take them: units to move, room in a pack, and their shape."""

from typing import NamedTuple

from evenstep.core.ragged import FloatArray, IntArray


class Movable(NamedTuple):
    """The units: slots, first and second work, further limits, segments, and kind.

    `kind[u]` is 1 for a unit with second work, else 0.
    """

    size: IntArray
    cost: FloatArray
    second: FloatArray
    extra: FloatArray
    segments: IntArray
    kind: IntArray


class Room(NamedTuple):
    """What one pack may hold: slots, and an amount of each further limit."""

    capacity: int
    caps: FloatArray


class Shape(NamedTuple):
    """The packs of a step: `waves` waves of `ranks` micro-batches of `rows` packs.

    Pack `(wave * ranks + rank) * rows + row`. With `by_rank`, ranks synchronise once per step. With
    `equal`, ranks keep their number of segments. The first `special` waves hold the units of kind
    1, at least one in each micro-batch; -1 if kinds do not matter.
    """

    ranks: int
    rows: int
    waves: int
    by_rank: bool
    equal: bool
    special: int
