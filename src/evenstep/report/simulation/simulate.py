"""simulate: the seconds of each step of a plan on a cluster, and where they go."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evenstep.core.measures import exchange_costs
from evenstep.core.plan import Plan
from evenstep.core.ragged import FloatArray, IntArray, sum_by
from evenstep.core.recipe import Recipe, Topology
from evenstep.errors import ConfigError
from evenstep.report.simulation.cluster import Cluster
from evenstep.report.simulation.pipeline import FORWARD, pipeline_times

PARTS = ("work", "padding", "host", "bubble", "waiting", "exchange", "update")
"""Where the time of a step goes."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Simulation:
    """Seconds of each step, mean over devices. The parts add up to `time`.

    work      on real tokens
    padding   on padding
    host      the device waits for kernels to be launched, because micro-batches are small
    bubble    a pipeline stage waits for another
    waiting   a rank waits for the slowest
    exchange  parameters and gradients, as far as they are not hidden
    update    of the weights

    >>> from evenstep import Cost, Packed, Recipe, make_plan
    >>> plan = make_plan([6, 2], Recipe(layout=Packed(max_tokens=8)))
    >>> simulate(plan, Cluster(cost=Cost(per_token=2.0))).tokens_per_second
    0.5
    """

    work: FloatArray
    padding: FloatArray
    host: FloatArray
    bubble: FloatArray
    waiting: FloatArray
    exchange: FloatArray
    update: FloatArray
    tokens: IntArray
    devices: int

    @property
    def time(self) -> FloatArray:
        """Seconds of each step."""
        return np.asarray(sum(getattr(self, part) for part in PARTS))

    @property
    def tokens_per_second(self) -> float:
        """Real tokens per second, of all devices."""
        return float(self.tokens.sum() / max(float(self.time.sum()), 1e-30))

    @property
    def imbalance(self) -> float:
        """The time of the slowest rank over the mean."""
        own = float((self.work + self.padding + self.host + self.bubble).sum())
        return 1.0 + float(self.waiting.sum()) / own if own else 1.0

    def share(self, part: str) -> float:
        """The share of a part, such as "bubble", in the time of all steps."""
        return float(getattr(self, part).sum() / max(float(self.time.sum()), 1e-30))

    def to_dict(self) -> dict[str, float]:
        """Means over steps, shares and tokens per second, for JSON."""
        time = self.time
        return {
            "num_steps": len(time),
            "devices": self.devices,
            "step_seconds": float(time.mean()) if len(time) else 0.0,
            "slowest_step_seconds": float(time.max(initial=0.0)),
            "tokens_per_second": self.tokens_per_second,
            "imbalance": self.imbalance,
            **{f"{part}_share": self.share(part) for part in PARTS},
        }


def refuse_second_work(recipe: Recipe) -> None:
    """Raise if a recipe has work that is not simulated."""
    if recipe.second_work is not None:
        raise ConfigError("the time of second_work is not simulated. Leave second_work out.")


def simulate(plan: Plan, cluster: Cluster) -> Simulation:
    """Simulate every step of a plan.

    Ranks that synchronise at every micro-batch all take the time of the slowest; otherwise they
    wait once, at the end of the step. The stages of a pipeline are equally long, and run 1F1B, or
    interleaved with vpp > 1.

    >>> from evenstep import Cost, Packed, Recipe, Topology, make_plan
    >>> plan = make_plan([6, 2], Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2)))
    >>> found = simulate(plan, Cluster(cost=Cost(per_token=1.0)))
    >>> found.time.tolist(), found.waiting.tolist(), found.work.tolist()
    ([6.0], [2.0], [4.0])
    """
    recipe, topology = plan.recipe, plan.recipe.topology
    refuse_second_work(recipe)
    seconds, own, real = _micro_batches(plan, cluster)
    transfer = 2.0 * cluster.hidden * plan.slots / (topology.cp * topology.tp) / cluster.link
    sharded = recipe.sync_every == "micro_batch"
    exchange = Exchange.of(cluster, topology, sharded)
    found = {name: np.zeros(plan.num_steps) for name in PARTS}
    for steps, micro in _groups(plan):
        parts = _steps(seconds[micro], transfer[micro], plan, exchange)
        work, filled, whole = (
            each[micro].sum(axis=2).mean(axis=1) / topology.pp for each in (real, own, seconds)
        )
        parts |= {"work": work, "padding": filled - work, "host": whole - filled}
        for name, values in parts.items():
            found[name][steps] = values
    found["update"][:] = cluster.update
    ends = plan.cell_offsets[:: plan.num_ranks]
    total = np.concatenate(([0], np.cumsum(plan.tokens)))
    return Simulation(
        tokens=np.diff(total[ends]).astype(np.int64),
        devices=topology.dp * topology.cp * topology.tp * topology.pp,
        **found,
    )


