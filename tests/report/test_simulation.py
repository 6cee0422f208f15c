"""Simulated steps: their parts, what ranks wait for, and what they exchange."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Cost, Packed, Padded, Plan, Recipe, SecondWork, Steps, Topology, make_plan
from evenstep.errors import ConfigError
from evenstep.report import Cluster, Simulation, simulate
from tests.examples import examples
from tests.internals import SIMULATED_PARTS as PARTS
from tests.internals import Exchange, StepTable, SyncEvery

COST = Cost(per_token=3.0, per_pair=0.01, per_micro_batch=2.0)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=40))
    kind = draw(st.sampled_from([Packed, Padded]))
    pp = draw(st.integers(1, 3))
    topology = Topology(
        dp=draw(st.integers(1, 4)),
        cp=draw(st.integers(1, 2)),
        pp=pp,
        vpp=draw(st.integers(1, 2)) if pp > 1 else 1,
        variable_seq_lengths=pp > 1 and draw(st.booleans()),
    )
    sync: SyncEvery = draw(st.sampled_from(["micro_batch", "step"]))
    recipe = Recipe(
        layout=kind(max_tokens=96),
        topology=topology,
        steps=Steps(samples=draw(st.integers(4, 20))),
        cost=COST,
        sync_every=sync,
    )
    return make_plan(lengths, recipe)


def cluster(**changes: object) -> Cluster:
    fields: dict[str, object] = {"cost": COST, "parameters": 10**9, "hidden": 64, "link": 1e8}
    return Cluster(**(fields | {"inside": 2e8, "update": 0.25} | changes))  # type: ignore[arg-type]


@given(plans(), st.booleans(), st.sampled_from([0.0, 50.0]))
@examples(150)
def test_the_parts_of_a_step_are_not_negative_and_tokens_are_conserved(
    plan: Plan, overlap: bool, least: float
) -> None:
    found = simulate(plan, cluster(overlap=overlap, least=least))
    for part in PARTS:
        assert (getattr(found, part) >= -1e-6).all(), part
    assert found.tokens.sum() == plan.tokens.sum()
    assert found.imbalance >= 1
    assert found.devices == plan.num_ranks * plan.recipe.topology.cp * plan.recipe.topology.pp
    shares = [value for name, value in found.to_dict().items() if name.endswith("_share")]
    assert sum(shares) == pytest.approx(1)


@given(plans())
@examples(100)
def test_without_pipeline_and_exchange_steps_take_the_modelled_time_of_the_plan(
    plan: Plan,
) -> None:
    found = simulate(plan, Cluster(cost=COST))
    table = StepTable(plan)
    if plan.recipe.topology.pp == 1:
        np.testing.assert_allclose(found.time, table.time)
    else:
        assert (found.time >= table.ideal / plan.recipe.topology.pp - 1e-6).all()


@given(plans())
@examples(60)
def test_overlap_never_makes_a_step_slower(plan: Plan) -> None:
    apart = simulate(plan, cluster(overlap=False))
    together = simulate(plan, cluster(overlap=True))
    assert (together.time <= apart.time + 1e-9).all()


def of(lengths: list[int], sync: SyncEvery, dp: int = 1, pp: int = 1) -> Plan:
    recipe = Recipe(
        layout=Padded(samples=1),
        topology=Topology(dp=dp, pp=pp),
        cost=Cost(per_token=3.0),
        sync_every=sync,
        balance="none",
    )
    return make_plan(lengths, recipe)


def test_ranks_wait_at_every_micro_batch_or_once_per_step() -> None:
    # ranks 0: 4 and 1 tokens, rank 1: 2 and 5
    fast = Cluster(cost=Cost(per_token=3.0))
    every = simulate(of([4, 2, 1, 5], "micro_batch", dp=2), fast)
    assert every.time.tolist() == [27.0]  # 12 + 15
    once = simulate(of([4, 2, 1, 5], "step", dp=2), fast)
    assert once.time.tolist() == [21.0]  # rank 1
    assert once.work.tolist() == every.work.tolist() == [18.0]
    assert once.waiting.tolist() == [3.0]
    assert once.imbalance == pytest.approx(21 / 18)


def test_sharded_ranks_gather_twice_per_micro_batch_and_scatter_once() -> None:
    plan = of([4, 4, 4, 4], "micro_batch", dp=2)  # two waves of 12 seconds
    slow = {"cost": Cost(per_token=3.0), "parameters": 100, "inside": 10.0}
    # 2 bytes × 100 × 1/2 / 10 = 10 s to gather, 20 s to scatter
    apart = simulate(plan, Cluster(**slow, overlap=False))  # type: ignore[arg-type]
    assert apart.exchange.tolist() == [60.0]
    # forward 4 s, gather 10: 6 late; backward 8 s: 2 late; the last one: 10 + 20 - 8 = 22 late
    together = simulate(plan, Cluster(**slow))  # type: ignore[arg-type]
    assert together.exchange.tolist() == [6 + 2 + 6 + 22]


def test_replicated_ranks_sum_gradients_behind_the_last_backward() -> None:
    plan = of([4, 4, 4, 4], "step", dp=2)
    slow = {"cost": Cost(per_token=3.0), "parameters": 100, "inside": 10.0}
    # 8 bytes × 100 × 1/2 / 10 = 40 s
    assert simulate(plan, Cluster(**slow, overlap=False)).exchange.tolist() == [40.0]  # type: ignore[arg-type]
    assert simulate(plan, Cluster(**slow)).exchange.tolist() == [32.0]  # type: ignore[arg-type]


def test_collectives_of_several_nodes_share_the_links_of_a_node() -> None:
    found = Cluster(cost=Cost(), inside=400.0, link=25.0)
    assert found.bus(8, 1) == 400  # one node
    assert found.bus(16, 1) == 200  # eight links together
    assert found.bus(16, 4) == 50  # two of a node belong to the group
    assert found.bus(16, 8) == 25


def test_a_pipeline_exchanges_once_per_step_whatever_it_shards() -> None:
    syncs: tuple[SyncEvery, ...] = ("micro_batch", "step")
    for sync in syncs:
        plan = of([4, 4, 4, 4], sync, dp=2, pp=2)
        exchange = Exchange.of(cluster(), plan.recipe.topology, sync == "micro_batch")
        sent = exchange.reduce + (exchange.gather if exchange.sharded else 0)
        late = simulate(plan, cluster(cost=Cost(per_token=3.0), overlap=False)).exchange
        assert late == pytest.approx([sent])


def test_pipelines_of_equal_micro_batches_have_the_bubble_of_the_closed_form() -> None:
    plan = of([4] * 8, "step", dp=1, pp=4)
    found = simulate(plan, Cluster(cost=Cost(per_token=3.0)))
    assert found.time.tolist() == [(8 + 4 - 1) * 12 / 4]
    assert found.bubble.tolist() == [3 * 12 / 4]


def test_a_small_micro_batch_takes_as_long_as_the_host_needs() -> None:
    found = simulate(of([4, 4], "step", dp=1), Cluster(cost=Cost(per_token=3.0), least=20.0))
    assert found.time.tolist() == [40.0]
    assert found.work.tolist() == [24.0]
    assert found.host.tolist() == [16.0]


def test_second_work_is_refused() -> None:
    recipe = Recipe(layout=Packed(max_tokens=8), second_work=SecondWork(column="patches"))
    plan = make_plan([3, 4], recipe, columns={"patches": np.array([1, 2])})
    with pytest.raises(ConfigError, match="second_work"):
        simulate(plan, Cluster(cost=COST))


@pytest.mark.parametrize("wrong", [{"link": 0}, {"update": -1.0}, {"parameters": -1}])
def test_wrong_clusters_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Cluster(cost=COST, **wrong)  # type: ignore[arg-type]


def test_an_empty_plan_takes_no_time() -> None:
    recipe = Recipe(layout=Packed(max_tokens=4), overflow="drop")
    found: Simulation = simulate(make_plan([9, 9], recipe), Cluster(cost=COST))
    assert found.tokens.sum() == 0
    assert found.imbalance == 1
