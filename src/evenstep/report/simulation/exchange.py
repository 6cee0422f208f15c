"""What data-parallel ranks send to each other in a step, and how much of it is not hidden.

Weights are gathered in bfloat16 (2 bytes), gradients summed in float32 (4 bytes). A collective over
n ranks moves (n - 1) / n of its bytes through each device; an all-reduce moves them twice.

sharded     (fully_shard) every micro-batch gathers the weights twice, for the forward and for the
            backward; the last one scatters the gradients, or each does (`Cluster.scattered`). With
            overlap, a forward takes the longer of computing and gathering, and so does a backward
replicated  (DDP) the last backward of a step sums the gradients. With overlap, only what is longer
            than that backward counts

A pipeline exchanges once per step in either case, at its last backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstep.core.ragged import FloatArray
from evenstep.core.recipe import Topology
from evenstep.report.simulation.cluster import Cluster
from evenstep.report.simulation.pipeline import FORWARD


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds that ranks need to gather all weights once, and to sum or scatter all gradients."""

    gather: float
    reduce: float
    sharded: bool
    overlap: bool
    scattered: bool = False

    @classmethod
    def of(cls, cluster: Cluster, topology: Topology, sharded: bool) -> Exchange:
        """The exchange of the dp * cp ranks that hold the same part of the model.

        >>> from evenstep.core.cost import Cost
        >>> Exchange.of(Cluster(cost=Cost(), parameters=9 * 10**9), Topology(dp=8), True).gather
        0.035
        """
        ranks = topology.dp * topology.cp
        held = cluster.parameters / (topology.tp * topology.pp)
        bus = cluster.bus(ranks, topology.tp)
        once = held * (ranks - 1) / ranks / bus
        reduce = (4 if sharded else 8) * once
        return cls(2 * once, reduce, sharded, cluster.overlap, cluster.scattered)

    def per_wave(self, waves: FloatArray) -> FloatArray:
        """What sharded ranks wait for in each row of waves, beyond the time of computing."""
        extra = np.full(waves.shape[1], self.reduce if self.scattered else 0.0)
        extra[-1] = self.reduce
        if not self.overlap:
            return np.full(len(waves), float((2 * self.gather + extra).sum()))
        forward, backward = FORWARD * waves, (1 - FORWARD) * waves
        late = np.maximum(self.gather - forward, 0) + np.maximum(self.gather + extra - backward, 0)
        return np.asarray(late.sum(axis=1))

    def once(self, last: FloatArray) -> FloatArray:
        """What ranks wait for at the end of a step whose last backward takes `last` seconds."""
        sent = self.reduce + (self.gather if self.sharded else 0.0)
        hidden = last if self.overlap else np.zeros_like(last)
        return np.maximum(sent - hidden, 0)
