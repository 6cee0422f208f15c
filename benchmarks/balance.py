"""Balance: evenness compared with bounds and other algorithms, and time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.bench import Bench
from benchmarks.lengths import draw, log_normal
from benchmarks.peers import installed
from benchmarks.tables import Section, Table, Target, verdict
from benchmarks.timing import best, interleave
from evenstep import Cost, partition
from evenstep.core.bounds import makespans
from evenstep.core.ragged import FloatArray, IntArray

COSTS = {
    "L": Cost.tokens(),
    "24576·L + L²": Cost(per_token=24576, per_pair=1),
    "L²": Cost(per_token=0, per_pair=1),
}
EVEN, OF_DIFFERENCING = 1.001, 1.001


def balance(bench: Bench) -> Section:
    """Measure evenness over many instances, and time on three sizes."""
    section = Section(
        "Balance",
        notes=[
            "Figures are the load of the largest part over the mean load (max/mean). Two lower "
            "bounds: the mean and the largest item; and the stronger fact that j + 1 of the "
            "j·k + 1 largest items share a part. For cost L the mean is rounded up to an integer.",
        ],
    )
    section.tables += [_evenness(bench, section), _speed(bench, section)]
    if installed("prtpy"):
        section.tables.append(_peers(bench))
    return section


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One instance: max/mean of each algorithm and of both bounds."""

    refined: float
    lpt: float
    differencing: float
    bound: float
    floor: float
    ms: float


def _evenness(bench: Bench, section: Section) -> Table:
    parts, ratios = bench.pick((8, 64), (8, 64)), bench.pick((8, 16, 32, 64, 128), (8, 32))
    seeds = bench.pick(4, 1)
    table = Table(
        f"Evenness: n/k of {', '.join(map(str, ratios))}, {seeds} draws each",
        {
            "lengths": "",
            "cost": "",
            "k": "d",
            "instances": "d",
            "max item ≤ mean": "d",
            "of these ≤ 1.001": "d",
            "floor ≤ 1.001": "d",
            "of these max/mean ≤ 1.001": "d",
            "worst max/mean of these": ".5f",
            "refined/LPT": ".5f",
            "refined/KK": ".5f",
            "target": "",
        },
    )
    everything: list[_Outcome] = []
    for corpus, lengths in _corpora(bench).items():
        for label, cost in COSTS.items():
            bench.say(f"balance: {corpus}, cost {label}")
            for k in parts:
                found = [
                    _outcome(cost.of_lengths(draw(lengths, n, seed=seed)), k, label == "L")
                    for n in (ratio * k for ratio in ratios)
                    for seed in range(seeds)
                ]
                everything += found
                _add(table, corpus, label, k, found)
    _add(table, "all", "", None, everything)
    _judge(section, everything)
    return table


def _add(table: Table, corpus: str, label: str, k: int | None, found: list[_Outcome]) -> None:
    simple = [o for o in found if o.bound <= 1]
    allowed = [o for o in found if o.floor <= EVEN]
    even = [o for o in allowed if o.refined <= EVEN]
    over_lpt = max(o.refined / o.lpt for o in found)
    over_kk = max(o.refined / o.differencing for o in found)
    table.add(
        corpus,
        label,
        k,
        len(found),
        len(simple),
        sum(o.refined <= EVEN for o in simple),
        len(allowed),
        len(even),
        max((o.refined for o in allowed), default=None),
        over_lpt,
        over_kk,
        verdict(len(even) == len(allowed) and over_lpt <= 1 + 1e-12 and over_kk <= OF_DIFFERENCING),
    )


def _judge(section: Section, found: list[_Outcome]) -> None:
    simple = [o for o in found if o.bound <= 1]
    allowed = [o for o in found if o.floor <= EVEN]
    over_lpt = max(o.refined / o.lpt for o in found)
    over_kk = max(o.refined / o.differencing for o in found)
    for promise, instances in (
        ("max/mean ≤ 1.001 where no item exceeds the mean", simple),
        ("max/mean ≤ 1.001 where the stronger bound allows it", allowed),
    ):
        even = sum(o.refined <= EVEN for o in instances)
        worst = max((o.refined for o in instances), default=1.0)
        figure = f"{even} of {len(instances)}, worst {worst:.5f}"
        section.targets.append(Target(promise, figure, even == len(instances)))
    section.targets += [
        Target("never worse than LPT", f"at most {over_lpt:.6f}×", over_lpt <= 1 + 1e-12),
        Target(
            "within 0.1 % of Karmarkar–Karp",
            f"at most {over_kk:.6f}×",
            over_kk <= OF_DIFFERENCING,
        ),
    ]


