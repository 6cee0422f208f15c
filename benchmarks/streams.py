"""Measure streams: how soon the first step is out, what resuming costs, what a pool costs.

python benchmarks/streams.py            all of it, filed under benchmarks/results
python benchmarks/streams.py --quick    a small version, not filed
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
from evenstep import Packed, Recipe, Steps, Topology
from evenstep.core.micro_batch import MicroBatch
from evenstep.core.ragged import IntArray
from evenstep.core.world import World
from evenstep.data.sources.lengths import Lengths
from evenstep.data.sources.memory import InMemory
from evenstep.data.streams.planned import PlannedStream
from evenstep.data.streams.pool import Pool
from evenstep.data.streams.pooled import PooledStream
from evenstep.data.streams.position import StreamPosition
from evenstep.planning.planner import plan_step

SAMPLES, STEP, RANKS, BUDGET = 100_000_000, 64, 8, 32_768
PLACES = (10, 10_000, 1_000_000)
SOONEST, LEAST_MEMORY, SPREAD = 2.0, 1e9, 3.0

POOL, POOLED, BUDGETS, AHEAD = 64, 20_000, (8_192, 32_768), 2
SLOWEST, FULL = 20.0, 0.995
PROMISED = ("rl_rollouts_synthetic", "pretrain_mix")


_STATUS = Path("/proc/self/status")


# Planned ----------------------------------------------------------------------------------------


def planned(bench: Bench) -> Section:
    """The first step of very many samples, the ones after it, and resuming."""
    count = bench.pick(SAMPLES, 1_000_000)
    places = [place for place in PLACES if place * STEP < count]
    section = Section(
        "Planned",
        notes=[
            f"{count:,} known lengths (int32), steps of {STEP} samples, packed to {BUDGET:,} on "
            f"{RANKS} ranks. Every row is the best of three fresh processes that have imported "
            "what they need. The first step counts from handing over the lengths until a rank has "
            "its micro-batches, compiled kernels loaded from their cache included; the second "
            "time is the same once they are loaded, with another seed. Memory is how much the "
            "peak rose meanwhile; pages of mapped files are the system's to take back. The simple "
            "version draws np.random's permutation of all samples, and plans the same steps."
        ],
    )
    table = Table(
        "From lengths to steps",
        {
            "": "",
            "first step, ms": ".0f",
            "once more, ms": ".1f",
            "a later step, ms": ".3f",
            "memory, MB": ".0f",
            "of it mapped files": ".0f",
            "target": "",
        },
    )
    resumed = Table(
        "Resuming, from a cursor to the next step (ms)",
        {"": "", **{f"at step {place:,}": ".3f" for place in places}},
    )
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lengths.npy"
        corpus = next(iter(bench.corpora.values()))
        _write(path, np.minimum(corpus, BUDGET).astype(np.int32), count)
        for kind in ("mapped", "in memory", "simple"):
            bench.say(f"planned: {kind}")
            runs = [_in_a_fresh_process(kind, path, places) for _ in range(bench.pick(3, 1))]
            found[kind] = min(runs, key=lambda run: float(run["first"]))
    for kind, name in (
        ("mapped", "PlannedStream, np.memmap"),
        ("in memory", "PlannedStream, in memory"),
        ("simple", "np.random's permutation"),
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
            f"first of {count:,} samples' steps in under {SOONEST:g} s",
            f"{first:.2f} s, simple {found['simple']['first']:.1f} s",
            first < SOONEST,
        ),
        Target(
            f"with under {LEAST_MEMORY / 1e9:g} GB",
            f"{memory / 1e6:.0f} MB, simple {found['simple']['memory'] / 1e6:.0f} MB",
            memory < LEAST_MEMORY,
        ),
        Target(
            f"resuming costs the same at any step (within {SPREAD:g} times)",
            f"{spread:.1f} times",
            spread < SPREAD,
        ),
    ]
    return section


def _write(path: Path, corpus: Any, count: int) -> None:
    """A file of so many lengths drawn from a corpus, a piece at a time."""
    rng = np.random.default_rng(0)
    lengths = np.lib.format.open_memmap(path, mode="w+", dtype=np.int32, shape=(count,))
    for begin in range(0, count, 1 << 22):
        end = min(count, begin + (1 << 22))
        lengths[begin:end] = corpus[rng.integers(0, len(corpus), end - begin)]
    lengths.flush()


def _in_a_fresh_process(kind: str, path: Path, places: list[int]) -> dict[str, Any]:
    arguments = ["--measure", kind, str(path), json.dumps(places)]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), *arguments],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _measure(kind: str, path: Path, places: list[int]) -> dict[str, Any]:
    """What a fresh process measures of one way to begin."""
    lengths = np.load(path, mmap_mode=None if kind == "in memory" else "r")
    simple = kind == "simple"
    begin = _simple_steps if simple else _planned_steps
    before, mapped, start = _peak(), _mapped(), time.perf_counter()
    steps = begin(lengths, 0)
    next(steps)
    found: dict[str, Any] = {"first": time.perf_counter() - start}
    found["memory"], found["mapped"] = _peak() - before, _mapped() - mapped
    start = time.perf_counter()
    for _ in islice(steps, 200):
        pass
    found["each"] = (time.perf_counter() - start) / 200
    del steps
    start = time.perf_counter()
    next(begin(lengths, 1))
    found["again"] = time.perf_counter() - start
    found["resumed"] = [] if simple else [_resumed(lengths, place) for place in places]
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
    """All samples shuffled at once, the same steps planned."""
    order, recipe = np.random.default_rng(seed).permutation(len(lengths)), _recipe()
    for begin in range(0, len(order), STEP):
        samples = order[begin : begin + STEP]
        plan = plan_step(lengths[samples].astype(np.int64), recipe, names=samples)
        yield [micro.renumbered(samples) for micro in plan[0, 0]]


def _resumed(lengths: Any, place: int) -> float:
    """The best time from a cursor to the step behind it, on a new stream each time."""
    state = _stream(lengths).cursor(StreamPosition(0, place * STEP, place)).to_dict()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        stream = _stream(lengths)
        stream.load_state_dict(state)
        step = next(iter(stream))
        times.append(time.perf_counter() - start)
        assert step.number == place
    return min(times)


def _peak() -> int:
    """The most memory that this process has held so far, in bytes, mapped files included."""
    if _STATUS.exists():  # getrusage there counts what the parent held before this process began
        return _status("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _mapped() -> int:
    """How much of the memory is pages of files, which the system may take back at any time."""
    return _status("RssFile") if _STATUS.exists() else 0


def _status(name: str) -> int:
    lines = _STATUS.read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


# Pooled -----------------------------------------------------------------------------------------


def pooled(bench: Bench) -> Section:
    """The whole way of a sample through a pooled stream, beside a plain loop."""
    section = Section(
        "Pooled",
        notes=[
            f"{POOLED:,} samples under half the budget in memory, packed, a pool of {POOL} that "
            f"holds {AHEAD} budgets at least. Time is per sample and includes reading it, "
            "choosing, and building micro-batches with a cursor for each step. The plain "
            "loop has the same pool and cosmos-rl's rule: it reads the same samples into a list "
            "and scans it, which gives lists of samples and nothing to resume from. Fill is "
            "tokens over micro-batches times budget, the last few left out, which no longer find "
            "a full pool."
        ],
    )
    table = Table(
        f"Pool of {POOL}",
        {
            "lengths": "",
            "budget": ",d",
            "samples a step": ".1f",
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
            f"under {SLOWEST:g} µs a sample through the whole stream",
            f"slowest {max(times):.1f} µs",
            max(times) < SLOWEST,
        )
    )
    if fills:
        section.targets.append(
            Target(
                f"{' and '.join(PROMISED)}: at least {FULL:.1%} full",
                f"least {min(fills):.3%}",
                min(fills) >= FULL,
            )
        )
    rows = len(table.rows)
    section.targets.append(
        Target("as full as the plain loop or fuller", f"{above} of {rows}", above == rows)
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
    """Every micro-batch of an epoch."""
    return [micro for step in stream for micro in step.micro_batches]


def _drain_plainly(source: InMemory, budget: int) -> list[int]:
    """cosmos-rl's rule over the same samples: read, scan the pool, take what fits."""
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
    """The micro-batches for which the pool was full: all but the last ones."""
    last = POOL if len(sizes) > 4 * POOL else AHEAD + 1
    return sizes[:-last]


SECTIONS: dict[str, Callable[[Bench], Section]] = {"planned": planned, "pooled": pooled}


def main(arguments: list[str] | None = None) -> int:
    """Streams, measured."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["--measure"]:
        print(json.dumps(_measure(given[1], Path(given[2]), json.loads(given[3]))))
        return 0
    return run("streams", "Streams, measured", SECTIONS, arguments)


if __name__ == "__main__":
    sys.exit(main())