def _micro_batches(plan: Plan, cluster: Cluster) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(seconds of each micro-batch, what its slots need of them, what its real tokens need)."""
    cost, owner = cluster.cost, plan.micro_batch_of_segment
    own = plan.recipe.layout.micro_batch_costs(
        cost, plan.rows, plan.widths, owner, plan.aligned_lengths, plan.segments.behind
    )
    moved = exchange_costs(plan, cost)
    tokens = cost.of_lengths(plan.segments.length, plan.segments.behind)
    held = np.diff(plan.segment_offsets) > 0
    real = sum_by(owner, tokens, plan.num_micro_batches)
    own, real = own + moved, real + moved + np.where(held, cost.per_micro_batch, 0.0)
    return np.maximum(own, cluster.least), own, np.minimum(real, own)


def _groups(plan: Plan) -> list[tuple[IntArray, IntArray]]:
    """Steps with equally many micro-batches: (steps, their micro-batches by step, rank, wave)."""
    ranks = plan.num_ranks
    first = plan.cell_offsets[:-1].reshape(-1, ranks)
    counts = np.diff(plan.cell_offsets).reshape(-1, ranks)[:, 0] if len(first) else first[:, 0]
    found = []
    for count in np.unique(counts[counts > 0]):
        steps = np.flatnonzero(counts == count)
        found.append((steps, first[steps][:, :, None] + np.arange(count)))
    return found


def _steps(
    seconds: FloatArray, transfer: FloatArray, plan: Plan, exchange: Exchange
) -> dict[str, FloatArray]:
    """Bubble, waiting and exchange of steps; arrays are (steps, ranks, waves)."""
    topology = plan.recipe.topology
    stages, chunks = topology.pp, topology.vpp
    busy = seconds.sum(axis=2) / stages  # (steps, ranks)
    if exchange.sharded:
        waves = seconds.max(axis=1)
        ends = pipeline_times(waves, transfer.max(axis=1), stages, chunks)
        level, last = waves.sum(axis=1) / stages, waves[:, -1]
        bubble, waiting = ends - level, level - busy.mean(axis=1)
    else:
        shape = (-1, seconds.shape[2])
        ends = pipeline_times(
            seconds.reshape(shape), transfer.reshape(shape), stages, chunks
        ).reshape(busy.shape)
        bubble = (ends - busy).mean(axis=1)
        waiting = ends.max(axis=1) - ends.mean(axis=1)
        slowest = ends.argmax(axis=1)[:, None]
        last = np.take_along_axis(seconds[:, :, -1], slowest, axis=1)[:, 0]
    late = (
        exchange.per_wave(waves)
        if exchange.sharded and stages == 1
        else exchange.once((1 - FORWARD) * last / stages)
    )
    return {"bubble": bubble, "waiting": np.maximum(waiting, 0), "exchange": late}


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds that ranks need to gather all weights once, and to sum or scatter all gradients.

    What data-parallel ranks send to each other in a step, and how much of it is not hidden:
    weights are gathered in bfloat16 (2 bytes), gradients summed in float32 (4 bytes). A collective
    over n ranks moves (n - 1) / n of its bytes through each device; an all-reduce moves them twice.

    sharded     (fully_shard) every micro-batch gathers the weights twice, for the forward and for
                the backward; the last one scatters the gradients, or each does
                (`Cluster.scattered`). With overlap, a forward takes the longer of computing and
                gathering, and so does a backward
    replicated  (DDP) the last backward of a step sums the gradients. With overlap, only what is
                longer than that backward counts

    A pipeline exchanges once per step in either case, at its last backward.
    """

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
