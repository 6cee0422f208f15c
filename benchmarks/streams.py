"""Measure streams: time to the first step, resuming, and pooled streams.

python benchmarks/streams.py            everything, written to benchmarks/results
python benchmarks/streams.py --quick    a small version
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import Bench
from benchmarks.lengths import draw
from benchmarks.runner import ROOT, run
from benchmarks.tables import Section, Table, Target, verdict
from benchmarks.timing import interleave
from evenstep import (
    MicroBatch,
    Packed,
    PlannedStream,
    PooledStream,
    Recipe,
    Steps,
    Topology,
    World,
)
from evenstep.core.ragged import IntArray
from evenstep.data import InMemory, Lengths, Pool
from evenstep.data.planned import StreamPosition
from evenstep.planning.planner import plan_step

SAMPLES, STEP, RANKS, BUDGET = 100_000_000, 64, 8, 32_768
LATER = 200  # steps
RESUMED_AT, RESUMED = (10, 10_000, 1_000_000), 50  # steps, and how many from each on
SOONEST, LEAST_MEMORY, SPREAD = 2.0, 1e9, 3.0

POOL, POOLED, BUDGETS, AHEAD = 64, 20_000, (8_192, 32_768), 2
SLOWEST, FULL = 20.0, 0.995
PROMISED = ("rl_rollouts_synthetic", "pretrain_mix")


_STATUS = Path("/proc/self/status")


# Planned ----------------------------------------------------------------------------------------


def planned(bench: Bench) -> Section:
    """Measure the first step, later steps and resuming with very many samples."""
    count = bench.pick(SAMPLES, 1_000_000)
    numbers = [number for number in RESUMED_AT if (number + RESUMED) * STEP < count]
    section = Section(
        "Planned",
        notes=[
            f"{count:,} known lengths (int32), steps of {STEP} samples, packed to {BUDGET:,} on "
            f"{RANKS} ranks. Every figure is the best of three fresh processes, imports excluded. "
            "The first step is the time from passing the lengths until a rank has its "
            "micro-batches, including loading compiled kernels from the cache; the second time is "
            "the same with loaded kernels and another seed. Memory is the rise of the peak; the "
            "system can reclaim pages of mapped files. A later step is the mean of "
            f"{LATER}, after as many that load further kernels. The simple version draws a "
            "permutation of all samples with np.random and plans steps of the same size. Resuming "
            f"is the mean over {RESUMED} steps."
        ],
    )
    table = Table(
        "From lengths to steps",
        {
            "": "",
            "first step, ms": ".0f",
            "kernels loaded, ms": ".1f",
            "a later step, ms": ".3f",
            "memory, MB": ".0f",
            "of which mapped files, MB": ".0f",
            "target": "",
        },
    )
    resumed = Table(
        "Resuming, from a cursor to the next step (ms)",
        {"": "", **{f"at step {number:,}": ".3f" for number in numbers}},
    )
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lengths.npy"
        corpus = next(iter(bench.corpora.values()))
        _write(path, np.minimum(corpus, BUDGET).astype(np.int32), count)
        for kind in ("mapped", "in memory", "simple"):
            bench.say(f"planned: {kind}")
            runs = [_in_a_fresh_process(kind, path, numbers) for _ in range(bench.pick(3, 1))]
            found[kind] = {
                name: np.min([run[name] for run in runs], axis=0).tolist() for name in runs[0]
            }
    for kind, name in (
        ("mapped", "PlannedStream, np.memmap"),
        ("in memory", "PlannedStream, in memory"),
        ("simple", "np.random permutation"),
    ):
        it = found[kind]
        met = it["first"] < SOONEST and it["memory"] < LEAST_MEMORY
        table.add(
            name,
            it["first"] * 1e3,
            it["again"] * 1e3,
            it["each"] * 1e3,
            it["memory"] / 1e6,
            it["mapped"] / 1e6,
            "" if kind == "simple" else verdict(met),
        )
        if kind != "simple":
            resumed.add(name, *(seconds * 1e3 for seconds in it["resumed"]))
    section.tables += [table, resumed]
    ours = [found["mapped"], found["in memory"]]
    first, memory = (max(it[name] for it in ours) for name in ("first", "memory"))
    spread = max(max(it["resumed"]) / min(it["resumed"]) for it in ours)
    section.targets += [
        Target(
            f"first step of {count:,} samples in under {SOONEST:g} s",
            f"{first:.2f} s, simple {found['simple']['first']:.1f} s",
            first < SOONEST,
        ),
        Target(
            f"first step with under {LEAST_MEMORY / 1e9:g} GB",
            f"{memory / 1e6:.0f} MB, simple {found['simple']['memory'] / 1e6:.0f} MB",
            memory < LEAST_MEMORY,
        ),
        Target(
            f"resuming takes the same time at any step (within {SPREAD:g}×)",
            f"{spread:.1f}×",
            spread < SPREAD,
        ),
    ]
    return section


def _write(path: Path, corpus: Any, count: int) -> None:
    """Write `count` lengths drawn from a corpus, in chunks."""
    rng = np.random.default_rng(0)
    lengths = np.lib.format.open_memmap(path, mode="w+", dtype=np.int32, shape=(count,))
    for begin in range(0, count, 1 << 22):
        end = min(count, begin + (1 << 22))
        lengths[begin:end] = corpus[rng.integers(0, len(corpus), end - begin)]
    lengths.flush()


def _in_a_fresh_process(kind: str, path: Path, numbers: list[int]) -> dict[str, Any]:
    arguments = ["--measure", kind, str(path), json.dumps(numbers)]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), *arguments],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _measure(kind: str, path: Path, numbers: list[int]) -> dict[str, Any]:
    """Measure one kind of stream; runs in a fresh process."""
    lengths = np.load(path, mmap_mode=None if kind == "in memory" else "r")
    simple = kind == "simple"
    begin = _simple_steps if simple else _planned_steps
    before, mapped, start = _peak(), _mapped(), time.perf_counter()
    steps = begin(lengths, 0)
    next(steps)
    found: dict[str, Any] = {"first": time.perf_counter() - start}
    found["memory"], found["mapped"] = _peak() - before, _mapped() - mapped
    for _ in range(2):
        start = time.perf_counter()
        for _ in islice(steps, LATER):
            pass
        found["each"] = (time.perf_counter() - start) / LATER
    del steps
    start = time.perf_counter()
    next(begin(lengths, 1))
    found["again"] = time.perf_counter() - start
    found["resumed"] = [] if simple else [_resumed(lengths, number) for number in numbers]
    return found


def _recipe() -> Recipe:
    return Recipe(
        layout=Packed(max_tokens=BUDGET), steps=Steps(samples=STEP), topology=Topology(dp=RANKS)
    )


def _stream(lengths: Any, seed: int = 0) -> PlannedStream:
    return PlannedStream(Lengths(lengths), _recipe(), world=World(0, RANKS), seed=seed)


def _planned_steps(lengths: Any, seed: int) -> Iterator[Any]:
    return iter(_stream(lengths, seed))


def _simple_steps(lengths: Any, seed: int) -> Iterator[Any]:
    """Shuffle all samples at once and plan steps of the same size."""
    order, recipe = np.random.default_rng(seed).permutation(len(lengths)), _recipe()
    for begin in range(0, len(order), STEP):
        samples = order[begin : begin + STEP]
        plan = plan_step(lengths[samples].astype(np.int64), recipe, names=samples)
        yield [micro.renumbered(samples) for micro in plan[0, 0]]


def _resumed(lengths: Any, number: int) -> float:
    """The time from a cursor to the next step with a new stream each time, from `number` on.

    The mean over some steps, as plans differ, of the best of three times.
    """
    return float(np.mean([_resume(lengths, number + at) for at in range(RESUMED)]))


def _resume(lengths: Any, number: int) -> float:
    state = _stream(lengths).cursor(StreamPosition(0, number * STEP, number)).to_dict()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        stream = _stream(lengths)
        stream.load_state_dict(state)
        step = next(iter(stream))
        times.append(time.perf_counter() - start)
        assert step.number == number
    return min(times)


def _peak() -> int:
    """The peak memory of this process in bytes, including mapped files."""
    if _STATUS.exists():  # getrusage would include memory of the parent process
        return _status("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _mapped() -> int:
    """Memory in pages of mapped files, which the system can reclaim."""
    return _status("RssFile") if _STATUS.exists() else 0


def _status(name: str) -> int:
    lines = _STATUS.read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


# Pooled -----------------------------------------------------------------------------------------


def pooled(bench: Bench) -> Section:
    """Measure a pooled stream from sample to micro-batch, compared with a plain loop."""
    section = Section(
        "Pooled",
        notes=[
            f"{POOLED:,} samples under half the budget, in memory, packed, a pool of at least "
            f"{POOL} samples and {AHEAD} budgets. Time is per sample and includes reading, "
            "choosing, and building micro-batches with a cursor for each step. The plain loop has "
            "the same pool and cosmos-rl's rule: it reads samples into a list, scans it and "
            "returns lists of samples, without a cursor. Fill is tokens over (micro-batches × "
            "budget), without the last micro-batches, for which the pool is no longer full."
        ],
    )
    table = Table(
        f"Pool of {POOL}",
        {
            "lengths": "",
            "budget": ",d",
            "samples per step": ".1f",
            "PooledStream, µs": ".2f",
            "plain loop, µs": ".2f",
            "PooledStream, fill": ".5f",
            "plain loop, fill": ".5f",
            "target": "",
        },
    )
    times, fills, above = [], [], 0
    for name, budget, lengths in _cases(bench):
        bench.say(f"pooled: {name}, {budget:,}")
        tokens = np.zeros(budget, np.int32)
        source = InMemory([{"input_ids": tokens[:length]} for length in lengths.tolist()])
        recipe = Recipe(layout=Packed(max_tokens=budget))
        stream = PooledStream(source, recipe, pool=Pool(samples=POOL))
        timed = interleave(
            {"ours": partial(_drain, stream), "plain": partial(_drain_plainly, source, budget)},
            repeats=bench.pick(9, 1),
            burst=1,
        )
        each = {key: it.seconds / len(lengths) * 1e6 for key, it in timed.items()}
        sizes = {
            "ours": [micro.tokens for micro in timed["ours"].result],
            "plain": timed["plain"].result,
        }
        fill = {key: float(np.mean(_full_ones(it))) / budget for key, it in sizes.items()}
        promised = name.split(" ")[0] in PROMISED
        if promised:
            fills.append(fill["ours"])
        times.append(each["ours"])
        above += fill["ours"] >= fill["plain"]
        table.add(
            name,
            budget,
            len(lengths) / len(sizes["ours"]),
            each["ours"],
            each["plain"],
            fill["ours"],
            fill["plain"],
            verdict(each["ours"] < SLOWEST and (fill["ours"] >= FULL or not promised)),
        )
    section.tables.append(table)
    section.targets.append(
        Target(
            f"under {SLOWEST:g} µs per sample for the whole stream",
            f"slowest {max(times):.1f} µs",
            max(times) < SLOWEST,
        )
    )
    if fills:
        section.targets.append(
            Target(
                f"{' and '.join(PROMISED)}: at least {FULL:.1%} full",
                f"worst case {min(fills):.3%}",
                min(fills) >= FULL,
            )
        )
    rows = len(table.rows)
    section.targets.append(
        Target("at least as full as the plain loop", f"{above} of {rows}", above == rows)
    )
    return section


def _cases(bench: Bench) -> list[tuple[str, int, IntArray]]:
    """Samples under half the budget, drawn from each corpus."""
    return [
        (name, budget, draw(short, POOLED))
        for name, corpus in bench.corpora.items()
        for budget in bench.pick(BUDGETS, BUDGETS[:1])
        if len(short := corpus[corpus < budget / 2])
    ]


def _drain(stream: PooledStream) -> list[MicroBatch]:
    """All micro-batches of one epoch."""
    return [micro for step in stream for micro in step.micro_batches]


def _drain_plainly(source: InMemory, budget: int) -> list[int]:
    """Apply cosmos-rl's rule to the same samples: read, scan the pool, take what fits."""
    order = np.random.default_rng(0).permutation(len(source)).tolist()
    waiting: list[tuple[int, Any]] = []
    sizes: list[int] = []
    at, held = 0, 0
    while True:
        while (len(waiting) < POOL or held < AHEAD * budget) and at < len(order):
            sample: Any = source[order[at]]
            waiting.append((len(sample["input_ids"]), sample))
            held += waiting[-1][0]
            at += 1
        if not waiting:
            return sizes
        size, taken, rest = 0, [], []
        for entry in waiting:
            if size + entry[0] <= budget:
                size += entry[0]
                taken.append(entry[1])
            else:
                rest.append(entry)
        waiting, held = rest, held - size
        sizes.append(size)


def _full_ones(sizes: list[int]) -> list[int]:
    """The micro-batches formed from a full pool: all but the last ones."""
    last = POOL if len(sizes) > 4 * POOL else AHEAD + 1
    return sizes[:-last]


SECTIONS: dict[str, Callable[[Bench], Section]] = {"planned": planned, "pooled": pooled}


def main(arguments: list[str] | None = None) -> int:
    """Measure streams."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["--measure"]:
        print(json.dumps(_measure(given[1], Path(given[2]), json.loads(given[3]))))
        return 0
    return run("streams", "Stream benchmark", SECTIONS, arguments)


if __name__ == "__main__":
    sys.exit(main())
