"""Further limits: no more micro-batches than spreading needs, and nothing refused that can be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Cost, Limits, Packed, Padded, Recipe, Steps, Topology, make_plan
from evenstep.errors import PlanError
from evenstep.testing import assert_valid_plan
from tests.internals import LimitedPacker


def log_normal(count: int) -> np.ndarray:
    lengths = np.random.default_rng(0).lognormal(np.log(3000), 1, count)
    return np.clip(lengths, 1, 32768).astype(np.int64)


@pytest.mark.parametrize(("count", "dp"), [(512, 8), (2048, 8), (2000, 64)])
@pytest.mark.parametrize("balance", ["refined", "lpt"])
def test_a_bound_on_samples_costs_few_micro_batches(count: int, dp: int, balance: str) -> None:
    lengths, topology = log_normal(count), Topology(dp=dp)
    recipe = Recipe(
        layout=Packed(max_tokens=32768, samples=7),
        topology=topology,
        balance=balance,  # type: ignore[arg-type]
    )
    plan = make_plan(lengths, recipe)
    assert_valid_plan(plan)
    assert len(plan.widths) <= 1.12 * max(lengths.sum() / 32768, count / 7) + dp


def test_two_limits_that_both_bind_are_used_up_evenly() -> None:
    rng = np.random.default_rng(0)
    lengths, patches = rng.integers(1, 100, 5000), rng.integers(0, 50, 5000)
    recipe = Recipe(layout=Packed(max_tokens=4096), limits=Limits(columns={"patches": 2000}))
    plan = make_plan(lengths, recipe, columns={"patches": patches})
    assert_valid_plan(plan)
    assert len(plan.widths) <= 1.02 * max(lengths.sum() / 4096, patches.sum() / 2000) + 1


def test_steps_of_micro_batches_take_what_can_be_spread_over_them() -> None:
    recipe = Recipe(
        layout=Packed(max_tokens=32768, samples=7),
        topology=Topology(dp=4),
        steps=Steps(micro_batches=4),
    )
    plan = make_plan(log_normal(1000), recipe)
    assert_valid_plan(plan)
    assert np.bincount(plan.step_of)[:-1].mean() > 0.85 * 4 * 4 * 7


def test_a_last_step_has_no_more_micro_batches_than_it_was_sized_for() -> None:
    recipe = Recipe(
        layout=Packed(max_tokens=100, samples=3),
        topology=Topology(dp=2, pp=2, vpp=2),
        steps=Steps(micro_batches=2),
        limits=Limits(columns={"patches": 9}),
    )
    patches = np.array([8, 3, 2, 7, 8, 2, 3])  # {8}, {8}, {7, 2}, {3, 2, 3}
    plan = make_plan([1, 18, 1, 1, 1, 30, 53], recipe, columns={"patches": patches})
    assert_valid_plan(plan)
    assert plan.num_micro_batches == 4


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=60),
    st.integers(1, 40),
    st.integers(0, 12),
    st.integers(1, 20),
)
def test_spreading_keeps_every_limit(
    items: list[tuple[int, int]], capacity: int, most: int, packs: int
) -> None:
    sizes, taken = (np.array(column) for column in zip(*items, strict=True))
    extra, caps = taken.astype(float)[:, None], np.array([float(most)])
    found = LimitedPacker(sizes, extra, capacity, caps).spread(packs)
    if found is None:
        return
    assert sorted(found.values.tolist()) == list(range(len(sizes)))
    for row in found:
        together = sizes[row].sum() <= capacity and taken[row].sum() <= most
        assert together or len(row) == 1, "what breaks a limit by itself is alone"


def test_groups_of_unequal_sizes_are_dealt_evenly_where_that_is_possible() -> None:
    recipe = Recipe(layout=Packed(max_tokens=64), topology=Topology(dp=2), equal_sizes=True)
    plan = make_plan([4] * 12, recipe, groups=np.repeat(np.arange(5), [3, 3, 2, 2, 2]))
    assert_valid_plan(plan)
    with pytest.raises(PlanError, match=r"the 3 groups of this step give ranks 2 to 4"):
        make_plan([4] * 6, recipe, groups=[0, 0, 1, 1, 2, 2])


def test_a_limit_beyond_any_integer_is_no_limit() -> None:
    recipe = Recipe(layout=Padded(max_tokens=64), limits=Limits(cost=1e30))
    assert len(make_plan([1] * 64, recipe).widths) == 1


def test_a_group_may_fill_a_micro_batch_to_the_last_slot() -> None:
    recipe = Recipe(layout=Packed(max_tokens=8))
    assert make_plan([5, 3], recipe, groups=[0, 0]).slots.tolist() == [8]
    with pytest.raises(PlanError, match="group 0 has 2 segments and 9 slots"):
        make_plan([5, 4], recipe, groups=[0, 0])


def test_a_group_may_cost_the_limit_up_to_rounding() -> None:
    assert 0.1 + 0.2 > 0.3
    recipe = Recipe(layout=Packed(max_tokens=8), cost=Cost(per_token=0.1), limits=Limits(cost=0.3))
    plan = make_plan([1, 2], recipe, groups=[0, 0])
    assert_valid_plan(plan)
    assert plan.tokens.tolist() == [3]
    with pytest.raises(PlanError, match=r"more than limits.cost allows"):
        make_plan([2, 2], recipe, groups=[0, 0])


def test_padded_rows_may_cost_the_limit_up_to_rounding() -> None:
    assert 0.3 / 0.1 < 3
    recipe = Recipe(layout=Padded(max_tokens=24), cost=Cost(per_token=0.1), limits=Limits(cost=0.3))
    plan = make_plan([1] * 3, recipe)
    assert_valid_plan(plan)
    assert plan.rows.tolist() == [3]


@pytest.mark.parametrize("layout", [Packed(max_tokens=8), Padded(max_tokens=8)])
@given(st.integers(1, 8), st.sampled_from([0.1, 0.3, 0.7, 1e-9]))
def test_a_sample_that_costs_the_whole_limit_fits_whatever_is_rounded(
    layout: Packed | Padded, length: int, price: float
) -> None:
    # 3 * 0.1 is more than 0.3.
    most = float(f"{length * price:.12g}")
    recipe = Recipe(layout=layout, cost=Cost(per_token=price), limits=Limits(cost=most))
    assert recipe.longest_segment == length
    assert len(make_plan([length, length], recipe).micro_offsets) == 3
