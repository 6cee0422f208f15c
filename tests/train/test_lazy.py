"""Micro-batches are prepared lazily, a few ahead, and released; timings and counts."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenstep import Cost, MicroBatch, Packed, Padded, Recipe, Step, make_plan
from evenstep.data import FedMicroBatch
from evenstep.errors import SampleError
from evenstep.tensors import Batch, Collator, cross_entropy
from evenstep.train import Runner, run_step
from tests.internals import ComputeTime, Prefetch, result_module, runner_module
from tests.train.running import Plan, run_plan, samples_of, steps_of
from tests.train.steps import COLLATOR, LIMIT, model_of

TIMEOUT = 300.0  # seconds after which a test fails as hanging
WORK = samples_of([LIMIT] * 6, masked=0.0)


def planned(layout: Any = None) -> Step:
    """Six micro-batches of one sample each."""
    step = steps_of(Plan("planned", layout or Packed(max_tokens=LIMIT)), WORK)[0]
    assert isinstance(step, Step)
    return step


class Recording:
    """Samples that record when they are read; some wait for an event or cannot be read."""

    def __init__(self, step: Step) -> None:
        self.reads: list[int] = []
        self.wait: dict[int, threading.Event] = {}
        self.done: dict[int, threading.Event] = {}
        self.broken: int | None = None
        self.order = [micro.segments.sample.tolist()[0] for micro in step.micro_batches]

    def __getitem__(self, number: int) -> Any:
        place = self.order.index(number)
        if place in self.wait:
            assert self.wait[place].wait(TIMEOUT), f"micro-batch {place} was read too early"
        self.reads.append(place)
        if place == self.broken:
            raise SampleError(f"sample {number} cannot be read")
        if place in self.done:
            self.done[place].set()
        return WORK.samples[number]


def recorded() -> tuple[Step, Recording]:
    step = planned()
    samples = Recording(step)
    return replace(step, samples=samples), samples


def prefetching() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "evenstep-prefetch"]


# Lazy -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 1, 2, 4])
def test_the_first_forward_waits_for_no_more_than_it_needs(prefetch: int) -> None:
    step, samples = recorded()
    ran = threading.Event()
    # Reading further than allowed before the first forward would block forever.
    samples.wait = dict.fromkeys(range(prefetch + 1, 6), ran)
    reads: list[int] = []

    def forward(model: Any, batch: Any) -> Tensor:
        reads.append(len(samples.reads))
        ran.set()
        return model(batch)

    result = run_step(
        step, model_of(), cross_entropy(), collate=COLLATOR, forward=forward, prefetch=prefetch
    )
    assert len(reads) == result.num_micro_batches == 6
    for place, seen in enumerate(reads):
        assert place + 1 <= seen <= place + 1 + prefetch
    assert samples.reads == [0, 1, 2, 3, 4, 5]


def test_the_next_micro_batch_is_prepared_while_this_one_runs() -> None:
    step, samples = recorded()
    samples.done = {place: threading.Event() for place in range(6)}
    places = iter(range(6))

    def forward(model: Any, batch: Any) -> Tensor:
        place = next(places)
        if place < 5:
            assert samples.done[place + 1].wait(TIMEOUT), "nothing was prepared meanwhile"
        return model(batch)

    run_step(step, model_of(), cross_entropy(), collate=COLLATOR, forward=forward)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("mode", ["deferred", "per_micro_batch"])
def test_no_more_than_prefetch_and_one_batches_are_alive(prefetch: int, mode: Any) -> None:
    made: list[weakref.ref[Batch]] = []
    alive: list[int] = []

    def collate(micro: MicroBatch, samples: Any) -> Batch:
        # The next one is alive too while it is prepared.
        alive.append(1 + sum(batch() is not None for batch in made))
        batch = COLLATOR(micro, samples)
        made.append(weakref.ref(batch))
        return batch

    run_step(planned(), model_of(), cross_entropy(), collate=collate, prefetch=prefetch, mode=mode)
    assert len(alive) == 6
    assert max(alive) <= prefetch + 1
    assert all(batch() is None for batch in made)


# Threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [0, 1, 5])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_an_error_of_the_source_is_raised_in_its_turn_and_leaves_no_thread(
    broken: int, prefetch: int
) -> None:
    step, samples = recorded()
    samples.broken = broken
    ran: list[int] = []

    def forward(model: Any, batch: Any) -> Tensor:
        ran.append(1)
        return model(batch)

    with pytest.raises(SampleError, match="cannot be read"):
        run_step(
            step, model_of(), cross_entropy(), collate=COLLATOR, forward=forward,
            prefetch=prefetch,
        )  # fmt: skip
    assert len(ran) == broken
    assert not prefetching()


class OddError(Exception):
    """An error of the user's own."""


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("where", ["read", "collate", "fed"])
def test_an_error_while_preparing_keeps_its_type_and_names_micro_batch_and_samples(
    where: str, prefetch: int
) -> None:
    step, samples = recorded()
    at, error = samples.order[2], OddError("what is this")

    def collate(micro: MicroBatch, samples: Any) -> Batch:
        if where != "read" and at in micro.segments.sample:
            raise error
        return COLLATOR(micro, samples)

    class Broken:
        def __getitem__(self, number: int) -> Any:
            if where == "read" and number == at:
                raise error
            return WORK.samples[number]

    runner = Runner(model=model_of(), loss=cross_entropy(), collate=collate, prefetch=prefetch)

    def run() -> Any:
        if where == "fed":
            return runner.run_fed((FedMicroBatch(*item, {}) for item in step), number=7)
        return runner.run(replace(step, samples=Broken(), number=7))

    with pytest.raises(OddError, match="what is this") as caught:
        run()
    assert caught.value is error
    total = "" if where == "fed" else " of 6"
    assert error.__notes__[-1] == (
        f"while preparing micro-batch 2{total} of step 7 on rank 0 (1 x 8 slots, 1 segments of "
        f"samples {at})"
    )
    assert error.__notes__[:-1] == [f"while reading sample {at}"] * (where == "read")
    assert not prefetching()


