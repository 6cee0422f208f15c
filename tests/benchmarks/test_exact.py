"""The optimum of small steps agrees with trying everything."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest

from benchmarks.bench import Bench
from benchmarks.contents import Small, by_subset, divided
from benchmarks.exact import exact, small_steps
from benchmarks.solver import COUNTS, fewest_micro_batches, solve
from evenstep import Cost, Packed, Padded, Recipe, Topology
from tests.internals import IntArray, SyncEvery

KINDS = ("plain", "groups", "limits", "padded")


def test_the_cost_of_a_subset_by_hand() -> None:
    assert by_subset(np.array([0, 1, 1]), np.array([5.0, 2.0, 1.0])).tolist() == [0, 5, 3, 8]


def test_contents_divided_into_micro_batches_by_hand() -> None:
    recipe = Recipe(layout=Packed(max_tokens=5), topology=Topology(dp=2))
    packs = Small(recipe, np.array([4, 2, 3])).pack_costs()

    assert packs.tolist() == [0, 4, 2, np.inf, 3, np.inf, 5, np.inf]
    assert divided(packs, 3, True)[:, -1].tolist() == [np.inf, np.inf, 9, 9]
    assert divided(packs, 3, False)[:, -1].tolist() == [np.inf, np.inf, 5, 4]


def test_a_padded_micro_batch_costs_its_rows_at_the_longest() -> None:
    recipe = Recipe(layout=Padded(max_tokens=9), cost=Cost(per_pair=1))
    packs = Small(recipe, np.array([4, 2, 3])).pack_costs()

    # [4, 2] is 2 × 4 slots, [2, 3] is 2 × 3, all three are 12
    assert packs.tolist() == [0, 20, 6, 40, 12, 40, 24, np.inf]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sync_every", ["step", "micro_batch"])
def test_the_solver_agrees_with_trying_everything(kind: str, sync_every: SyncEvery) -> None:
    pytest.importorskip("ortools")
    for small in small_steps(kind, 12):
        small = cut(small, 4, sync_every)
        times = list(every_count(small))
        found = solve(small, {}, 20.0)

        assert found is not None
        assert found.least == pytest.approx(min(times))
        saved = min(times) <= times[0] * (1 - small.recipe.saving)
        assert found.by_rule == pytest.approx(min(times) if saved else times[0])


def test_a_known_time_does_not_change_the_optimum() -> None:
    pytest.importorskip("ortools")
    syncs: tuple[SyncEvery, ...] = ("step", "micro_batch")
    for small, sync_every in product(small_steps("plain", 6), syncs):
        small = cut(small, 4, sync_every)
        count = fewest_micro_batches(small, small.pack_costs())
        best = next(every_count(small))

        free = solve(small, {}, 20.0)

        assert free is not None
        assert solve(small, {count: best}, 20.0) == free


def test_the_section_compares_every_constraint() -> None:
    pytest.importorskip("ortools")

    section = exact(Bench(corpora={}, quick=True, say=lambda line: None))

    assert len(section.tables[0].rows) == 2 * len(KINDS)
    assert len(section.targets) == 6


def cut(small: Small, samples: int, sync_every: SyncEvery) -> Small:
    """The first samples on two ranks."""
    return Small(
        replace(small.recipe, topology=Topology(dp=2), sync_every=sync_every),
        small.lengths[:samples],
        None if small.groups is None else small.groups[:samples],
        None if small.columns is None else {k: v[:samples] for k, v in small.columns.items()},
    )


def every_count(small: Small) -> Iterator[float]:
    """The least time with the fewest micro-batches per rank and more, by trying all deals."""
    found = 0
    for count in range(1, 10):
        times = [time for time in every_deal(small, count) if time is not None]
        if times:
            yield min(times)
            found += 1
        if found == COUNTS:
            return


def every_deal(small: Small, count: int) -> Iterator[float | None]:
    """The time of every deal of units to ranks and waves; None if one exceeds a bound."""
    owner, recipe = small.owner, small.recipe
    ranks, units = small.ranks, int(small.owner.max()) + 1
    fixed = recipe.cost.per_micro_batch
    costs = {
        held: micro_batch_cost(small, np.flatnonzero(np.isin(owner, held)))
        for size in range(units + 1)
        for held in combinations(range(units), size)
    }
    for cells in product(range(count * ranks), repeat=units):
        found = [
            costs[tuple(unit for unit in range(units) if cells[unit] == cell)]
            for cell in range(count * ranks)
        ]
        known = [cost + fixed for cost in found if cost is not None]
        if len(known) < len(found):
            yield None
        elif recipe.sync_every == "step":
            yield max(sum(known[rank::ranks]) for rank in range(ranks))
        else:
            yield sum(max(known[wave * ranks : (wave + 1) * ranks]) for wave in range(count))


def micro_batch_cost(small: Small, held: IntArray) -> float | None:
    """The cost of a micro-batch with these samples; None if it exceeds a bound."""
    recipe, lengths = small.recipe, small.lengths[held]
    padded = isinstance(recipe.layout, Padded)
    if len(held) == 0:
        return recipe.cost.per_token + (recipe.cost.per_pair if padded else 0.0)
    width = lengths.max()
    slots = len(held) * width if padded else lengths.sum()
    if slots > (recipe.layout.budget or 0):
        return None
    for name, most in recipe.limits.columns.items():
        assert small.columns is not None
        if small.columns[name][held].sum() > most:
            return None
    each = np.full(len(held), width) if padded else lengths
    return float(recipe.cost.of_lengths(each).sum())
