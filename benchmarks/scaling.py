"""Scaling: how the time of a plan grows with samples, ranks, limits, groups, steps and budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from benchmarks.bench import Bench
from benchmarks.lengths import draw, log_normal
from benchmarks.tables import Section, Table, Target, verdict
from benchmarks.timing import best
from evenstep import Cost, Limits, Packed, Recipe, Steps, Topology, make_plan, partition
from evenstep.core.ragged import IntArray
from evenstep.core.recipe import SyncEvery

BUDGET = 32768
COST = Cost(per_token=24576, per_pair=1)
PATIENCE_S = 60.0  # a size that would take longer is not run
SHORT_S, LONG_S = 0.2, 20.0  # shorter times are measured often, longer ones once
STEEPEST = 1.5  # exponent of the last part of a series; 2 is quadratic
PER_RANK, MANY_RANKS = 16, {16_384: 0.5, 65_536: 3.0}  # ranks: seconds
MILLIONS, EACH_MS, STATS_S = 10_000_000, 2.0, 5.0
FIRST_STEPS, GIVE_UP = 50, 4  # planned first; all are planned if these take up to 4 × EACH_MS
BUDGETS = tuple(2**power for power in range(14, 23))
BUDGET_RATIO = 2.0
SYNCS: tuple[SyncEvery, ...] = ("micro_batch", "step")

Call = Callable[[], object]


@dataclass(slots=True)
class Series:
    """The same plan at growing sizes; `prepare(size)` makes the call to time."""

    name: str
    sizes: tuple[int, ...]
    prepare: Callable[[int], Call]
    seconds: dict[int, float] = field(default_factory=dict)

    def run(self, bench: Bench) -> None:
        """Time every size, until one would take too long."""
        for size in self.sizes:
            if self._predicted(size) > PATIENCE_S:
                return
            bench.say(f"scaling, {self.name}: {size:,}")
            call = self.prepare(size)
            first = _once(call)  # this may compile
            if first < SHORT_S:
                self.seconds[size] = best(call, repeats=2).seconds
            else:
                self.seconds[size] = min(first, _once(call)) if first < LONG_S else first

    def _predicted(self, size: int) -> float:
        """The time of a size, if it grows as before, and at least as fast as the size."""
        if not self.seconds:
            return 0.0
        last = max(self.seconds)
        return self.seconds[last] * float((size / last) ** max(1.0, self.exponent or 1.0))

    @property
    def exponent(self) -> float | None:
        """Of the last two factors that ran."""
        ran = list(self.seconds.items())[-3:]
        if len(ran) < 2:
            return None
        (small, first), (large, last) = ran[0], ran[-1]
        return float(np.log(last / first) / np.log(large / small))

    @property
    def complete(self) -> bool:
        """Whether every size ran."""
        return len(self.seconds) == len(self.sizes)


def _once(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def scaling(bench: Bench) -> Section:
    """Measure the growth of planning."""
    section = Section(
        "Growth of plans",
        notes=[
            f"Packed, log-normal lengths (median 3000, σ 1.0), budget {BUDGET:,}, cost 24576·L + "
            "L², one step unless said otherwise. The exponent is that of the last three sizes: 1 "
            f"is linear, 2 quadratic; the target is {STEEPEST:g}. A size that would take more than "
            f"{PATIENCE_S:g} s is left out, and its series misses the target.",
        ],
    )
    table = Table(
        "Seconds by size",
        {
            "what grows": "",
            "sizes": "",
            "seconds": "",
            "µs per sample, last": ".2f",
            "exponent": ".2f",
            "target": "",
        },
    )
    found = list(_series(bench))
    for series in found:
        series.run(bench)
        _add(table, series)
    steep = [s for s in found if not s.complete or (s.exponent or 0.0) > STEEPEST]
    figure = f"{len(steep)} of {len(found)} steeper" + (f": {steep[0].name}" if steep else "")
    section.targets.append(Target(f"growth: exponent ≤ {STEEPEST:g}", figure, not steep))
    section.targets += _many_ranks(found)
    section.tables += [table, _budgets(bench, section)]
    if not bench.quick:
        section.tables.append(_millions(bench, section))
    return section


def _add(table: Table, series: Series) -> None:
    sizes = list(series.seconds)
    exponent = series.exponent
    met = series.complete and exponent is not None and exponent <= STEEPEST
    missing = "" if series.complete else f" (of {series.sizes[-1]:,})"
    table.add(
        series.name,
        ", ".join(f"{size:,}" for size in sizes) + missing,
        ", ".join(f"{series.seconds[size]:.3g}" for size in sizes),
        series.seconds[sizes[-1]] / sizes[-1] * 1e6,
        exponent,
        verdict(met),
    )


def _lengths(count: int) -> IntArray:
    return log_normal(count, 1.0)


def _recipe(ranks: int, sync: SyncEvery = "micro_batch") -> Recipe:
    layout, topology = Packed(max_tokens=BUDGET), Topology(dp=ranks)
    return Recipe(layout=layout, topology=topology, cost=COST, sync_every=sync)


def _series(bench: Bench) -> Iterable[Series]:
    """All series; the sizes are numbers of samples."""
    wide = bench.pick((10_000, 30_000, 100_000, 300_000, 1_000_000), (500, 1_000, 2_000))
    ranks = bench.pick((1_024, 4_096, 16_384, 65_536), (8, 16, 32))
    by_rank = tuple(PER_RANK * each for each in ranks)
    limited = bench.pick((2_000, 8_000, 20_000, 80_000), (500, 1_000, 2_000))
    grouped = bench.pick((10_000, 30_000, 100_000, 300_000), (500, 1_000, 2_000))
    stepped = bench.pick((51_200, 512_000, 2_048_000), (512, 1_024, 2_048))
    for sync in SYNCS:
        yield Series(f"samples on 64 ranks, {sync}", wide, partial(_by_samples, sync))
        yield Series(f"ranks × {PER_RANK}, {sync}", by_rank, partial(_by_ranks, sync))
    yield Series(f"ranks × {PER_RANK}, equal_sizes", by_rank[:3], _by_equal_sizes)
    yield Series(f"partition, ranks × {PER_RANK}", by_rank, _by_partition)
    for count in (1, 2, 3):
        yield Series(f"samples under {count} further limits", limited, partial(_by_limits, count))
    yield Series("samples in groups of 4 on 64 ranks", grouped, _by_groups)
    yield Series("samples in steps of 512 on 8 ranks", stepped, _by_steps)


def _by_samples(sync: SyncEvery, count: int) -> Call:
    return partial(make_plan, _lengths(count), _recipe(64, sync))


def _by_ranks(sync: SyncEvery, count: int) -> Call:
    return partial(make_plan, _lengths(count), _recipe(count // PER_RANK, sync))


def _by_equal_sizes(count: int) -> Call:
    recipe = replace(_recipe(count // PER_RANK), equal_sizes=True)
    return partial(make_plan, _lengths(count), recipe)


def _by_partition(count: int) -> Call:
    return partial(partition, COST.of_lengths(_lengths(count)), count // PER_RANK)


def _by_limits(limits: int, count: int) -> Call:
    """Columns that about half of the samples have, each with a limit that binds."""
    rng = np.random.default_rng(count)
    columns = {
        f"column{at}": np.where(rng.random(count) < 0.5, rng.integers(500, 4001, count), 0)
        for at in range(limits)
    }
    limit = Limits(columns=dict.fromkeys(columns, 8192))
    return partial(make_plan, _lengths(count), replace(_recipe(8), limits=limit), columns=columns)


def _by_groups(count: int) -> Call:
    recipe = _recipe(64)
    return partial(
        make_plan, np.minimum(_lengths(count), BUDGET // 4), recipe, groups=_fours(count)
    )


def _fours(count: int) -> IntArray:
    """[0, 0, 0, 0, 1, …]"""
    return np.arange(count) // 4


def _by_steps(count: int) -> Call:
    return partial(make_plan, _lengths(count), replace(_recipe(8), steps=Steps(samples=512)))


def _many_ranks(found: list[Series]) -> list[Target]:
    targets = []
    for ranks, limit in MANY_RANKS.items():
        size = ranks * PER_RANK
        ran = [s for s in found if s.name.startswith("ranks") and "equal" not in s.name]
        if not any(size in series.sizes for series in ran):
            continue
        times = [series.seconds.get(size) for series in ran]
        known = [seconds for seconds in times if seconds is not None]
        met = len(known) == len(times) and max(known) < limit
        figure = f"slowest {max(known):.2f} s" if len(known) == len(times) else "not run"
        promise = f"{ranks:,} ranks × {PER_RANK} in under {limit:g} s"
        targets.append(Target(promise, figure, met))
    return targets


def _budgets(bench: Bench, section: Section) -> Table:
    """The same lengths under growing budgets."""
    lengths = np.minimum(_lengths(bench.pick(4_096, 256)), BUDGETS[0])
    table = Table(
        f"ms by budget, {len(lengths):,} samples of up to {BUDGETS[0]:,} tokens on 8 ranks",
        {"sync_every": "", **{f"2^{b.bit_length() - 1}": ".2f" for b in BUDGETS}, "target": ""},
    )
    worst = 0.0
    for sync in SYNCS:
        bench.say(f"scaling, budgets, {sync}")
        recipes = [replace(_recipe(8, sync), layout=Packed(max_tokens=b)) for b in BUDGETS]
        ms = [best(partial(make_plan, lengths, recipe), repeats=2).ms for recipe in recipes]
        ratio = max(ms) / ms[0]
        worst = max(worst, ratio)
        table.add(sync, *ms, f"≤ {BUDGET_RATIO:g}×: {verdict(ratio <= BUDGET_RATIO)}")
    promise = f"budgets up to 2^22 take ≤ {BUDGET_RATIO:g}× the time of 2^14"
    section.targets.append(Target(promise, f"at most {worst:.2f}×", worst <= BUDGET_RATIO))
    return table


def _millions(bench: Bench, section: Section) -> Table:
    """Ten million lengths in steps of 512, and the statistics of their plan."""
    table = Table(
        f"{MILLIONS:,} lengths in steps of 512 on 8 ranks",
        {
            "sync_every": "",
            "lengths": ",",
            "steps": ",",
            "plan, s": ".1f",
            "ms per step": ".3f",
            "stats, s": ".2f",
        },
    )
    each, report = 0.0, 0.0
    complete = True
    for sync in SYNCS:
        lengths = draw(_lengths(100_000), MILLIONS)
        recipe = replace(_recipe(8, sync), steps=Steps(samples=512))
        first = _once(partial(make_plan, lengths[: 512 * FIRST_STEPS], recipe)) / FIRST_STEPS
        if first * 1e3 > GIVE_UP * EACH_MS:  # too slow for all of them
            complete, lengths = False, lengths[: MILLIONS // 20]

        def progress(done: int, total: int, sync: SyncEvery = sync) -> None:
            if done % 500 == 0:
                bench.say(f"scaling, {MILLIONS:,} lengths, {sync}: step {done:,} of {total:,}")

        start = time.perf_counter()
        plan = make_plan(lengths, recipe, progress=progress)
        planned = time.perf_counter() - start
        measured = _once(plan.stats)
        ms = planned / plan.num_steps * 1e3
        table.add(sync, len(lengths), plan.num_steps, planned, ms, measured)
        each, report = max(each, ms), max(report, measured)
    fewer = "" if complete else f" for {MILLIONS // 20:,}, planning all takes too long"
    section.targets += [
        Target(
            f"{MILLIONS:,} lengths: ≤ {EACH_MS:g} ms per step",
            f"{each:.2f} ms{fewer}",
            each <= EACH_MS,
        ),
        Target(
            f"{MILLIONS:,} lengths: stats in under {STATS_S:g} s",
            f"{report:.1f} s{fewer}",
            complete and report < STATS_S,
        ),
    ]
    return table
