"""filled_packs: every micro-batch has a sample, and limits and groups hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Cost, Packed, Recipe, Topology, make_plan
from evenstep.errors import PlanError
from tests.examples import examples
from tests.internals import SyncEvery, filled_packs

BUDGET = 20


@examples(200)
@given(
    lengths=st.lists(st.integers(1, BUDGET), min_size=1, max_size=40),
    dp=st.integers(1, 4),
    multiple=st.integers(1, 3),
    group=st.integers(1, 2),
    most=st.sampled_from([None, 1, 3]),
    sync=st.sampled_from(["micro_batch", "step"]),
)
def test_every_micro_batch_has_a_sample_within_the_limits(
    lengths: list[int], dp: int, multiple: int, group: int, most: int | None, sync: SyncEvery
) -> None:
    groups = None
    if group > 1 and most is None:
        lengths, groups = [max(n // 2, 1) for n in lengths], np.arange(len(lengths)) // group
    pipeline = multiple > 1
    topology = Topology(dp=dp, pp=multiple, vpp=2 if pipeline else 1, variable_seq_lengths=pipeline)
    layout = Packed(max_tokens=BUDGET, samples=most)
    recipe = Recipe(
        layout=layout, topology=topology, cost=Cost(per_token=9, per_pair=1), sync_every=sync
    )
    plan = make_plan(lengths, recipe, groups=groups)
    units = len(lengths) if groups is None else len(np.unique(groups))
    if units < plan.num_micro_batches:
        with pytest.raises(PlanError, match="cannot fill"):
            filled_packs(plan)
        return
    ranks = filled_packs(plan)
    assert [len(rank) for rank in ranks] == [len(rank) for rank in plan[0]]
    packs = [pack for rank in ranks for pack in rank]
    assert min(map(len, packs)) >= 1
    assert sorted(np.concatenate(packs).tolist()) == list(range(len(lengths)))
    for pack in packs:
        assert sum(lengths[i] for i in pack) <= BUDGET
        assert most is None or len(pack) <= most
        if groups is not None:
            kept = set(groups[pack].tolist())
            assert sum(int(g) in kept for g in groups) == len(pack)


def test_a_plan_without_empty_micro_batches_is_kept() -> None:
    recipe = Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2))
    plan = make_plan([5, 3, 4, 2, 2], recipe)
    packs = filled_packs(plan)
    planned = [[micro.segments.sample for micro in rank] for rank in plan[0]]
    assert [[p.tolist() for p in rank] for rank in packs] == [
        [p.tolist() for p in rank] for rank in planned
    ]
