"""Measure running steps: lazy preparation, overlap, and overhead over a hand-written loop.

python benchmarks/steps.py            everything, written to benchmarks/results
python benchmarks/steps.py --quick    a small version
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import Bench
from benchmarks.runner import run
from benchmarks.tables import Section, Table, Target
from benchmarks.timing import best, interleave
from evenstep import MicroBatch, Packed, PlannedStream, Recipe, Step
from evenstep.data import InMemory
from evenstep.demo.decoder import Decoder, DecoderShape
from evenstep.integrations.dataloader import StreamLoader
from evenstep.tensors import Batch, Collator, cross_entropy
from evenstep.train import run_step

LENGTH, TOGETHER, VOCABULARY = 64, 8, 512  # tokens per sample, samples per micro-batch
SLOWEST, LEAST = 1.15, 0.9
SMALL = DecoderShape(vocab=VOCABULARY, hidden=64, layers=2, heads=4, kv_heads=2, ffn=128)
TINY = DecoderShape(vocab=32, hidden=8, layers=1, heads=2, kv_heads=1, ffn=8)
COLLATE = Collator()


@dataclass(frozen=True)
class Slow:
    """Samples that take `seconds` each to read."""

    samples: Any
    seconds: float

    def __getitem__(self, number: int) -> Any:
        time.sleep(self.seconds)
        return self.samples[number]


def stream_of(
    micro_batches: int, length: int = LENGTH, vocabulary: int = VOCABULARY
) -> PlannedStream:
    """An endless stream of steps with this many full micro-batches and known loss tokens."""
    rng = np.random.default_rng(0)
    count = micro_batches * TOGETHER
    samples = [{"input_ids": rng.integers(0, vocabulary, length)} for _ in range(count)]
    return PlannedStream(
        InMemory(samples),
        Recipe(layout=Packed(max_tokens=TOGETHER * length)),
        loss_tokens=np.full(count, length - 1),
        infinite_loop=True,
    )


def step_of(micro_batches: int, length: int = LENGTH, vocabulary: int = VOCABULARY) -> Step:
    """The first step of such a stream."""
    step = next(iter(stream_of(micro_batches, length, vocabulary)))
    assert len(step) == micro_batches
    return step


def eager(step: Step, model: Any, on_first: Callable[[], None]) -> None:
    """Read and collate the whole step, count its labels, then run it."""
    batches = [COLLATE(micro, samples) for micro, samples in step]
    labels = sum(int((batch.labels != -100).sum()) for batch in batches)
    loss = cross_entropy()
    for number, batch in enumerate(batches):
        if number == 0:
            on_first()
        (loss(model(batch), batch).loss / labels).backward()


def lazy(step: Step, model: Any, on_first: Callable[[], None], **options: Any) -> None:
    """Run the step with run_step, which prepares one micro-batch at a time."""
    ran: list[bool] = []

    def forward(model: Any, batch: Any) -> Any:
        if not ran:
            on_first()
            ran.append(True)
        return model(batch)

    run_step(step, model, cross_entropy(), forward=forward, **options)


def until_first(way: Callable[..., None], step: Step, model: Any) -> float:
    """Seconds from the call to the first forward."""
    began, seen = time.perf_counter(), []
    way(step, model, lambda: seen.append(time.perf_counter() - began))
    model.zero_grad()
    return float(seen[0])


def first(bench: Bench) -> Section:
    """Measure the time to the first forward."""
    each = 0.004
    section = Section(
        "First forward",
        notes=[
            f"Reading a sample takes {each * 1e3:g} ms; a micro-batch holds {TOGETHER} samples of "
            f"{LENGTH} tokens. Eager reads and collates the whole step first. Best of several runs."
        ],
    )
    table = Table(
        "Milliseconds from the call to the first forward",
        {"micro-batches": "d", "eager": ".1f", "lazy": ".1f", "eager / lazy": ".2f",
         "eager, whole step": ".1f", "lazy, whole step": ".1f"},
    )  # fmt: skip
    model, kept = Decoder(SMALL), []
    for count in bench.pick((1, 2, 4, 8, 16, 32), (1, 4)):
        bench.say(f"first forward: {count}")
        step = step_of(count)
        step = replace(step, samples=Slow(step.samples, each))
        waits = {
            way.__name__: min(until_first(way, step, model) for _ in range(bench.pick(3, 1)))
            for way in (eager, lazy)
        }
        totals = {
            way.__name__: best(partial(way, step, model, lambda: None), repeats=1).ms
            for way in (eager, lazy)
        }
        ratio = waits["eager"] / waits["lazy"]
        kept.append(ratio / count)
        table.add(
            count, waits["eager"] * 1e3, waits["lazy"] * 1e3, ratio,
            totals["eager"], totals["lazy"],
        )  # fmt: skip
    section.tables.append(table)
    section.targets.append(
        Target(
            f"first forward ≥ {LEAST:g}·n times sooner with n micro-batches",
            f"worst case {min(kept):.2f}·n",
            min(kept) >= LEAST,
        )
    )
    return section


def collating(micro: MicroBatch, samples: Any, times: int) -> Batch:
    """Collate several times, as preparation that keeps Python busy."""
    for _ in range(times - 1):
        COLLATE(micro, samples)
    return COLLATE(micro, samples)


def alone(step: Step, collate: Callable[[MicroBatch, Any], Batch]) -> None:
    """Only prepare the micro-batches."""
    for micro, samples in step:
        collate(micro, samples)


def by_worker(collate: Callable[[MicroBatch, Any], Batch], model: Any, count: int) -> float:
    """Mean seconds per step when a worker process prepares."""
    loader = StreamLoader(stream_of(count), collate=collate, num_workers=1, prefetch_factor=2)
    with closing(cast(Generator[Step], iter(loader))) as steps:
        return mean_of(lambda: lazy(next(steps), model, lambda: None))


def with_busy_core(collate: Callable[[MicroBatch, Any], Batch], model: Any, count: int) -> float:
    """Mean seconds per step while another process prepares without handing anything over.

    This is the time of compute on a machine with a second busy core.
    """
    ready = step_of(count).collated(COLLATE)
    neighbour = get_context("fork").Process(target=forever, args=(collate, count), daemon=True)
    neighbour.start()
    try:
        return mean_of(lambda: lazy(ready, model, lambda: None, prefetch=0))
    finally:
        neighbour.kill()
        neighbour.join()


def forever(collate: Callable[[MicroBatch, Any], Batch], count: int) -> None:
    """Prepare until the process is killed."""
    step = step_of(count)
    while True:
        alone(step, collate)


def mean_of(call: Callable[[], None]) -> float:
    """Mean seconds of six consecutive calls, after two warm-up calls."""
    for _ in range(2):
        call()
    began, several = time.perf_counter(), 6
    for _ in range(several):
        call()
    return (time.perf_counter() - began) / several


def overlap(bench: Bench) -> Section:
    """Measure steps with as much preparation as compute."""
    count = bench.pick(24, 8)
    section = Section(
        "Overlap",
        notes=[
            f"Steps of {count} micro-batches of {TOGETHER * LENGTH} tokens, one torch thread. "
            f"Preparation takes as long as compute, either by sleeping, like reading from a disk "
            f"or a network, or by collating the same batch repeatedly. Repeated collating holds "
            f"Python's lock, so a thread cannot hide it and its target applies to a `StreamLoader` "
            f"worker (means of six steps; compute is timed next to a second busy process, because "
            f"two busy cores are slower than one). Collating once is shown without a target. "
            f"With one micro-batch ahead, the first preparation cannot overlap, so "
            f"{(count + 1) / count:.3f} is the best possible ratio."
        ],
    )
    table = Table(
        "Milliseconds per step, best of several runs",
        {"preparation": "", "ahead": "", "prepare alone": ".1f", "compute alone": ".1f",
         "run_step": ".1f", "over the longer": ".3f"},
    )  # fmt: skip
    model, step = Decoder(SMALL), step_of(count)
    ready = step.collated(COLLATE)
    compute = partial(lazy, ready, model, lambda: None, prefetch=0)
    ratios: dict[str, float] = {}
    per_micro = best(compute, repeats=bench.pick(3, 1)).seconds / count
    one = best(partial(alone, step, COLLATE)).seconds / count
    sleeping = replace(step, samples=Slow(step.samples, (per_micro - one) / TOGETHER))
    times = max(1, round(per_micro / one))
    ways: dict[str, tuple[Step, Callable[[MicroBatch, Any], Batch]]] = {
        "sleeping": (sleeping, COLLATE),
        f"collating {times} times": (step, partial(collating, times=times)),
        "collating once": (step, COLLATE),
    }
    for name, (source, collate) in ways.items():
        for prefetch in (0, 1, 2):
            bench.say(f"overlap: {name}, {prefetch}")
            timed = interleave(
                {
                    "prepare": partial(alone, source, collate),
                    "compute": compute,
                    "both": partial(
                        lazy, source, model, lambda: None, collate=collate, prefetch=prefetch
                    ),
                },
                repeats=bench.pick(15, 1),
                burst=1,
                patience=30.0,
            )
            larger = max(timed["prepare"].seconds, timed["compute"].seconds)
            ratio = timed["both"].seconds / larger
            row = (timed["prepare"].ms, timed["compute"].ms, timed["both"].ms, ratio)
            table.add(name, str(prefetch), *row)
            if name == "sleeping" and prefetch == 1:
                ratios[f"{name}, one ahead"] = ratio
        if name.endswith("times"):
            bench.say(f"overlap: {name}, in a worker")
            pairs = [
                (with_busy_core(collate, model, count), by_worker(collate, model, count))
                for _ in range(bench.pick(5, 1))
            ]
            busy, took = (min(times) for times in zip(*pairs, strict=True))
            larger = max(timed["prepare"].seconds, busy)
            ratios[f"{name}, in a worker"] = took / larger
            table.add(name, "a worker", timed["prepare"].ms, busy * 1e3, took * 1e3, took / larger)
    section.tables.append(table)
    for name, ratio in ratios.items():
        promise = f"{name}: under {SLOWEST}× the longer of the two"
        section.targets.append(Target(promise, f"{ratio:.3f}×", ratio < SLOWEST))
    return section


def by_hand(batches: list[Batch], model: Any) -> None:
    """A plain loop; the labels are counted beforehand."""
    loss, labels = cross_entropy(), len(batches) * TOGETHER * (LENGTH // 8 - 1)
    for batch in batches:
        (loss(model(batch), batch).loss / labels).backward()


def overhead(bench: Bench) -> Section:
    """Measure the overhead of run_step over a hand-written loop."""
    count = 32
    section = Section(
        "Overhead",
        notes=[
            f"Steps of {count} collated micro-batches of {TOGETHER} × {LENGTH // 8} tokens, with a "
            f"tiny model ({TINY.layers} layer of {TINY.hidden} units), so that compute is minimal."
        ],
    )
    model = Decoder(TINY)
    ready = step_of(count, LENGTH // 8, TINY.vocab).collated(COLLATE)
    assert ready.batches is not None
    batches = list(ready.batches)
    calls = {
        "hand-written": partial(by_hand, batches, model),
        "run_step, known, no prefetch": partial(lazy, ready, model, lambda: None, prefetch=0),
        "run_step, known": partial(lazy, ready, model, lambda: None),
        "run_step, deferred": partial(lazy, ready, model, lambda: None, mode="deferred"),
    }
    timed = interleave(calls, repeats=bench.pick(15, 2))
    table = Table(
        "Microseconds per micro-batch, best of several runs",
        {"": "", "µs": ".1f", "over hand-written, µs": ".1f", "ratio": ".3f"},
    )
    hand = timed["hand-written"].seconds
    for name, each in timed.items():
        scale = 1e6 / count
        more = (each.seconds - hand) * scale
        table.add(name, each.seconds * scale, more, each.seconds / hand)
    section.tables.append(table)
    return section


SECTIONS = {"first": first, "overlap": overlap, "overhead": overhead}


def main(arguments: list[str] | None = None) -> int:
    """Measure running steps."""
    torch.set_num_threads(1)
    return run("steps", "Step benchmark", SECTIONS, arguments)


if __name__ == "__main__":
    sys.exit(main())
