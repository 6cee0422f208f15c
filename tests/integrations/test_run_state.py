"""One state for all ranks: gathered after a step, loaded on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstep import Packed, PlannedStream, Recipe, Steps, Topology, World
from evenstep.data import Lengths
from evenstep.errors import CursorError
from evenstep.integrations.run_state import gather_state, load_gathered_state
from tests.integrations import gathered
from tests.train.processes import results_of


def states_of(size: int, steps: int) -> tuple[list[int], list[dict[str, Any]]]:
    """(samples of the first steps of all ranks, the state of each)."""
    seen, states = [], []
    for rank in range(size):
        loader = gathered.loader_of(rank, size)
        stream = loader.stream
        for step in stream:
            seen += gathered.samples_in(step)
            if step.number + 1 == steps:
                break
        states.append(stream.state_dict())
    return seen, states


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 2)])
def test_every_sample_runs_once(before: int, after: int) -> None:
    seen, states = states_of(before, 3)
    whole = gather_state(gathered.loader_of(0, before), lambda mine: states)
    for rank in range(after):
        stream = gathered.loader_of(rank, after).stream
        load_gathered_state(stream, None, lambda mine: [mine, whole])
        seen += [sample for step in stream for sample in gathered.samples_in(step)]
    assert sorted(seen) == list(range(gathered.COUNT))


def test_a_missing_rank_is_named() -> None:
    _, states = states_of(3, 2)
    loader = gathered.loader_of(0, 3)
    with pytest.raises(CursorError, match="2 ranks gave a state, but reader 1 of 3 ranks"):
        gather_state(loader, lambda mine: [states[0], states[2]])
    with pytest.raises(CursorError, match="no rank has a state to load"):
        load_gathered_state(loader, None)
    with pytest.raises(CursorError, match="ranks have different states"):
        load_gathered_state(loader, None, lambda mine: states)


def test_a_planned_stream_has_one_state_anyway() -> None:
    recipe = Recipe(layout=Packed(max_tokens=8), steps=Steps(samples=2), topology=Topology(dp=2))
    streams = [
        PlannedStream(Lengths(np.array([5, 3, 4, 2])), recipe, world=World(rank, 2))
        for rank in range(2)
    ]
    for stream in streams:
        next(iter(stream))
    states = [stream.state_dict() for stream in streams]
    state = gather_state(streams[0], lambda mine: states)
    load_gathered_state(streams[1], state)
    assert state == states[1]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_processes_gather_and_load_one_state(workers: int, tmp_path: Path) -> None:
    first = results_of(2, gathered.begin, tmp_path / "first", workers, 5)
    assert first[0][1] == first[1][1]
    rest = results_of(3, gathered.finish, tmp_path / "rest", first[0][1])
    seen = [sample for samples, _ in first for sample in samples]
    seen += [sample for samples in rest for sample in samples]
    assert sorted(seen) == list(range(gathered.COUNT))
