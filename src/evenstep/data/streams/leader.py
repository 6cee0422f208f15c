"""Leader: the sample of a pool that a padded micro-batch is formed around.

Micro-batches of short rows hold many samples, those of long rows few. If the oldest sample always
led, long samples would gather in the pool until most of the oldest were long, and would run at the
end of an epoch. So the leader is drawn by tokens: a sample of 700 tokens is ten times as likely as
one of 70. In every other draw it is the oldest, so that no sample waits for long.
"""

from __future__ import annotations

import numpy as np

from evenstep.core.ragged import IntArray

_OLDEST = 2  # one draw of so many
_PRIME, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


def leader(lengths: IntArray) -> int:
    """The index of the leader among the older half of a pool, by a hash of the lengths.

    >>> leader(np.array([5])), leader(np.array([7, 3]))
    (0, 0)
    """
    older = lengths[: (len(lengths) + 1) // 2]
    value = int(lengths @ np.arange(1, len(lengths) + 1)) * _PRIME & _MASK
    value ^= value >> 29
    if value % _OLDEST == 0:
        return 0
    tokens = np.cumsum(older)
    return int(np.searchsorted(tokens, (value >> 8) % int(tokens[-1]), side="right"))
