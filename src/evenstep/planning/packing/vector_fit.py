"""Best fit where several limits must hold."""

import numpy as np

from evenstep.core.ragged import FloatArray, IntArray
from evenstep.planning.kernel import kernel

_OPEN = 256  # bins that are considered at a time


@kernel
def vector_fit_kernel(
    sizes: IntArray, extra: FloatArray, order: IntArray, capacity: int, caps: FloatArray
) -> IntArray:
    """The bin of each item, taken in `order`: the fullest bin where every limit holds.

    An item that exceeds a limit by itself gets a bin of its own. When a bin is needed and `_OPEN`
    bins are open, the one with the least room is closed.
    """
    n = sizes.shape[0]
    bin_of = np.empty(n, np.int64)
    size = np.zeros(n, np.int64)
    held = np.zeros((n, caps.shape[0]))
    open_bins = np.empty(_OPEN, np.int64)
    count, bins = 0, 0
    for item in order:
        chosen, tightest = -1, -1
        for k in range(count):
            b = open_bins[k]
            if tightest < 0 or size[b] > size[open_bins[tightest]]:
                tightest = k
            if capacity - size[b] < sizes[item] or (chosen >= 0 and size[b] <= size[chosen]):
                continue
            fit = True
            for d in range(caps.shape[0]):
                fit = fit and held[b, d] + extra[item, d] <= caps[d]
            if fit:
                chosen = b
        if chosen < 0:
            chosen = bins
            bins += 1
            if count < _OPEN:
                tightest = count
                count += 1
            open_bins[tightest] = chosen
        bin_of[item] = chosen
        size[chosen] += sizes[item]
        for d in range(caps.shape[0]):
            held[chosen, d] += extra[item, d]
    return bin_of
