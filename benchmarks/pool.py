"""Measure choosing micro-batches from a pool.

python benchmarks/pool.py            everything, written to benchmarks/results
python benchmarks/pool.py --quick    a small version
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import Bench
from benchmarks.lengths import draw
from benchmarks.runner import run
from benchmarks.tables import Section, Table, Target, verdict
from benchmarks.timing import best, interleave
from evenstep.core.ragged import IntArray, offsets_of
from evenstep.planning.pool import PADDED, STRATEGIES, Room, select

POOL, SAMPLES, BUDGETS = 64, 20_000, (8_192, 32_768, 131_072)
REFILLS = (0, 1, 1.5, 2)
AHEAD = 2  # a pool holds at least this many budgets of tokens
FULL, SLOWEST = 0.995, 20.0

# The lengths in a micro-batch, and how many micro-batches its oldest sample waited.
Seen: TypeAlias = tuple[IntArray, int]

PROMISED = ("rl_rollouts_synthetic", "pretrain_mix")


def packed(bench: Bench) -> Section:
    """Compare subset sums with greedy choice, compiled and in plain Python."""
    section = Section("Packed", notes=[_rule("packed"), _how()])
    table = Table(
        f"Pool of {POOL}",
        {
            "lengths": "",
            "budget": ",d",
            "greedy, fill": ".5f",
            "subset_sum, fill": ".5f",
            "subset_sum, µs": ".2f",
            "of which choosing, µs": ".2f",
            "greedy, µs": ".2f",
            "plain Python, µs": ".2f",
            "longest wait": "d",
            "target": "",
        },
    )
    ahead = Table(
        f"Fill of subset_sum by refill rule, pool of {POOL}",
        {"lengths": "", "budget": ",d"}
        | {f"≥ {least:g} budgets" if least else "samples only": ".5f" for least in REFILLS},
    )
    fills, times, above = [], [], 0
    for name, budget, lengths in _cases(bench):
        bench.say(f"packed: {name}, {budget:,}")
        room = Room(capacity=budget)
        timed = interleave(
            {
                "subset_sum": partial(drain, "subset_sum", lengths, room),
                "greedy": partial(drain, "greedy", lengths, room),
                "plain": partial(drain_plainly, lengths.tolist(), budget),
            },
            repeats=bench.pick(3, 1),
            burst=1,
        )
        choosing = best(partial(_choose, _pools(lengths, room), room)).seconds
        ours, greedy, plain = (timed[key].result for key in ("subset_sum", "greedy", "plain"))
        assert plain == greedy, "plain Python and greedy choose the same"
        each = {key: timed[key].seconds / timed[key].result[2] * 1e6 for key in timed}
        full, fit = (tokens / (count * budget) for tokens, count, _ in (ours, greedy))
        seen: list[Seen] = []
        drain("subset_sum", lengths, room, seen=seen)
        promised = name.split(" ")[0] in PROMISED
        if promised:
            fills.append(full)
        times.append(each["subset_sum"])
        above += full > fit
        table.add(
            name,
            budget,
            fit,
            full,
            each["subset_sum"],
            choosing / ours[2] * 1e6,
            each["greedy"],
            each["plain"],
            max(wait for _, wait in seen),
            verdict(full > fit and (full >= FULL or not promised)),
        )
        refilled = [drain("subset_sum", lengths, room, ahead=least) for least in REFILLS]
        ahead.add(name, budget, *(tokens / (count * budget) for tokens, count, _ in refilled))
    section.tables += [table, ahead]
    rows = len(table.rows)
    if fills:
        section.targets.append(
            Target(
                f"{' and '.join(PROMISED)}: at least {FULL:.1%} full",
                f"worst case {min(fills):.3%}",
                min(fills) >= FULL,
            )
        )
    section.targets += [
        Target("fuller than greedy on every corpus", f"{above} of {rows}", above == rows),
        Target(
            f"under {SLOWEST:g} µs per sample, including removal and refill",
            f"slowest {max(times):.2f} µs",
            max(times) < SLOWEST,
        ),
    ]
    return section


def padded(bench: Bench) -> Section:
    """Compare the strategies for padded layouts."""
    section = Section(
        "Padded",
        notes=[
            _rule("padded"),
            "Fill: real tokens over the budget. Real: real tokens over used slots.",
        ],
    )
    table = Table(
        f"Pool of {POOL}",
        {
            "lengths": "",
            "budget": ",d",
            "strategy": "",
            "fill": ".4f",
            "real": ".4f",
            "µs per sample": ".2f",
        },
    )
    for name, budget, lengths in _cases(bench):
        bench.say(f"padded: {name}, {budget:,}")
        room = Room(capacity=budget)
        timed = interleave(
            {strategy: partial(drain, strategy, lengths, room) for strategy in PADDED},
            repeats=bench.pick(2, 1),
            burst=1,
        )
        for strategy, each in timed.items():
            tokens, count, samples = each.result
            seen: list[Seen] = []
            drain(strategy, lengths, room, seen=seen)
            slots = sum(int(pool.max()) * len(pool) for pool, _ in seen)
            table.add(
                name,
                budget,
                strategy,
                tokens / (count * budget),
                tokens / slots,
                each.seconds / samples * 1e6,
            )
    section.tables.append(table)
    return section


def drain(
    strategy: str,
    lengths: IntArray,
    room: Room,
    *,
    ahead: float = AHEAD,
    seen: list[Seen] | None = None,
) -> tuple[int, int, int]:
    """Choose while the pool can be refilled; return (tokens, micro-batches, samples)."""
    ends = offsets_of(lengths)
    waiting = np.empty(0, np.int64)  # sample ids
    read = tokens = count = held = 0
    since: list[int] = []  # for each sample, the number of micro-batches formed before it was read
    while True:
        # Refill to enough samples and enough tokens.
        stop = max(read, read + POOL - len(waiting))
        missing = int(ahead * room.capacity) - held
        if stop > len(lengths) or ends[stop] - ends[read] < missing:
            stop = int(np.searchsorted(ends, ends[read] + missing))
        if stop > len(lengths) or read + POOL - len(waiting) > len(lengths):
            return tokens, count, read - len(waiting)
        if stop > read:
            waiting = np.concatenate((waiting, np.arange(read, stop)))
            held += int(ends[stop] - ends[read])
            since += [count] * (stop - read)
            read = stop
        sizes = lengths[waiting]
        chosen = select(strategy, sizes, room)
        size = int(sizes[chosen].sum())
        if seen is not None:
            seen.append((sizes[chosen], count - min(since[i] for i in waiting[chosen])))
        tokens, held, count = tokens + size, held - size, count + 1
        stays = np.ones(len(waiting), np.bool_)
        stays[chosen] = False
        waiting = waiting[stays]


def drain_plainly(lengths: list[int], budget: int) -> tuple[int, int, int]:
    """Pack by cosmos-rl's rule with lists; return (tokens, micro-batches, samples)."""
    waiting: list[int] = []
    read = tokens = count = held = 0
    while True:
        while len(waiting) < POOL or held < AHEAD * budget:
            if read == len(lengths):
                return tokens, count, read - len(waiting)
            waiting.append(lengths[read])
            held += lengths[read]
            read += 1
        size, rest = 0, []
        for length in waiting:
            if size + length <= budget:
                size += length
            else:
                rest.append(length)
        waiting = rest
        tokens, held, count = tokens + size, held - size, count + 1