def test_an_error_of_a_source_names_the_position() -> None:
    def items() -> Any:
        yield 0
        raise OddError("what is this")

    for ahead in (0, 2):
        prefetched = iter(Prefetch(items(), ahead))
        assert next(prefetched) == 0
        with pytest.raises(OddError) as caught:
            next(prefetched)
        assert caught.value.__notes__ == ["while preparing item 1"]


def test_an_error_of_the_model_names_the_micro_batch_and_leaves_no_thread() -> None:
    places = iter(range(6))

    def forward(model: Any, batch: Any) -> Tensor:
        if next(places) == 2:
            raise ValueError("what is this")
        return model(batch)

    with pytest.raises(ValueError, match="what is this") as caught:
        run_step(planned(), model_of(), cross_entropy(), collate=COLLATOR, forward=forward)
    # The error, and with it every frame of the step, is still held here.
    assert not prefetching()
    (note,) = caught.value.__notes__
    assert note.startswith("in micro-batch 2 of 6 of step 0 on rank 0 (1 x 8 slots, 1 segments of")


def test_stopping_early_leaves_no_thread() -> None:
    items = iter(Prefetch(iter(range(100)), ahead=3))
    assert [next(items) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert prefetching()
    items.close()
    assert not prefetching()


def test_prefetching_keeps_order_and_measures_time() -> None:
    for ahead in (0, 1, 7):
        prefetch = Prefetch(iter(range(20)), ahead)
        assert list(prefetch) == list(range(20))
        assert prefetch.preparing > 0
        assert prefetch.waited > 0


# Measures -------------------------------------------------------------------------------------


def slow(source: Step) -> Step:
    class Slow:
        def __getitem__(self, number: int) -> Any:
            time.sleep(0.002)
            return source.samples[number]

    return replace(source, samples=Slow())


class Event:
    """An event of a GPU's stream, on the host."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


@pytest.mark.parametrize("cuda", [False, True])
def test_compute_includes_preprocess_and_busy_seconds_do_not(
    cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_module, "_recorded_event", Event)
    monkeypatch.setattr(runner_module, "ComputeTime", lambda _: ComputeTime(cuda))

    def preprocess(batch: Batch) -> Batch:
        time.sleep(0.02)
        return batch

    result = run_step(
        planned(), model_of(), cross_entropy(), collate=COLLATOR, preprocess=preprocess
    )
    assert result.timings.compute >= 6 * 0.02 + (sum(result.busy) if cuda else 0.0)
    assert result.timings.compute <= result.timings.total


@pytest.mark.parametrize("prefetch", [0, 2])
def test_timings_add_up(prefetch: int) -> None:
    result = run_step(
        slow(planned()), model_of(), cross_entropy(), collate=COLLATOR, prefetch=prefetch
    )
    timings = result.timings
    parts = (timings.wait, timings.prepare, timings.compute, timings.first)
    assert all(0 < part <= timings.total for part in parts)
    assert timings.wait + timings.compute + timings.communicate <= timings.total
    assert timings.prepare >= 6 * 0.002  # sleep takes at least this long
    if not prefetch:
        assert timings.wait >= timings.prepare
    assert {f"seconds/{name}" for name in ("wait", "compute", "total")} < set(result.to_dict())


class Nothing(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(()))

    def forward(self, batch: Any) -> Tensor:
        return self.x.expand(batch.rows, batch.width, 2)


def test_real_tokens_count_and_padding_does_not() -> None:
    # Two micro-batches: 4 in 1 x 4 slots, 2 and 1 in 2 x 2.
    plan = make_plan([4, 2, 1], Recipe(layout=Padded(max_tokens=8, cut="greedy")))
    samples = [{"input_ids": [1] * n} for n in (4, 2, 1)]
    batches = [Collator()(micro, samples) for micro in plan[0, 0]]
    assert sorted((batch.rows, batch.width) for batch in batches) == [(1, 4), (2, 2)]
    cost = Cost(per_token=10, per_pair=1)
    result = run_step(
        batches, Nothing(), lambda x, batch: x.sum() * 0, cost=cost, peak_flops=1000.0
    )
    assert (result.tokens, result.slots, result.num_micro_batches) == (7, 8, 2)
    assert result.padding == pytest.approx(1 / 8)
    seconds = result.timings.total
    assert result.tokens_per_second == pytest.approx(7 / seconds)
    assert result.mfu == pytest.approx((70 + 16 + 4 + 1) / (seconds * 1000.0))
    assert result.to_dict()["mfu"] == result.mfu
    assert result.planned_imbalance is None


@pytest.mark.parametrize("cp", [1, 2])
def test_ranks_count_each_token_once_and_flops_per_rank(cp: int) -> None:
    work = samples_of([8, 7, 3, 8, 4])
    plan = Plan("planned", Packed(max_tokens=LIMIT), dp=2, cp=cp)
    cost = Cost(per_token=10, per_pair=1)
    steps = steps_of(plan, work, known=True)
    ran = run_plan(plan, steps, cost=cost, peak_flops=1000.0)
    flops = sum(10 * n + n * n for n in (8, 7, 3, 8, 4))
    for each in ran:
        result, seconds = each.result, each.result.timings.total
        assert result.tokens_per_second == pytest.approx(30 / seconds)
        assert result.mfu == pytest.approx(flops / (2 * cp) / (seconds * 1000.0))
        micros = [m for step in steps if isinstance(step, Step) for m in step.micro_batches]
        slots = sum(micro.slots for micro in micros)
        assert result.padding == pytest.approx(1 - 30 / slots)
        assert result.measured_imbalance >= 1.0
        first = steps[0]
        assert isinstance(first, Step)
        assert result.planned_imbalance == first.totals["imbalance_step"]


def test_no_cost_or_peak_means_no_mfu() -> None:
    runner = Runner(model=model_of(), loss=cross_entropy(), collate=COLLATOR)
    assert runner.run(planned()).mfu is None
    assert replace(runner, cost=Cost()).run(planned()).mfu is None
