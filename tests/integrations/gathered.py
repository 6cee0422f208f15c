"""What the processes of `test_run_state` run."""

from __future__ import annotations

from typing import Any

from evenstep import Packed, PooledStream, Recipe, Topology, World
from evenstep.data import Mapped, Pool
from evenstep.integrations.dataloader import StreamLoader
from evenstep.integrations.run_state import gather_state, load_gathered_state

COUNT = 61


def loader_of(rank: int, size: int, workers: int = 0) -> StreamLoader:
    source = Mapped([{"input_ids": [i] * (1 + i % 7)} for i in range(COUNT)])
    recipe = Recipe(layout=Packed(max_tokens=9), topology=Topology(dp=size))
    stream = PooledStream(source, recipe, world=World(rank, size), pool=Pool(samples=4, tokens=0))
    return StreamLoader(stream, num_workers=workers)


def samples_in(step: Any) -> list[int]:
    return [i for micro in step.micro_batches for i in micro.segments.sample.tolist()]


def begin(rank: int, size: int, workers: int, steps: int) -> tuple[list[int], dict[str, Any]]:
    """(samples of the first steps, the state of all ranks)."""
    seen: list[int] = []
    loader = loader_of(rank, size, workers)
    for step in loader:
        seen += samples_in(step)
        if step.number + 1 == steps:
            break
    return seen, gather_state(loader)


def finish(rank: int, size: int, state: dict[str, Any]) -> list[int]:
    """The samples of all further steps. Only rank 0 has the state."""
    loader = loader_of(rank, size)
    load_gathered_state(loader, state if rank == 0 else None)
    return [sample for step in loader for sample in samples_in(step)]
