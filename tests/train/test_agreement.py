"""Ranks that would run different data stop at the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenstep import Cost, Packed, PlannedStream, Recipe, Step, Steps, Topology, World
from evenstep.data import InMemory
from evenstep.errors import InputError
from evenstep.tensors import cross_entropy
from evenstep.testing import run_ranks
from evenstep.train import Collective, Distributed, Runner
from tests.train.processes import results_of
from tests.train.steps import model_of

LENGTHS = [5, 3, 4, 2, 7, 1, 6, 5, 3, 4, 2, 7]


def samples(order: list[int] | None = None) -> InMemory:
    found = [{"input_ids": np.full(n, k % 5)} for k, n in enumerate(LENGTHS)]
    return InMemory(found if order is None else [found[k] for k in order])


def stream(
    rank: int, source: InMemory | None = None, changes: dict[str, Any] | None = None, **more: Any
) -> PlannedStream:
    recipe = Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2), steps=Steps(samples=4))
    recipe = replace(recipe, **(changes or {}))
    return PlannedStream(source or samples(), recipe, world=World(rank, 2), **more)


def later(rank: int) -> PlannedStream:
    found = stream(rank)
    found.skip_batches(rank)
    return found


DIFFERENCES: dict[str, Callable[[int], PlannedStream]] = {
    "seed": lambda rank: stream(rank, seed=rank),
    "order of files": lambda rank: stream(rank, samples([*range(12)][:: 1 - 2 * rank])),
    "recipe": lambda rank: stream(rank, changes={"cost": Cost(per_pair=rank)}),
    "cursor": later,
    "loss tokens": lambda rank: stream(rank, loss_tokens=[n - 1 - rank for n in [9] * 12]),
}


def run_two(rank: int, collective: Collective, make: Callable[[int], PlannedStream]) -> int:
    runner = Runner(model=model_of(), loss=cross_entropy(), collective=collective)
    steps: list[Step] = list(make(rank))
    for step in steps:
        runner.run(replace(step, loss_tokens={}, totals={}))
    return len(steps)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_disagree_are_an_error_on_all_of_them(name: str) -> None:
    def rank(ranks: Collective) -> str:
        with pytest.raises(InputError, match="rank 1 runs another step than rank 0") as error:
            run_two(ranks.rank, ranks, DIFFERENCES[name])
        return str(error.value)

    first, second = run_ranks(2, rank)
    assert first == second
    assert "same data in the same order, seed, recipe and cursor" in first


def test_ranks_that_agree_run_all_steps() -> None:
    assert run_ranks(2, lambda ranks: run_two(ranks.rank, ranks, stream)) == [3, 3]


def test_ranks_without_a_fingerprint_are_not_compared() -> None:
    def rank(ranks: Collective) -> bool:
        step = next(iter(stream(ranks.rank, seed=ranks.rank)))
        own = Runner(model=model_of(), loss=cross_entropy(), collective=ranks)
        own.run(step if ranks.rank else replace(step, fingerprint=""))
        return True

    assert all(run_ranks(2, rank))


def compared(rank: int, size: int, seed_of: list[int]) -> str:
    """A process of the group below."""
    torch.manual_seed(0)
    try:
        run_two(rank, Distributed(), lambda rank: stream(rank, seed=seed_of[rank]))
    except InputError as error:
        return str(error)
    return ""


def test_processes_with_other_seeds_stop_at_their_first_step(tmp_path: Path) -> None:
    found = results_of(2, compared, tmp_path / "other", [0, 1])
    assert all("rank 1 runs another step than rank 0" in text for text in found)
    assert results_of(2, compared, tmp_path / "same", [1, 1]) == ["", ""]