def _speed(bench: Bench, section: Section) -> Table:
    table = Table(
        "Time",
        {
            "lengths": "",
            "cost": "",
            "n": ",",
            "k": ",",
            "algorithm": "",
            "max/mean": ".6f",
            "bound/mean": ".6f",
            "ms": ",.3f",
            "target": "",
        },
    )
    for n, k, limit, label in (
        (8192, 64, 3.0, "24576·L + L²"),
        (8192, 64, 3.0, "L"),
        (100_000, 1024, 150.0, "24576·L + L²"),
    ):
        slowest = 0.0
        if bench.quick and n > 8192:
            continue
        for corpus, lengths in _corpora(bench).items():
            bench.say(f"balance: {n:,} of {corpus} on {k}")
            costs = COSTS[label].of_lengths(draw(lengths, n))
            calls: dict[str, Callable[[], Any]] = {
                name: partial(partition, costs, k, name)
                for name in ("refined", "lpt", "karmarkar_karp")
            }
            timed = interleave(calls, repeats=bench.pick(6, 2), patience=bench.pick(1.0, 0.2))
            slowest = max(slowest, timed["refined"].ms)
            bound = float(makespans(costs[None], k)[0]) / (costs.sum() / k)
            for name, run in timed.items():
                word = f"< {limit:g}: {verdict(run.ms < limit)}" if name == "refined" else ""
                largest = _largest(costs, run.result, k)
                table.add(corpus, label, n, k, name, largest, bound, run.ms, word)
        promise = f"{n:,} items on {k:,} ranks in under {limit:g} ms, cost {label}"
        section.targets.append(Target(promise, f"slowest {slowest:.2f} ms", slowest < limit))
    return table


def _peers(bench: Bench) -> Table:
    """Compare with greedy and Karmarkar–Karp of prtpy on a small instance."""
    import prtpy
    from prtpy.partitioning.greedy import greedy
    from prtpy.partitioning.karmarkar_karp import kk

    n, k = bench.pick((1024, 64), (128, 8))
    label = "24576·L + L²"
    table = Table(
        f"Compared with prtpy: {n:,} items, k = {k}, cost {label}",
        {"lengths": "", "algorithm": "", "max/mean": ".6f", "floor/mean": ".6f", "ms": ",.3f"},
    )
    for corpus, lengths in _corpora(bench).items():
        bench.say(f"balance, prtpy: {corpus}")
        costs = COSTS[label].of_lengths(draw(lengths, n))
        items = dict(enumerate(costs.tolist()))
        calls: dict[str, Callable[[], Any]] = {
            name: partial(partition, costs, k, name)
            for name in ("refined", "lpt", "karmarkar_karp")
        }
        for name, algorithm in (("prtpy greedy", greedy), ("prtpy kk", kk)):
            calls[name] = partial(prtpy.partition, algorithm=algorithm, numbins=k, items=items)
        floor = _floor(costs, k, False) / (costs.sum() / k)
        for name, run in interleave(calls, repeats=2, patience=0.5).items():
            if name.startswith("prtpy"):
                sums = [sum(items[item] for item in part) for part in run.result]
                largest = max(sums) / (sum(sums) / k)
            else:
                largest = _largest(costs, run.result, k)
            table.add(corpus, name, largest, floor, run.ms)
    return table


def _corpora(bench: Bench) -> dict[str, IntArray]:
    return {**bench.corpora, "log-normal, σ 0.6": log_normal(100_000, 0.6)}


def _outcome(costs: FloatArray, k: int, whole: bool) -> _Outcome:
    mean = float(costs.sum()) / k
    run = best(partial(partition, costs, k, "refined"), repeats=1)
    return _Outcome(
        refined=_largest(costs, run.result, k),
        lpt=_largest(costs, partition(costs, k, "lpt"), k),
        differencing=_largest(costs, partition(costs, k, "karmarkar_karp"), k),
        bound=float(makespans(costs[None], k)[0]) / mean,
        floor=_floor(costs, k, whole) / mean,
        ms=run.ms,
    )


def _largest(costs: FloatArray, part: IntArray, k: int) -> float:
    sums = np.bincount(part, weights=costs, minlength=k)
    assert len(part) == len(costs), "every item in a part"
    assert len(sums) == k, "no part beyond k"
    return float(sums.max() / (costs.sum() / k))


def _floor(costs: FloatArray, k: int, whole: bool) -> float:
    """A lower bound on the largest part.

    Of the j·k + 1 largest items, some part gets at least j + 1; their j + 1 smallest are a bound.
    """
    mean = float(costs.sum()) / k
    largest = max(np.ceil(mean) if whole else mean, float(costs.max()))
    total = np.concatenate(([0.0], np.cumsum(np.sort(costs)[::-1])))
    j = np.arange(1, (len(costs) - 1) // k + 1)
    shared = total[j * k + 1] - total[j * k - j]
    return float(max(largest, shared.max(initial=0.0)))
