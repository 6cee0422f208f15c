"""Streams in torch loaders: every sample once, exact resume, and errors that are raised."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from evenstep import Packed, PlannedStream, PooledStream, Recipe, Step, Steps, Topology, World
from evenstep.data import InMemory, Iterated, Pool, merge_cursors, until_all_end
from evenstep.errors import ConfigError, CursorError, SampleError
from evenstep.integrations.dataloader import StreamDataset, StreamLoader
from evenstep.tensors import Batch, Collator
from tests.internals import Stream
from tests.train.processes import results_of

pytestmark = [
    # More workers than cores, on purpose.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


def slow(*values: Any) -> Any:
    """A parameter of `make test-slow`: it repeats another with other numbers."""
    return pytest.param(*values, marks=pytest.mark.slow)


KINDS = ("planned", "pooled")
COUNT = 40
LENGTHS = (1 + np.random.default_rng(0).integers(0, 12, COUNT)).tolist()
SOURCE = InMemory([{"input_ids": np.full(n, i)} for i, n in enumerate(LENGTHS)])
PACKED = Packed(max_tokens=24)
RECIPES = {
    "planned": Recipe(layout=PACKED, steps=Steps(samples=7)),
    "pooled": Recipe(layout=PACKED, steps=Steps(micro_batches=2)),
}


def stream_of(kind: str, source: Any = SOURCE, rank: int = 0, ranks: int = 1, **more: Any) -> Any:
    recipe = replace(RECIPES[kind], topology=Topology(dp=ranks))
    made = PlannedStream if kind == "planned" else PooledStream
    if kind == "pooled":
        more = {"pool": Pool(samples=6, tokens=30), **more}
    return made(source, recipe, world=World(rank, ranks), **more)


def content(step: Step) -> Any:
    """Everything that a trainer sees of a step."""
    return [
        (
            *(part.tolist() for part in (micro.segments.sample, micro.segments.start)),
            *(part.tolist() for part in (micro.segments.length, micro.row_offsets)),
            micro.width,
            {number: sample["input_ids"].tolist() for number, sample in samples.items()},
        )
        for micro, samples in step
    ]


def numbers(steps: list[Step]) -> list[int]:
    return [n for step in steps for m in step.micro_batches for n in m.segments.sample.tolist()]


def plain(stream: Stream, workers: int = 0, **options: Any) -> Any:
    return DataLoader(StreamDataset(stream), batch_size=None, num_workers=workers, **options)


def stateful(stream: Stream, workers: int = 0, **options: Any) -> Any:
    options = {"batch_size": None, "num_workers": workers, **options}
    return StatefulDataLoader(StreamDataset(stream), **options)


def ours(stream: Stream, workers: int = 0, **options: Any) -> StreamLoader:
    return StreamLoader(stream, num_workers=workers, **options)


LOADERS = {"plain": plain, "ours": ours, "stateful": stateful}


# Every sample once --------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loader", sorted(LOADERS))
def test_every_sample_is_yielded_once_per_epoch(loader: str, kind: str, workers: int) -> None:
    steps = list(LOADERS[loader](stream_of(kind), workers))
    assert sorted(numbers(steps)) == list(range(COUNT))
    for step in steps:
        for micro, samples in step:
            for number, length in zip(
                micro.segments.sample.tolist(), micro.segments.length.tolist(), strict=True
            ):
                assert samples[number]["input_ids"].tolist() == [number] * length


@pytest.mark.parametrize("loader", sorted(LOADERS))
@pytest.mark.parametrize(("workers", "ahead"), [slow(1, 4), (2, 1), slow(3, 2), (4, 3)])
def test_a_planned_stream_gives_the_same_steps_for_any_number_of_workers(
    loader: str, workers: int, ahead: int
) -> None:
    expected = [(step.number, content(step)) for step in stream_of("planned")]
    found = LOADERS[loader](stream_of("planned"), workers, prefetch_factor=ahead)
    assert [(step.number, content(step)) for step in found] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_prefetching_does_not_change_steps(kind: str) -> None:
    found = [
        [(step.number, content(step), step.cursor) for step in ours(stream_of(kind), 3, **ahead)]
        for ahead in ({"prefetch_factor": 1}, {"prefetch_factor": 4})
    ]
    assert found[0] == found[1]


def test_two_ranks_share_an_epoch() -> None:
    for kind in KINDS:
        loaders = [plain(stream_of(kind, rank=rank, ranks=2), 2) for rank in range(2)]
        assert sorted(numbers([s for loader in loaders for s in loader])) == list(range(COUNT))


def test_a_source_without_random_access_is_shared_by_workers() -> None:
    source = Iterated([SOURCE[i] for i in range(COUNT)], fingerprint="fixed")
    assert sorted(numbers(list(ours(stream_of("pooled", source), 4)))) == list(range(COUNT))


# Positions ----------------------------------------------------------------------------------


def resumed_everywhere(make: Any, of: Any = None) -> list[Any]:
    """Run `make()`, restore it at every state, compare; return its contents."""
    of = content if of is None else of
    loader = make()
    states, expected = [json.dumps(loader.state_dict())], []
    for step in loader:
        expected.append(of(step))
        states.append(json.dumps(loader.state_dict()))
    for done, state in enumerate(states):
        again = make()
        again.load_state_dict(json.loads(state))
        assert [of(step) for step in again] == expected[done:], f"resumed after {done} steps"
    return expected


def numbered(step: Step) -> Any:
    return step.number, step.epoch, content(step), step.cursor


@pytest.mark.parametrize(("workers", "ahead"), [(0, None), slow(1, 3), (2, 2), slow(4, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_our_loader_resumes_exactly_after_any_step(
    kind: str, workers: int, ahead: int | None
) -> None:
    def make() -> StreamLoader:
        return ours(stream_of(kind), workers, prefetch_factor=ahead)

    expected = resumed_everywhere(make, numbered)
    assert [number for number, *_ in expected] == list(range(len(expected)))


@pytest.mark.parametrize("workers", [0, 1, slow(3)])
@pytest.mark.parametrize("kind", KINDS)
def test_torchdatas_loader_resumes_exactly_by_its_own_state(kind: str, workers: int) -> None:
    resumed_everywhere(lambda: stateful(stream_of(kind), workers))


@pytest.mark.parametrize("kind", KINDS)
def test_an_endless_stream_resumes_exactly_across_epochs(kind: str) -> None:
    def make() -> StreamLoader:
        return ours(stream_of(kind, SHORT, infinite_loop=True, max_num_steps=9), 2)

    expected = resumed_everywhere(make, numbered)
    assert len(expected) == 9
    assert expected[-1][1] >= 2


SHORT = InMemory([{"input_ids": np.full(5, i)} for i in range(14)])


@pytest.mark.parametrize("kind", KINDS)
def test_torchdatas_loader_resumes_exactly_when_it_was_resumed_before(kind: str) -> None:
    expected = [content(step) for step in stateful(stream_of(kind), 2)]
    found: list[Any] = []
    state: Any = None
    while len(found) < len(expected):  # two steps, then a new process
        loader = stateful(stream_of(kind), 2)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        for taken, step in enumerate(loader, 1):
            found.append(content(step))
            if taken == 2:
                break
        state = loader.state_dict()
    assert found == expected


class Uneven:
    """Every second sample fills a micro-batch, the others are short, so workers end unevenly."""

    fingerprint = "uneven"

    def __len__(self) -> int:
        return 40

    def __getitem__(self, item: int) -> Any:
        return {"input_ids": np.full(1 if item % 3 else 24, item)}


@pytest.mark.parametrize("limit", [None, slow(8)])
def test_resuming_is_exact_when_some_workers_have_ended(limit: int | None) -> None:
    def make() -> StreamLoader:
        stream = stream_of("pooled", Uneven(), shuffle=False, max_num_steps=limit)
        return ours(stream, 3)

    expected = resumed_everywhere(make, numbered)
    assert [number for number, *_ in expected] == list(range(len(expected)))
    assert len(expected) == (limit or len(expected))


@pytest.mark.parametrize("loader", sorted(LOADERS))
@pytest.mark.parametrize("kind", KINDS)
def test_max_num_steps_is_not_exceeded(kind: str, loader: str) -> None:
    most = {"max_num_steps": 4}
    assert len(list(LOADERS[loader](stream_of(kind, **most), 3))) == 4
    assert len(list(LOADERS[loader](stream_of(kind, infinite_loop=True, **most), 3))) == 4


@pytest.mark.parametrize("after", [slow((1, 1)), (3, 1), (1, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_another_number_of_ranks_and_workers_gets_exactly_what_is_left(
    kind: str, after: tuple[int, int]
) -> None:
    # 2 ranks x 2 workers stop after any step, merge their cursors, and continue as `after`.
    loaders = [agreeing(kind, rank, 2, 2) for rank in range(2)]
    runs = [list(loader) for loader in loaders]
    starts = [loader.stream.start(2) for loader in loaders]
    for done in (0, 1, 3):
        cursors = [run[done - 1].cursor for run in runs] if done else starts
        cursor = cursors[0] if kind == "planned" else merge_cursors(cursors)
        state = json.loads(json.dumps(cursor.to_dict()))
        ranks, workers = after
        seen = [step for run in runs for step in run[:done]]
        first: list[Step] = []
        for rank in range(ranks):
            loader = agreeing(kind, rank, ranks, workers)
            loader.load_state_dict(state)
            first += list(loader)
        assert {step.number for step in first} <= set(range(done, done + len(first)))
        assert sorted(numbers(seen + first)) == list(range(COUNT))


def agreeing(kind: str, rank: int, ranks: int, workers: int) -> StreamLoader:
    """A loader of one of several ranks, which ends with its own stream."""
    return ours(stream_of(kind, rank=rank, ranks=ranks), workers, anyone=lambda mine: mine)


def test_a_workers_state_is_refused_by_another_number_of_workers() -> None:
    loader = stateful(stream_of("pooled"), 2)
    next(iter(loader))
    dataset = StreamDataset(stream_of("pooled"))
    workers = loader.state_dict()["_snapshot"]["_worker_snapshots"]
    with pytest.raises(CursorError, match="with 2 workers, but now there are 1"):
        dataset.load_state_dict(workers["worker_0"]["dataset_state"])


# Epochs -------------------------------------------------------------------------------------


# torch warns where a pooled stream, whose length is an estimate, has more steps.
@pytest.mark.filterwarnings("ignore:Length of IterableDataset:UserWarning")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loader", sorted(LOADERS))
def test_set_epoch_reaches_the_workers(loader: str, kind: str, persistent: bool) -> None:
    made = LOADERS[loader](stream_of(kind), 2, persistent_workers=persistent)
    target = made if loader == "ours" else made.dataset
    epochs = []
    for epoch in (0, 1, 0):
        target.set_epoch(epoch)
        steps = list(made)
        assert sorted(numbers(steps)) == list(range(COUNT))
        assert {step.epoch for step in steps} == {epoch}
        epochs.append([content(step) for step in steps])
    assert epochs[0] == epochs[2] != epochs[1]


def test_our_loader_counts_steps_over_epochs() -> None:
    loader = ours(stream_of("planned"), 2, persistent_workers=True)
    steps = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        steps += list(loader)
    assert [step.number for step in steps] == list(range(18))
    assert loader.state_dict()["step"] == 18


@pytest.mark.parametrize("persistent", [slow(False), True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loader", ["ours", "stateful"])
def test_a_resumed_run_sets_its_epochs_like_any_other(
    loader: str, kind: str, persistent: bool
) -> None:
    def make() -> tuple[Any, Any]:
        stream = stream_of(kind, rank=1, ranks=2)
        ended = {"anyone": lambda mine: mine} if loader == "ours" else {}
        made = LOADERS[loader](stream, 2, persistent_workers=persistent, **ended)
        return made, made if loader == "ours" else made.dataset

    made, target = make()
    expected, states = [], []
    for epoch in range(3):
        target.set_epoch(epoch)
        for step in made:
            expected.append((step.epoch, content(step)))
            states.append((epoch, json.dumps(made.state_dict())))
    for done in (1, len(states) // 2, len(states) - 1):
        begun, state = states[done - 1]
        resumed, target = make()
        resumed.load_state_dict(json.loads(state))
        found = []
        for epoch in range(begun, 3):
            target.set_epoch(epoch)
            found += [(step.epoch, content(step)) for step in resumed]
        assert found == expected[done:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_epoch_of_persistent_workers_resumes_exactly(kind: str) -> None:
    def make() -> Any:
        return stateful(stream_of(kind), 2, persistent_workers=True)

    loader = make()
    assert len(list(loader))
    loader.dataset.set_epoch(1)
    states, expected = [], []
    for step in loader:
        expected.append(content(step))
        states.append(json.dumps(loader.state_dict()))
    for done, state in enumerate(states, 1):
        again = make()
        again.load_state_dict(json.loads(state))
        assert [content(step) for step in again] == expected[done:]


def test_the_length_is_that_of_the_stream() -> None:
    for loader in LOADERS.values():
        made = loader(stream_of("planned"), 2)
        assert len(made) == len(list(made)) == 6
        assert len(loader(stream_of("planned", max_num_steps=4), 2)) == 4
        with pytest.raises(TypeError, match="no length"):
            len(loader(stream_of("planned", infinite_loop=True)))


@pytest.mark.parametrize("loader", sorted(LOADERS))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skipped", [slow(1), slow(3), 5])
def test_skip_batches_skips_exactly_those_steps(kind: str, loader: str, skipped: int) -> None:
    whole = list(LOADERS[loader](stream_of(kind, seed=2), 3))
    made = LOADERS[loader](stream_of(kind, seed=2), 3)
    (made if loader == "ours" else made.dataset).skip_batches(skipped)
    steps = list(made)
    assert [content(step) for step in steps] == [content(step) for step in whole[skipped:]]
    assert [step.number for step in steps] == [step.number for step in whole[skipped:]]


@pytest.mark.parametrize("loader", ["ours", "stateful"])
@pytest.mark.parametrize("kind", KINDS)
def test_resuming_is_exact_after_skipping(kind: str, loader: str) -> None:
    def make() -> Any:
        made = LOADERS[loader](stream_of(kind), 2)
        (made if loader == "ours" else made.dataset).skip_batches(3)
        return made

    resumed_everywhere(make)


# Starts that are set while workers run ---------------------------------------------------------


def start_elsewhere(target: Any, how: str) -> None:
    """Set another start of a stream, a loader or a dataset that was iterated once."""
    if how == "set_epoch":
        target.set_epoch(1)
    elif how == "skip_batches":
        target.skip_batches(2)
    else:
        steps = iter(stream_of("planned" if "planned" in how else "pooled"))
        states = [next(steps).cursor.to_dict() for _ in range(2)]
        target.load_state_dict(states[-1])


def seen(steps: Any) -> list[Any]:
    return [(step.epoch, step.number, content(step)) for step in steps]


@pytest.mark.filterwarnings("ignore:Length of IterableDataset:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["set_epoch", "skip_batches", "load"])
@pytest.mark.parametrize("persistent", [slow(False), True])
@pytest.mark.parametrize("of", ["stream", "loader"])
def test_our_loader_follows_any_start_that_is_set(
    kind: str, how: str, persistent: bool, of: str
) -> None:
    how = f"{how} {kind}" if how == "load" else how
    stream = stream_of(kind)
    list(stream)
    start_elsewhere(stream, how)
    expected = seen(stream)
    stream = stream_of(kind)
    loader = ours(stream, 1, persistent_workers=persistent)
    list(loader)
    start_elsewhere(stream if of == "stream" else loader, how)
    state = loader.state_dict()
    assert seen(loader) == expected
    assert state["step"] == expected[0][1]
    assert stream.state_dict() == loader.state_dict()


@pytest.mark.filterwarnings("ignore:Length of IterableDataset:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("how", "of"),
    [("set_epoch", "stream"), ("skip_batches", "dataset"), ("load", "dataset"), ("load", "stream")],
)
def test_a_start_that_running_workers_cannot_follow_is_an_error(
    kind: str, how: str, of: str
) -> None:
    how = f"{how} {kind}" if how == "load" else how
    for persistent in (False, True):
        loader = plain(stream_of(kind), 2, persistent_workers=persistent)
        first = seen(loader)
        start_elsewhere(loader.dataset if of == "dataset" else loader.dataset.stream, how)
        if persistent:
            with pytest.raises(CursorError, match="persistent workers run"):
                next(iter(loader))
        else:
            assert seen(loader) != first


@pytest.mark.filterwarnings("ignore:Length of IterableDataset:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loader", ["plain", "stateful"])
def test_skip_batches_after_set_epoch_reaches_running_workers(kind: str, loader: str) -> None:
    def second_epoch(persistent: bool) -> list[Any]:
        made = LOADERS[loader](stream_of(kind), 2, persistent_workers=persistent)
        list(made)
        made.dataset.set_epoch(1)
        made.dataset.skip_batches(1)
        made.dataset.skip_batches(2)
        return seen(made)

    assert second_epoch(True) == second_epoch(False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_after_skipping_is_not_the_one_that_was_loaded(kind: str) -> None:
    dataset, states = StreamDataset(stream_of(kind)), []
    for _ in dataset:
        states.append(dataset.state_dict())
    dataset.load_state_dict(states[0])
    dataset.skip_batches(2)
    assert dataset.state_dict()["cursor"]["step"] == states[2]["cursor"]["step"] == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loader", ["plain", "stateful"])
def test_steps_without_workers_are_counted_over_epochs(kind: str, loader: str) -> None:
    stream, made = stream_of(kind), LOADERS[loader](stream_of(kind))
    for epoch in range(2):
        stream.set_epoch(epoch)
        made.dataset.set_epoch(epoch)
        assert seen(made) == seen(stream)


# Processes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [slow("planned"), "pooled"])
def test_workers_may_be_spawned(kind: str) -> None:
    expected = [content(step) for step in ours(stream_of(kind), 1)]
    loader = ours(
        stream_of(kind), 1, multiprocessing_context="spawn", persistent_workers=True
    )  # fmt: skip
    assert [content(step) for step in loader] == expected
    loader.set_epoch(1)
    again = list(loader)
    assert {step.epoch for step in again} == {1}
    assert sorted(numbers(again)) == list(range(COUNT))


def test_collating_in_workers_gives_batches() -> None:
    source = InMemory([{"input_ids": torch.full((n,), i)} for i, n in enumerate(LENGTHS)])
    for kind in KINDS:
        steps = list(ours(stream_of(kind, source), 2, collate=Collator()))
        for step in steps:
            assert step.batches is not None
            assert len(step.batches) == len(step)
            assert all(isinstance(batch, Batch) for batch in step.batches)
            assert dict(step.samples) == {}  # type: ignore[call-overload]
        found = [batch.tokens[batch.token_mask] for step in steps for batch in step.batches or ()]
        assert torch.bincount(torch.cat(found)).tolist() == LENGTHS


class Broken:
    """Sample 31 fails in a given way."""

    fingerprint = "broken"

    def __init__(self, way: str) -> None:
        self.way = way

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, item: int) -> Any:
        if item == 31:
            if self.way == "exit":
                os._exit(3)
            if self.way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.way == "stop":
                raise StopIteration
            raise KeyError("tokens")
        return SOURCE[item]

    def lengths_of(self, items: Any) -> Any:
        return SOURCE.lengths_of(items)


@pytest.mark.parametrize("way", ["exit", "kill"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_dies_is_not_the_end_of_the_data(kind: str, way: str) -> None:
    loader = ours(stream_of(kind, Broken(way), shuffle=False), 2)
    with pytest.raises(RuntimeError, match=r"worker.*(exited unexpectedly|killed by signal)"):
        list(loader)


@pytest.mark.parametrize("way", ["stop", "raise"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_in_a_worker_names_the_sample(kind: str, way: str) -> None:
    loader = ours(stream_of(kind, Broken(way)), 2)
    with pytest.raises(SampleError, match="sample 31 cannot be read"):
        list(loader)


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_sample_is_counted_and_the_rest_is_yielded(kind: str) -> None:
    steps = list(ours(stream_of(kind, Broken("raise"), on_error="skip"), 2))
    assert sorted(numbers(steps)) == [n for n in range(COUNT) if n != 31]
    assert sum(step.lost.get("skipped", 0) for step in steps) == 1


def test_an_interrupted_loop_stops_its_workers() -> None:
    before = set(multiprocessing.active_children())

    def interrupted() -> None:
        stream = stream_of("pooled", infinite_loop=True)
        for step in ours(stream, 2, persistent_workers=True):
            if step.number == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert set(multiprocessing.active_children()) <= before


def test_an_interrupted_process_stops_its_workers() -> None:
    # Shells start commands in the background with SIGINT ignored, so the process sets it.
    code = """
        import multiprocessing, signal, time
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from tests.integrations.test_dataloader import ours, stream_of

        for step in ours(stream_of("planned", infinite_loop=True), 2):
            if step.number == 3:
                print(*(child.pid for child in multiprocessing.active_children()), flush=True)
            time.sleep(0.01)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert child.stdout is not None
    workers = [int(pid) for pid in child.stdout.readline().split()]
    error = interrupted(child)
    assert len(workers) == 2
    assert "KeyboardInterrupt" in error
    wait_for_end_of(workers)


