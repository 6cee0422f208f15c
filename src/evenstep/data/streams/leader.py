"""Leader: the sample of a pool that a padded micro-batch is formed around.

Micro-batches of short rows hold many samples, those of long rows few. If the oldest sample always
led, long samples would gather in the pool until most of the oldest were long, and would run at the
end of an epoch. So the leader is drawn by tokens: a sample of 700 tokens is ten times as likely as
one of 70. In every other draw it is the oldest, so that no sample waits for long.
"""

from __future__ import annotations

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.planning.kernels import kernel

_OLDEST = 2  # one draw of so many
_PRIME, _FACTOR = 2147483647, 48271  # products fit 64 bits


@kernel
def leader_first(lengths: IntArray, ending: bool) -> IntArray:
    """The indices of a pool, the leader first, then the others in order.

    The leader is drawn from the older half by a hash of the lengths. If the epoch is `ending`, so
    that nothing more will be read, it is the longest: fewer micro-batches hold the rest.

    >>> leader_first(np.array([3, 7]), ending=True).tolist()
    [1, 0]
    """
    n = lengths.shape[0]
    value, tokens = np.int64(1), np.int64(0)
    for i in range(n):
        value = (value * _FACTOR + lengths[i]) % _PRIME
        tokens += lengths[i] if i < (n + 1) // 2 else 0
    at = 0
    if ending:
        at = int(np.argmax(lengths))
    elif value % _OLDEST:
        drawn = (value * _FACTOR % _PRIME) * tokens // _PRIME
        before = lengths[0]
        while before <= drawn:
            at += 1
            before += lengths[at]
    order = np.arange(n)
    for i in range(at, 0, -1):
        order[i] = i - 1
    order[0] = at
    return order
