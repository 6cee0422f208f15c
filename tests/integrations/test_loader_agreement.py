"""Loaders of a process group compare their streams before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evenstep import Packed, PlannedStream, PooledStream, Recipe, Steps, Topology, World
from evenstep.errors import InputError
from evenstep.integrations.dataloader import StreamLoader
from tests.train.processes import results_of

DATA = [{"input_ids": [k] * n} for k, n in enumerate([5, 3, 4, 2, 7, 1, 6, 5, 3, 4, 2, 7])]


def stream_of(kind: str, rank: int, difference: str) -> Any:
    odd = rank == 1
    data = DATA[::-1] if odd and difference == "data" else DATA
    more: dict[str, Any] = {"seed": int(odd and difference == "seed"), "world": World(rank, 2)}
    layout = Packed(max_tokens=9 if odd and difference == "recipe" else 8)
    if kind == "pooled":
        return PooledStream(data, Recipe(layout=layout, topology=Topology(dp=2)), **more)
    recipe = Recipe(layout=layout, steps=Steps(samples=4), topology=Topology(dp=2))
    return PlannedStream(data, recipe, **more)


def steps_of(rank: int, size: int, kind: str, differences: list[str]) -> list[str]:
    """What a process of the group gets with each difference, in turn."""
    found = []
    for difference in differences:
        loader = StreamLoader(stream_of(kind, rank, difference))
        if rank == 1 and difference == "position":
            loader.skip_batches(1)
        try:
            found.append(f"{len(list(loader))} steps")
        except InputError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("kind", ["planned", "pooled"])
def test_ranks_that_disagree_are_an_error_on_all_of_them(tmp_path: Path, kind: str) -> None:
    differences = ["seed", "data", "recipe", "position", "none"]
    for found in results_of(2, steps_of, tmp_path, kind, differences):
        assert all("rank 1 runs another step than rank 0" in text for text in found[:-1]), found
        assert found[-1] == ("3 steps" if kind == "planned" else found[-1])
        assert int(found[-1].split()[0]) > 1


def alone_steps(rank: int, size: int) -> int:
    """Rank 0 iterates a stream of one rank, as for an evaluation."""
    if rank:
        return 0
    recipe = Recipe(layout=Packed(max_tokens=8), steps=Steps(samples=4))
    return len(list(StreamLoader(PlannedStream(DATA, recipe))))


def test_a_stream_of_one_rank_is_not_compared(tmp_path: Path) -> None:
    assert results_of(2, alone_steps, tmp_path) == [3, 0]
