"""Ranks of a finite pool share what is left when the first of them ends."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Packed, Padded, PooledStream, Recipe, Topology, World
from evenstep.data import Iterated, Mapped, Pool, merge_cursors
from evenstep.errors import CursorError
from evenstep.integrations.dataloader import StreamLoader
from tests.examples import examples
from tests.rank_threads import RankThreads
from tests.train.processes import results_of

LAYOUTS = [Packed(max_tokens=20), Padded(max_tokens=20)]


def ranks_of(
    lengths: list[int], ranks: int, most: int | None = None, state: Any = None, **given: Any
) -> tuple[list[list[Any]], Any]:
    """(the sample ids of each step of each rank, the state of all ranks after the last one)."""
    threads = RankThreads(ranks)
    kind, shares, layout = given.pop("kind", Mapped), given.pop("shares", True), given.pop("layout")
    data = [{"input_ids": np.full(n, k)} for k, n in enumerate(lengths)]

    def run(rank: int) -> tuple[list[Any], Any]:
        recipe = Recipe(layout=layout, topology=Topology(dp=ranks))
        world, pool = World(rank, ranks), Pool(samples=4, tokens=0)
        stream = PooledStream(kind(data), recipe, world=world, pool=pool, **given)
        loader = StreamLoader(
            stream,
            anyone=lambda mine: any(threads.gather(rank, mine)),
            gather=(lambda value: threads.gather(rank, value)) if shares else None,
        )
        if state is not None:
            loader.load_state_dict(state)
        steps = [
            [i for micro in step.micro_batches for i in micro.segments.sample.tolist()]
            for step in islice(loader, most)
        ]
        return steps, loader.state_dict()

    found = threads.run(run)
    merged = merge_cursors([after for _, after in found]).to_dict()
    return [steps for steps, _ in found], json.loads(json.dumps(merged))


def ids(*runs: list[list[Any]]) -> list[int]:
    return sorted(i for run in runs for steps in run for step in steps for i in step)


@given(
    st.lists(st.integers(1, 20), max_size=40),
    st.integers(2, 4),
    st.integers(0, 8),
    st.integers(1, 4),
    st.sampled_from(LAYOUTS),
)
@examples(40)
def test_every_sample_runs_once_and_a_stop_anywhere_changes_nothing(
    lengths: list[int], ranks: int, stop: int, others: int, layout: Any
) -> None:
    whole, _ = ranks_of(lengths, ranks, layout=layout)
    assert ids(whole) == list(range(len(lengths)))
    assert len({len(steps) for steps in whole}) == 1
    if whole[0]:  # a rank is without work in the last step only
        assert all(step for steps in whole for step in steps[:-2])
    first, state = ranks_of(lengths, ranks, most=stop, layout=layout)
    rest, _ = ranks_of(lengths, ranks, state=state, layout=layout)
    assert [a + b for a, b in zip(first, rest, strict=True)] == whole
    elsewhere, _ = ranks_of(lengths, others, state=state, layout=layout)
    assert ids(first, elsewhere) == list(range(len(lengths)))


def test_ranks_end_together_although_lengths_are_unknown() -> None:
    lengths = np.random.default_rng(0).integers(1, 16, 600).tolist()

    def empty(**given: Any) -> tuple[int, int]:
        runs, _ = ranks_of(lengths, 8, layout=LAYOUTS[0], **given)
        assert ids(runs) == list(range(len(lengths)))
        return len(runs[0]), sum(not step for steps in runs for step in steps)

    (steps, without), (shared_steps, shared) = empty(shares=False), empty()
    assert shared < 8 < without
    assert shared_steps < steps


def test_a_sequential_source_is_not_read_again() -> None:
    opened: list[int] = []

    def items(rows: Any) -> Any:
        def read(start: int) -> Any:
            opened.append(start)
            return iter(rows[start:])

        return Iterated(read, fingerprint="x")

    lengths = [9, 1, 1, 1] * 10
    runs, _ = ranks_of(lengths, 2, layout=LAYOUTS[0], kind=items)
    assert ids(runs) == list(range(len(lengths)))
    assert len(opened) == 2


def test_skipping_past_the_end_of_a_rank_is_refused_where_ranks_share_the_rest() -> None:
    data = [{"input_ids": np.full(n, k)} for k, n in enumerate([8, 1] * 10)]
    counts = []
    for rank in (0, 1):
        recipe = Recipe(layout=Packed(max_tokens=20), topology=Topology(dp=2))
        stream = PooledStream(Mapped(data), recipe, world=World(rank, 2), shuffle=False)
        counts.append(len(list(stream)))
        loader = StreamLoader(stream, anyone=lambda mine: mine, gather=lambda value: [value])
        loader.skip_batches(counts[-1])
        assert loader.state_dict()["step"] == counts[-1]
        loader = StreamLoader(stream, anyone=lambda mine: mine, gather=lambda value: [value])
        with pytest.raises(CursorError, match=f"rank {rank} has 0 of the 1 steps to skip"):
            loader.skip_batches(1)
        loader = StreamLoader(stream, anyone=lambda mine: mine)
        loader.skip_batches(1)


def in_processes(rank: int, size: int, workers: int) -> list[Any]:
    """A process with workers of its own."""
    data = [{"input_ids": np.full(1 + 17 * k % 19, k)} for k in range(200)]
    recipe = Recipe(layout=Packed(max_tokens=20), topology=Topology(dp=size))
    stream = PooledStream(
        Mapped(data), recipe, world=World(rank, size), pool=Pool(samples=4, tokens=0)
    )
    loader = StreamLoader(stream, num_workers=workers)
    found = []
    for _ in range(2):
        found.append([(step.own_sample_ids.tolist(), step.number) for step in loader])
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_processes_with_workers_share_what_is_left(tmp_path: Path, workers: int) -> None:
    found = results_of(2, in_processes, tmp_path, workers)
    for first, again in found:
        assert first == again  # the start of the stream does not move
        assert [number for _, number in first] == list(range(len(first)))
    both = [[samples for samples, _ in each[0]] for each in found]
    assert ids(both) == list(range(200))
    assert sum(not step for steps in both for step in steps) <= 1
