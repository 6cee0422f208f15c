"""No plan is better than its floor says any plan can be."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Cost, Packed, Padded, Plan, Recipe, Topology, make_plan
from evenstep.errors import ConfigError, EvenstepError
from evenstep.testing import Case, cases
from tests.examples import examples
from tests.internals import PACKER_NAMES, Balance, Floor, Floors, SyncEvery, step_times
from tests.internals import CutName as Cut

MORE = 1 + 1e-9


def floors(plan: Plan) -> list[Floor]:
    """The floor of each step."""
    return Floors(plan).of_steps()


def times(plan: Plan) -> list[float]:
    """The modelled time of each step."""
    return list(map(float, step_times(plan)))


def alternatives(recipe: Recipe) -> Iterator[Recipe]:
    """The recipe with every other packer, cut and balance."""
    layout = recipe.layout
    changes: list[dict[str, Any]] = [{"packer": name} for name in (None, *PACKER_NAMES)]
    if isinstance(layout, Padded):
        changes = [{"cut": cut} for cut in (None, *get_args(Cut))]
    for change, balance in product(changes, get_args(Balance)):
        with suppress(ConfigError):  # not all of them go together
            yield replace(recipe, layout=replace(layout, **change), balance=balance)


@examples(300)
@given(cases(max_samples=16))
def test_no_other_packer_cut_or_balance_is_below_the_floor(case: Case) -> None:
    try:
        plan = case.plan()
    except EvenstepError:
        return
    least, stats = floors(plan), plan.stats()
    assert stats["time_over_floor"] >= 1 / MORE
    assert stats["balance_optimal"] == all(
        time <= floor.time * MORE for time, floor in zip(times(plan), least, strict=True)
    )
    for recipe in alternatives(case.recipe):
        try:
            other = replace(case, recipe=recipe).plan()
        except EvenstepError:
            continue
        if not np.array_equal(other.step_of, plan.step_of):
            continue  # steps of micro-batches may be other steps
        held = np.diff(other.segment_offsets) > 0
        starts = other.cell_offsets[:: other.num_ranks]
        for step, (time, floor) in enumerate(zip(times(other), least, strict=True)):
            assert time * MORE >= floor.time
            micro = slice(starts[step], starts[step + 1])
            assert held[micro].sum() >= floor.packs
            assert held[micro].size >= floor.per_rank * other.num_ranks


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All ways to put items into bins: [0, 1] -> [[0, 1]] and [[0], [1]]."""
    if not items:
        yield []
        return
    first, *rest = items
    for found in partitions(rest):
        yield [[first], *found]
        for at in range(len(found)):
            yield [*found[:at], [first, *found[at]], *found[at + 1 :]]


def best_time(lengths: list[int], recipe: Recipe) -> float:
    """The least time of any plan at all, by trying them all."""
    layout, cost, ranks = recipe.layout, recipe.cost, recipe.topology.dp
    unit, multiple = recipe.width_unit, recipe.topology.multiple
    assert isinstance(layout, Packed | Padded)
    best = np.inf
    for bins in partitions(list(range(len(lengths)))):
        costs: list[float] = []
        for members in bins:
            held = [lengths[i] for i in members]
            padded = isinstance(layout, Padded)
            needed = max(held) if padded else sum(held)
            width = max(-(-needed // unit) * unit, layout.pad_to or 0)
            rows = len(held) if padded else 1
            if rows * width > (layout.budget or 0) or (layout.pad_to and width > layout.pad_to):
                break
            costs.append(
                cost.per_token * rows * width
                + cost.per_pair * sum((width if padded else n) ** 2 for n in held)
                + cost.per_segment * len(held)
                + cost.per_micro_batch
            )
        else:
            width = max(unit, layout.pad_to or 0)
            empty = cost.per_token * width + cost.per_micro_batch
            if isinstance(layout, Padded):
                empty += cost.per_pair * width**2 + cost.per_segment
            for owner in product(range(ranks), repeat=len(costs)):
                count = -(-max(owner.count(r) for r in range(ranks)) // multiple) * multiple
                cells = np.array(
                    [
                        sorted(
                            [c for c, o in zip(costs, owner, strict=True) if o == r]
                            + [empty] * (count - owner.count(r))
                        )
                        for r in range(ranks)
                    ]
                )
                lock_step = recipe.sync_every == "micro_batch"
                time = cells.max(axis=0).sum() if lock_step else cells.sum(axis=1).max()
                best = min(best, float(time))
    return best


@examples(200)
@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=5),
    st.sampled_from([Packed, Padded]),
    st.sampled_from([1, 4]),
    st.sampled_from([None, 16]),
    st.sampled_from([Topology(), Topology(dp=2), Topology(dp=3), Topology(dp=2, pp=2, vpp=2,
        variable_seq_lengths=True)]),
    st.sampled_from(get_args(SyncEvery)),
    st.sampled_from([Cost(), Cost(per_pair=1), Cost(per_segment=3, per_micro_batch=7)]),
)  # fmt: skip
def test_trying_every_plan_finds_none_below_the_floor(
    lengths: list[int],
    layout: type[Packed | Padded],
    round_to: int,
    pad_to: int | None,
    topology: Topology,
    sync_every: SyncEvery,
    cost: Cost,
) -> None:
    recipe = Recipe(
        layout=layout(max_tokens=24, round_to=round_to, pad_to=pad_to),
        topology=topology,
        sync_every=sync_every,
        cost=cost,
    )
    plan = make_plan(lengths, recipe)
    best = best_time(lengths, recipe)
    assert times(plan)[0] * MORE >= best
    assert floors(plan)[0].time <= best * MORE
    if plan.stats()["balance_optimal"]:
        assert times(plan)[0] <= best * MORE
