"""Kernel for positions, tile numbers, shifted labels and loss weights of a batch."""

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import IntArray
from evenstep.planning.kernels import kernel


@kernel
def number_slots(
    offsets: IntArray,
    real: IntArray,
    targets: IntArray,
    ignore: int,
    positions: IntArray,
    tiles: IntArray,
    labels: IntArray,
    weights: NDArray[np.float32],
    loss_tokens: IntArray,
) -> None:
    """Fill the last five arrays, one tile at a time.

    The label of a slot is the target of the next slot of its segment; the last slot of a segment
    and padding have none. offsets [0, 3, 5], real [3, 1], targets [7, 8, 9, 4, 0] give positions
    [0, 1, 2, 0, 1], tiles [0, 0, 0, 1, 1], labels [8, 9, -, -, -] and loss tokens [2, 0].
    """
    for tile in range(real.shape[0]):
        begin, end = offsets[tile], offsets[tile + 1]
        size, inner = end - begin, max(real[tile] - 1, 0)
        # One short loop per array, so that each is vectorised.
        here = positions[begin:end]
        for slot in range(size):
            here[slot] = slot
        tiles[begin:end] = tile
        label, target = labels[begin:end], targets[begin + 1 : begin + 1 + inner]
        count = 0
        for slot in range(inner):
            label[slot] = target[slot]
            count += target[slot] != ignore
        label[inner:] = ignore
        loss_tokens[tile] = count
        weight = weights[begin:end]
        for slot in range(size):
            weight[slot] = 0.0 if label[slot] == ignore else 1.0
