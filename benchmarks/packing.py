"""Packing: speed compared with peers, growth with n and capacity, certified optimal packing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.bench import Bench
from benchmarks.lengths import draw
from benchmarks.peers import packer_peers
from benchmarks.tables import Section, Table, Target, verdict
from benchmarks.timing import best, fresh_memory, interleave
from evenstep import Ragged, pack
from evenstep.core.bounds import pack_bound
from evenstep.core.layout import PACKER_NAMES
from evenstep.core.ragged import IntArray

CAPACITY = 8192
OURS, FROM_LIST = "evenstep best_fit_decreasing", "evenstep, given a Python list"
RIVAL = "lightbinpack.obfd"
SPEED_UP = {10_000: 12.0, 1_000_000: 15.0}
DOUBLING = 2.2


def speed(bench: Bench) -> Section:
    """Measure packing, compared with peers; results include the assignment."""
    section = Section(
        "Packing, compared with peers",
        notes=[
            f"Lengths drawn from each corpus, truncated to the capacity of {CAPACITY:,}; results "
            "assign every item to a bin. Packers take turns of three runs; times are the best "
            "after one warm-up. Each gets its native input: an int64 array here, a Python list for "
            "lightbinpack, prtpy and plain Python, an Arrow dataset of token ids for TRL (which "
            "also copies the tokens). Ratio is the time over ours.",
            "Packers that return many lists are faster with Python's garbage collector off than in "
            "a program, where it is on. Both are shown; targets apply to every corpus.",
            "prtpy scans all bins for every item, so it runs at 1,000 only. TRL holds all tokens "
            "in memory, so it runs up to 10,000.",
        ],
    )
    columns = {
        "lengths": "",
        "n": ",",
        "packer": "",
        "bins": ",",
        "bound": ",",
        "ms": ",.3f",
        "ratio": ",.1f",
        "target": "",
        "ms, gc on": ",.3f",
        "ratio, gc on": ",.1f",
    }
    for n in bench.pick((1_000, 10_000, 1_000_000), (1_000, 10_000, 100_000)):
        table = Table(f"Packing {n:,} lengths at capacity {CAPACITY:,}", columns)
        wanted = SPEED_UP.get(n)
        ratios: dict[str, list[float]] = {"off": [], "on": []}
        more_bins: list[str] = []
        for corpus, lengths in bench.corpora.items():
            bench.say(f"packing {n:,} of {corpus}")
            rows = _race(draw(lengths, n, CAPACITY), bench)
            bound = pack_bound(draw(lengths, n, CAPACITY), CAPACITY)
            bins, ms, ms_on = rows[OURS]
            for name, (count, time, time_on) in rows.items():
                word = ""
                if name == RIVAL:
                    ratios["off"].append(time / ms)
                    if time_on and ms_on:
                        ratios["on"].append(time_on / ms_on)
                    if bins > count:
                        more_bins.append(corpus)
                    if wanted:
                        word = f"≥ {wanted:g}: {verdict(time / ms >= wanted and bins <= count)}"
                ratio_on = time_on / ms_on if time_on and ms_on else None
                cells = (corpus, n, name, count, bound, time, time / ms, word)
                table.add(*cells, time_on, ratio_on)
        section.tables.append(table)
        if wanted and ratios["off"]:
            for state, found in ratios.items():
                promise = f"{n:,} lengths: ≥ {wanted:g}× faster than {RIVAL}, gc {state}"
                mean = float(np.exp(np.log(found).mean()))
                figure = f"{mean:.1f}× (geomean; worst case {min(found):.1f}×)"
                section.targets.append(Target(promise, figure, min(found) >= wanted))
            promise = f"{n:,} lengths: no more bins than {RIVAL}"
            worse = f"more on {', '.join(more_bins)}" if more_bins else "no more on any corpus"
            section.targets.append(Target(promise, worse, not more_bins))
    section.tables.append(_own(bench))
    return section


def _race(lengths: IntArray, bench: Bench) -> dict[str, tuple[int, float, float | None]]:
    """(bins, ms, ms with gc on) of every packer that is fast enough for this many lengths."""
    n, as_list = len(lengths), lengths.tolist()
    calls: dict[str, Callable[[], Any]] = {
        OURS: lambda: pack(lengths, CAPACITY),
        FROM_LIST: lambda: pack(as_list, CAPACITY),
    }
    count: dict[str, Callable[[Any], int]] = {OURS: len, FROM_LIST: len}
    for peer in packer_peers():
        # A slow packer runs only up to its largest practical size.
        if n <= peer.largest and not (bench.quick and peer.name.startswith("trl")):
            calls[peer.name], count[peer.name] = peer.prepare(lengths, CAPACITY), peer.bins
    repeats = bench.pick(4, 2) if n >= 100_000 else bench.pick(30, 5)
    patience = bench.pick(1.5, 0.3)
    timed = interleave(calls, repeats=repeats, patience=patience)
    _assert_packed(timed[OURS].result, lengths, CAPACITY)
    counts = {name: count[name](run.result) for name, run in timed.items()}
    ms = {name: run.ms for name, run in timed.items()}
    timed.clear()  # otherwise the collector would scan these lists too
    two = {name: calls[name] for name in (OURS, RIVAL) if name in calls}
    with_gc = interleave(two, repeats=repeats, patience=patience, collector=True)
    ms_on = {name: run.ms for name, run in with_gc.items()}
    return {name: (counts[name], ms[name], ms_on.get(name)) for name in calls}


def _own(bench: Bench) -> Table:
    n = bench.pick(10_000, 2_000)
    table = Table(
        f"Our packers on {n:,} lengths",
        {
            "lengths": "",
            "packer": "",
            "bins": ",",
            "bound": ",",
            "bins / bound": ".4f",
            "ms": ",.3f",
        },
    )
    for corpus, lengths in bench.corpora.items():
        drawn = draw(lengths, n, CAPACITY)
        bound = pack_bound(drawn, CAPACITY)
        bench.say(f"our packers on {corpus}")
        calls: dict[str, Callable[[], Ragged]] = {
            name: partial(pack, drawn, CAPACITY, name) for name in PACKER_NAMES
        }
        for name, run in interleave(calls, repeats=3, patience=bench.pick(1.0, 0.2)).items():
            _assert_packed(run.result, drawn, CAPACITY)
            table.add(corpus, name, len(run.result), bound, len(run.result) / bound, run.ms)
    return table


def growth(bench: Bench) -> Section:
    """Measure time by number of lengths and by capacity."""
    section = Section(
        "Growth",
        notes=[
            "Best-fit decreasing; two threads from 2^19 lengths on. The target is a factor of at "
            f"most {DOUBLING:g} per doubling, averaged over three doublings; a single one varies "
            "by 20 % between runs.",
            "Fresh memory: sizes take turns of one run, and every array comes from the system, as "
            "in a program that packs its corpus once. Warm memory: each size runs three times in a "
            "row, so small sizes have their lengths in the cache and reuse pages for arrays up to "
            "32 MiB. Warm memory is shown for comparison and has no target.",
        ],
    )
    tables = [_by_count(bench, section, "fresh"), _by_count(bench, section, "warm")]
    section.tables += [*tables, _by_capacity(bench, section)]
    return section


def _by_count(bench: Bench, section: Section, memory: str) -> Table:
    smallest = bench.pick(1_250_000, 62_500)
    sizes = [smallest << step for step in range(4)]
    table = Table(
        f"Time by number of lengths, {memory} memory",
        {
            "lengths": "",
            **{f"{n:,}, ms": ",.1f" for n in sizes},
            **{f"×2 to {n:,}": ".2f" for n in sizes[1:]},
            "per doubling": ".2f",
        },
    )
    worst, steepest = 0.0, 0.0
    for corpus, lengths in bench.corpora.items():
        bench.say(f"growth with n on {corpus}, {memory} memory")
        with fresh_memory() if memory == "fresh" else nullcontext():
            calls = {
                str(n): partial(pack, drawn, CAPACITY)
                for n, drawn in ((n, draw(lengths, n, CAPACITY)) for n in sizes)
            }
            burst = 1 if memory == "fresh" else 3
            timed = interleave(calls, repeats=12 // burst, burst=burst, patience=12.0)
            calls.clear()
        ms = [run.ms for run in timed.values()]
        ratios = [large / small for small, large in pairwise(ms)]
        overall = float(np.exp(np.log(ratios).mean()))
        worst, steepest = max(worst, overall), max(steepest, *ratios)
        table.add(corpus, *ms, *ratios, overall)
    if memory == "fresh":
        promise = f"≤ {DOUBLING:g}× time per doubling of n, from {sizes[0]:,} to {sizes[-1]:,}"
        figure = f"at most {worst:.2f}×, worst single doubling {steepest:.2f}×"
        section.targets.append(Target(promise, figure, worst <= DOUBLING))
    return table


def _by_capacity(bench: Bench, section: Section) -> Table:
    n, large = bench.pick(1_000_000, 50_000), 131_072
    table = Table(
        f"Time by capacity, {n:,} lengths",
        {
            "lengths": "",
            f"{CAPACITY:,}, ms": ",.1f",
            f"{large:,}, ms": ",.1f",
            "ratio": ".2f",
            f"{large:,} with the same lengths, ms": ",.1f",
            "ratio, same lengths": ".2f",
            "target": "",
        },
    )
    worst = 0.0
    for corpus, lengths in bench.corpora.items():
        bench.say(f"growth with capacity on {corpus}")
        short, long = draw(lengths, n, CAPACITY), draw(lengths, n, large)
        calls = {
            "small": partial(pack, short, CAPACITY),
            "large": partial(pack, long, large),
            "same": partial(pack, short, large),
        }
        timed = interleave(calls, repeats=bench.pick(4, 2))
        small, wide, same = (timed[name].ms for name in calls)
        worst = max(worst, wide / small, same / small)
        word = f"≤ 2: {verdict(max(wide, same) <= 2 * small)}"
        table.add(corpus, small, wide, wide / small, same, same / small, word)
    promise = f"{n:,} lengths: capacity {large:,} takes ≤ 2× the time of {CAPACITY:,}"
    section.targets.append(Target(promise, f"at most {worst:.2f}×", worst <= 2))
    return table


def optimal(bench: Bench) -> Section:
    """Measure how often `optimal` reaches the lower bound on instances the size of one step."""
    sizes = bench.pick([32, 64, 128, 256, 512, 1024, 2048, 4096], [32, 256, 2048])
    capacities, seeds = (8192, 16384, 32768), bench.pick(10, 1)
    section = Section(
        "Certified optimal packing",
        notes=[
            f"{', '.join(map(str, sizes))} lengths × capacity "
            f"{', '.join(f'{c:,}' for c in capacities)} × {seeds} draws from each corpus, "
            "truncated to the capacity. Certified: as many bins as `core.bounds.pack_bound`, a "
            "lower bound at least as strong as L2. An uncertified packing may still be optimal. "
            "Times are the best of 5.",
        ],
    )
    table = Table(
        "`optimal` by corpus",
        {
            "lengths": "",
            "instances": ",",
            "certified": ",",
            "share": ".1%",
            "best-fit alone": ".1%",
            "max bins over bound": "d",
            "mean ms": ".3f",
            "max ms": ".3f",
            "target": "",
        },
    )
    misses = Table(
        "Not certified, by corpus, n and capacity",
        {
            "lengths": "",
            "n": ",",
            "capacity": ",",
            "draws": "d",
            "bins − bound": "",
            "max ms": ".3f",
        },
    )
    everything: list[tuple[int, int, float]] = []
    for corpus, lengths in bench.corpora.items():
        found: list[tuple[int, int, float]] = []
        for n in sizes:
            bench.say(f"optimal: {n:,} of {corpus}")
            for capacity in capacities:
                cell = [
                    _certify(draw(lengths, n, capacity, seed), capacity) for seed in range(seeds)
                ]
                found += cell
                over = [gap for gap, _, _ in cell if gap]
                if over:
                    gaps = ", ".join(map(str, over))
                    misses.add(corpus, n, capacity, seeds, gaps, max(ms for *_, ms in cell))
        everything += found
        _summarise(table, corpus, found)
    share, slowest = _summarise(table, "all", everything)
    section.tables += [table, misses]
    section.targets += [
        Target("optimal certified on ≥ 95 % of instances", f"{share:.1%}", share >= 0.95),
        Target("every instance under 10 ms", f"slowest {slowest:.2f} ms", slowest < 10),
    ]
    return section


def _certify(lengths: IntArray, capacity: int) -> tuple[int, int, float]:
    """(bins over the bound, bins of best-fit over the bound, ms) of one instance."""
    run = best(partial(pack, lengths, capacity, "optimal"), repeats=5)
    _assert_packed(run.result, lengths, capacity)
    bound = pack_bound(lengths, capacity)
    return len(run.result) - bound, len(pack(lengths, capacity)) - bound, run.ms


def _summarise(
    table: Table, corpus: str, found: list[tuple[int, int, float]]
) -> tuple[float, float]:
    gaps, fits, times = (np.array(column) for column in zip(*found, strict=True))
    certified, slowest = int((gaps == 0).sum()), float(times.max())
    share = certified / len(gaps)
    word = f"≥ 95 %, < 10 ms: {verdict(share >= 0.95 and slowest < 10)}"
    fit = float((fits == 0).mean())
    mean = float(times.mean())
    table.add(corpus, len(gaps), certified, share, fit, int(gaps.max()), mean, slowest, word)
    return share, slowest


def _assert_packed(bins: Ragged, lengths: IntArray, capacity: int) -> None:
    """Assert that every item is packed once and no bin is over capacity."""
    assert (np.bincount(bins.values, minlength=len(lengths)) == 1).all(), "every item once"
    assert bins.sums(lengths).max(initial=0) <= capacity, "no bin over capacity"