def _pools(lengths: IntArray, room: Room) -> list[IntArray]:
    """Every pool that subset_sum chooses from."""
    pools: list[IntArray] = []
    chooser = STRATEGIES["subset_sum"]

    def remember(sizes: IntArray, *limits: Any) -> IntArray:
        pools.append(sizes)
        return chooser(sizes, *limits)

    with patch.dict(STRATEGIES, subset_sum=remember):
        drain("subset_sum", lengths, room)
    return pools


def _choose(pools: list[IntArray], room: Room) -> None:
    for sizes in pools:
        select("subset_sum", sizes, room)


def _cases(bench: Bench) -> list[tuple[str, int, IntArray]]:
    """Samples under half the budget, drawn from each corpus."""
    return [
        (name, budget, draw(short, SAMPLES))
        for name, corpus in bench.corpora.items()
        for budget in bench.pick(BUDGETS, BUDGETS[:1])
        if len(short := corpus[corpus < budget / 2])
    ]


def _rule(layout: str) -> str:
    return (
        f"{SAMPLES:,} samples under half the budget, {layout}. Before each choice the pool is "
        f"refilled to at least {POOL} samples and {AHEAD} budgets of tokens. Measurement ends when "
        "that is no longer possible."
    )


def _how() -> str:
    return (
        "Fill is tokens over (micro-batches × budget). Times are per sample and include refill and "
        "removal. Plain Python scans a list by cosmos-rl's rule and removes in the same scan; the "
        "compiled strategies also make several numpy calls per micro-batch. The longest wait is in "
        "micro-batches, for subset_sum."
    )


SECTIONS: dict[str, Callable[[Bench], Section]] = {"packed": packed, "padded": padded}


def main(arguments: list[str] | None = None) -> int:
    """Measure choosing from a pool."""
    return run("pool", "Pool benchmark", SECTIONS, arguments)


if __name__ == "__main__":
    sys.exit(main())
