"""What follows from the boundaries alone: positions, pieces, shifted labels, loss weights."""

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import IntArray
from evenstep.planning.kernel import kernel


@kernel
def number_slots(
    offsets: IntArray,
    real: IntArray,
    targets: IntArray,
    ignore: int,
    positions: IntArray,
    pieces: IntArray,
    labels: IntArray,
    weights: NDArray[np.float32],
    loss_tokens: IntArray,
) -> None:
    """Fill the last five arrays, piece by piece.

    The label of a slot is the target of the next slot of its own segment; a segment's last slot
    and padding have none. offsets [0, 3, 5], real [3, 1], targets [7, 8, 9, 4, 0] give positions
    [0, 1, 2, 0, 1], pieces [0, 0, 0, 1, 1] and labels [8, 9, -, -, -]; the pieces train [2, 0].
    """
    for piece in range(real.shape[0]):
        begin, end = offsets[piece], offsets[piece + 1]
        size, inner = end - begin, max(real[piece] - 1, 0)
        # One short loop per array: each compiles to wide stores.
        here = positions[begin:end]
        for slot in range(size):
            here[slot] = slot
        pieces[begin:end] = piece
        label, target = labels[begin:end], targets[begin + 1 : begin + 1 + inner]
        count = 0
        for slot in range(inner):
            label[slot] = target[slot]
            count += target[slot] != ignore
        label[inner:] = ignore
        loss_tokens[piece] = count
        weight = weights[begin:end]
        for slot in range(size):
            weight[slot] = 0.0 if label[slot] == ignore else 1.0
