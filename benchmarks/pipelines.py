"""Pipelines: one width for all micro-batches of a step, and static rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.bench import Bench
from benchmarks.instances import COSTS, distributions
from benchmarks.lengths import draw
from benchmarks.problem import time_of
from benchmarks.tables import Section, Table, Target, verdict
from evenstep import EvenstepError, Packed, Plan, Recipe, Topology, make_plan
from evenstep.core.ragged import IntArray
from evenstep.core.recipe import SyncEvery

SYNCS: tuple[SyncEvery, ...] = ("step", "micro_batch")
POINT, FEW_POINTS, FEW = 0.01, 0.05, 3  # with fewer than FEW units per pack, FEW_POINTS
GROUP = 4

# (samples, budget, topology)
PIPELINES = (
    (256, 32768, Topology(dp=4, pp=4, vpp=2)),
    (1024, 32768, Topology(dp=4, pp=4, vpp=2)),
    (128, 32768, Topology(dp=2, pp=4)),
    (512, 65536, Topology(dp=8, pp=2)),
    (512, 65536, Topology(dp=2, pp=8, vpp=2)),
    (2048, 65536, Topology(dp=8, pp=4, vpp=2, cp=2)),
)
ROWS = 4
# (samples, ranks, width)
STATIC = ((64, 4, 8192), (256, 8, 8192), (512, 16, 4096), (1024, 32, 8192), (2048, 32, 16384))


@dataclass(frozen=True, slots=True)
class Padding:
    """The padding of a plan with one width, and what cannot be avoided."""

    micro_batches: int
    per_pack: float
    """Units per micro-batch."""
    share: float
    forced: float
    """By the largest unit and this count."""
    least: float
    """By the largest unit and the best of the allowed counts."""

    @property
    def over(self) -> float:
        """Padding in addition to what is forced."""
        return self.share - self.forced

    @property
    def allowed(self) -> float:
        """The target for `over`."""
        return POINT if self.per_pack >= FEW else FEW_POINTS


def pipelines(bench: Bench) -> Section:
    """Measure padding of pipelines with one width, and static rows against simpler settings."""
    section = Section(
        "Pipelines and static rows",
        notes=[
            "Pipelines: all micro-batches of a step are as wide as the widest. Padding is forced "
            "by the largest unit (a sample, or a group of four) and by the count: the width is at "
            "least the largest unit and the mean. Over-long samples are truncated (in groups, to a "
            "quarter of the budget). Least is the padding that the best count would force.",
            f"Static rows: {ROWS} rows of one width in every micro-batch, so that only attention "
            "differs between ranks. Slower is the time over that of the faster of balance='lpt' "
            "and equal_sizes=True.",
        ],
    )
    section.tables += [_widths(bench, section), _rows(bench, section)]
    return section


def _widths(bench: Bench, section: Section) -> Table:
    table = Table(
        "Padding with equal widths",
        {
            "lengths": "",
            "samples": ",",
            "topology": "",
            "groups": "d",
            "micro-batches per rank": "d",
            "units per pack": ".1f",
            "padding": ".2%",
            "forced": ".2%",
            "over": ".2%",
            "least": ".2%",
            "target": "",
        },
    )
    found: list[Padding] = []
    for source, lengths in distributions(bench).items():
        for samples, budget, topology in bench.pick(PIPELINES, PIPELINES[:1]):
            for group in (1, GROUP):
                bench.say(f"pipelines: {samples:,} of {source}, groups of {group}")
                drawn = draw(lengths, samples, budget // group)
                measured = _padding(drawn, budget, topology, group)
                found.append(measured)
                met = verdict(measured.over <= measured.allowed)
                table.add(
                    source,
                    samples,
                    _name(topology),
                    group,
                    measured.micro_batches,
                    measured.per_pack,
                    measured.share,
                    measured.forced,
                    measured.over,
                    measured.least,
                    f"≤ {measured.allowed * 100:g} points: {met}",
                )
    for allowed, word in ((POINT, f"{FEW} or more"), (FEW_POINTS, f"fewer than {FEW}")):
        overs = [one.over for one in found if one.allowed == allowed]
        if overs:
            above = sum(over > allowed for over in overs)
            promise = f"equal widths, {word} units per pack: ≤ {allowed * 100:g} points over forced"
            figure = f"worst {max(overs) * 100:.2f} points, {above} of {len(overs)} above"
            section.targets.append(Target(promise, figure, above == 0))
    return table


def _padding(lengths: IntArray, budget: int, topology: Topology, group: int) -> Padding:
    recipe = Recipe(layout=Packed(max_tokens=budget), topology=topology, overflow="truncate")
    groups = np.arange(len(lengths)) // group
    plan = make_plan(lengths, recipe, groups=groups if group > 1 else None)
    unit, ranks = recipe.width_unit, topology.dp
    aligned = -(-lengths // topology.alignment) * topology.alignment
    sizes = np.bincount(groups, weights=aligned).astype(np.int64)
    tokens, count = int(lengths.sum()), plan.num_micro_batches // ranks

    def forced(per_rank: int) -> float:
        """The padding of this count at its least width."""
        packs = per_rank * ranks
        width = -(-max(int(sizes.max()), -(-int(sizes.sum()) // packs)) // unit) * unit
        return 1 - tokens / (packs * width)

    allowed = range(topology.multiple, count + 1, topology.multiple)
    fits = [k for k in allowed if int(sizes.sum()) <= k * ranks * budget]
    return Padding(
        count,
        len(sizes) / plan.num_micro_batches,
        1 - tokens / int(plan.slots.sum()),
        forced(count),
        min(map(forced, fits)),
    )


def _name(topology: Topology) -> str:
    """dp 4, pp 4, vpp 2."""
    sizes = {name: getattr(topology, name) for name in ("dp", "cp", "pp", "vpp")}
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def _rows(bench: Bench, section: Section) -> Table:
    table = Table(
        f"{ROWS} static rows, compared with simpler settings",
        {
            "lengths": "",
            "sync_every": "",
            "plans": "d",
            "mean over floor": ".3%",
            "slower than lpt": "d",
            "slower than equal_sizes": "d",
            "worst, times": ".4f",
        },
    )
    worst: list[float] = []
    for source, lengths in bench.corpora.items():
        for sync in SYNCS:
            bench.say(f"static rows: {source}, {sync}")
            found = [_simpler(drawn, replace(r, sync_every=sync)) for drawn, r in _static(lengths)]
            by = np.array([times for _, times in found])
            slower = (by > 1 + 1e-9).sum(axis=0)
            worst += by.max(axis=1).tolist()
            floor = float(np.mean([over for over, _ in found])) - 1
            table.add(source, sync, len(found), floor, *map(int, slower), float(by.max()))
    above = sum(times > 1 + 1e-9 for times in worst)
    promise = f"{ROWS} static rows: never slower than lpt or equal_sizes"
    much = sum(times > 1.001 for times in worst)
    figure = f"{above} of {len(worst)} slower, {much} by over 0.1 %, worst {max(worst):.4f}×"
    section.targets.append(Target(promise, figure, above == 0))
    return table


def _static(lengths: IntArray) -> Iterator[tuple[IntArray, Recipe]]:
    for samples, ranks, width in STATIC:
        for cost in COSTS.values():
            layout = Packed(rows=ROWS, pad_to=width)
            recipe = Recipe(layout=layout, topology=Topology(dp=ranks), cost=cost)
            yield draw(lengths, samples, width), recipe


def _simpler(lengths: IntArray, recipe: Recipe) -> tuple[float, tuple[float, float]]:
    """(time over the floor, time over that of lpt and of equal_sizes)."""
    plan = make_plan(lengths, recipe)
    own = time_of(plan)

    def over(setting: Recipe) -> float:
        try:
            other: Plan = make_plan(lengths, setting)
        except EvenstepError:
            return 1.0  # this setting has no plan
        return own / time_of(other)

    times = over(replace(recipe, balance="lpt")), over(replace(recipe, equal_sizes=True))
    return float(plan.stats()["time_over_floor"]), times