def interrupted(child: subprocess.Popen[str]) -> str:
    """What the process says after Ctrl-C, pressed again if Python swallowed it in a destructor."""
    for _ in range(4):
        child.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return child.communicate(timeout=60)[1]
    raise AssertionError("the process goes on")


def wait_for_end_of(processes: list[int]) -> None:
    deadline = time.monotonic() + 300
    while alive := [pid for pid in processes if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"{alive} still run"
        time.sleep(0.02)


# Ends ---------------------------------------------------------------------------------------


def test_ranks_that_end_at_different_steps_need_a_process_group() -> None:
    with pytest.raises(ConfigError, match="no process group"):
        next(iter(ours(stream_of("pooled", ranks=2))))


def read_uneven(rank: int, size: int) -> tuple[int, list[int]]:
    """30 samples of 24 tokens, each a micro-batch, and 30 of one token, alternating in pairs."""
    source = InMemory([{"input_ids": np.full(24 if i % 4 < 2 else 1, i)} for i in range(60)])
    stream = stream_of("pooled", source, rank=rank, ranks=size, shuffle=False)
    steps = list(ours(stream, 2))
    assert all(len(step) == 2 for step in steps)
    assert [step.number for step in steps] == list(range(len(steps)))
    return len(steps), numbers(steps)


def test_processes_of_uneven_ranks_end_together(tmp_path: Path) -> None:
    (one, first), (other, second) = results_of(2, read_uneven, tmp_path / "ranks")
    assert one == other > 0
    assert sorted(first + second) == list(range(60))


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    before = set(multiprocessing.active_children())
    yield
    deadline = time.monotonic() + 60
    while set(multiprocessing.active_children()) - before:
        gc.collect()
        assert time.monotonic() < deadline, "workers are still there"


@pytest.mark.parametrize("kind", KINDS)
def test_two_concurrent_iterations_keep_their_own_positions(kind: str) -> None:
    expected = [step.cursor.to_dict() for step in ours(stream_of(kind), workers=2)]
    loader = ours(stream_of(kind), workers=2)
    ahead, behind = iter(loader), iter(loader)
    for _ in range(4):
        next(ahead)
    for done in range(2):
        assert next(behind).cursor.to_dict() == expected[done]
        assert next(ahead).cursor.to_dict() == expected[4 + done]
        assert loader.state_dict() == expected[4 + done]


@pytest.mark.parametrize("state", [None, 5, [], {}])
def test_anything_but_a_state_is_refused(state: Any) -> None:
    for loader in (StreamDataset(stream_of("pooled")), ours(stream_of("planned"))):
        with pytest.raises(CursorError, match="not an Evenstep cursor"):
            loader.load_state_dict(state)


def test_cursors_of_ended_ranks_continue_to_count_steps() -> None:
    steps = iter(stream_of("pooled", source=InMemory([{"input_ids": [1]}])))
    agreed = iter([True, True, True, False])
    found = list(until_all_end(steps, lambda mine: next(agreed), RECIPES["pooled"]))
    assert [step.cursor.step for step in found] == [1, 2, 3]


def test_empty_steps_of_an_ended_rank_are_collated() -> None:
    source = InMemory([{"input_ids": np.arange(3)}] * 3)
    recipe = replace(RECIPES["pooled"], topology=Topology(dp=2), steps=Steps(micro_batches=1))
    stream = PooledStream(source, recipe, world=World(1, 2))
    answers = iter([True, True, True, False])
    loader = StreamLoader(stream, collate=Collator(pad_token=9), anyone=lambda mine: next(answers))
    steps = list(loader)
    assert len(steps) == 3
    for step in steps:
        assert step.batches is not None
        assert len(step.batches) == len(step)
    assert steps[2].micro_batches[0].is_empty


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"in_order": False}, "in_order must be True"),
        ({"collate_fn": list}, "collate_fn"),
        ({"batch_size": 4}, "batch_size"),
        ({"shuffle": True}, "shuffle"),
        ({"pin_memory": "no"}, "pin_memory must be true or false, got 'no'"),
        ({"persistent_workers": 1}, "persistent_workers must be true or false, got 1"),
        ({"num_workers": -1}, "num_workers must be an integer"),
    ],
)
def test_options_that_conflict_with_the_stream_are_refused(option: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        StreamLoader(stream_of("planned"), **option)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_does_not_use_the_global_generator(workers: int) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    for _ in StreamLoader(stream_of("planned"), num_workers=workers):
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_pin_memory_pins_the_batches_of_a_step() -> None:
    class Pinnable:
        pinned = False

        def pin_memory(self) -> str:
            return "pinned"

    step = next(iter(stream_of("planned")))
    assert replace(step, batches=(Pinnable(), 3)).pin_memory().batches == ("pinned", 3)
    assert step.pin_memory() is step


class Noisy:
    """Samples with a random number of the process that reads them."""

    fingerprint = "noisy"

    def __len__(self) -> int:
        return 40

    def __getitem__(self, item: int) -> Any:
        return {"input_ids": [item] * 3, "noise": float(torch.rand(()))}


def test_random_numbers_of_workers_do_not_start_over_on_resume() -> None:
    def loader() -> StreamLoader:
        stream = PooledStream(
            Noisy(), Recipe(layout=Packed(max_tokens=9)), pool=Pool(samples=2, tokens=0)
        )
        return StreamLoader(stream, num_workers=1)

    def noise(step: Step) -> set[float]:
        held = (i for micro in step.micro_batches for i in micro.segments.sample.tolist())
        return {step.samples[i]["noise"] for i in held}

    first = next(iter(loader()))
    resumed = loader()
    resumed.load_state_dict(first.cursor.to_dict())
    assert not noise(next(iter(resumed))) & noise(first)
    assert noise(next(iter(loader()))) == noise(first)


@pytest.mark.parametrize("steps", [Steps(samples=7), Steps(tokens=40), Steps(micro_batches=2)])
@pytest.mark.parametrize("most", [None, 3])
def test_the_length_of_a_planned_stream_is_exact(steps: Steps, most: int | None) -> None:
    recipe = replace(RECIPES["planned"], steps=steps)
    calls: list[tuple[int, int]] = []
    loader = StreamLoader(
        PlannedStream(SOURCE, recipe, max_num_steps=most),
        progress=lambda done, total: calls.append((done, total)),
    )
    for epoch in range(2):
        loader.set_epoch(epoch)
        assert len(loader) == len(loader._dataset) == len(loader)
        found = len(list(loader))
        assert found == (len(loader) if most is None or epoch == 0 else 0)
    assert bool(calls) == (steps.samples is None)
