"""Plans that share samples between ranks: checks, exchanges, files, order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import (
    Packed,
    Padded,
    Plan,
    Prefixes,
    Recipe,
    Steps,
    Topology,
    find_prefixes,
    make_plan,
    violations,
)
from evenstep.errors import InputError, PlanError
from tests.forests import forest
from tests.internals import ELSEWHERE, join_plans, on_context_ranks, on_fewer_ranks, step_plan
from tests.shared_plans import plan_of_cells, share_samples


def shared(seed: int, ranks: int = 3, trees: bool = False, steps: int = 6) -> Plan:
    rng = np.random.default_rng(seed)
    ids = forest(rng, 12)
    recipe = Recipe(
        layout=Packed(max_tokens=24), topology=Topology(dp=ranks), steps=Steps(samples=steps)
    )
    prefixes = find_prefixes(ids) if trees else None
    return share_samples(rng, make_plan([len(each) for each in ids], recipe, prefixes=prefixes))


@given(st.integers(0, 10**6), st.integers(1, 5), st.booleans())
def test_plans_that_share_samples_are_valid_and_ranks_agree(
    seed: int, ranks: int, trees: bool
) -> None:
    plan = shared(seed, ranks, trees)
    assert violations(plan) == []
    # What each rank has in front of a part, found without exchanges.
    for step in plan:
        for wave in zip(*step, strict=True):
            shares = any(
                m.segments.parent is not None and (m.segments.parent == ELSEWHERE).any()
                for m in wave
            )
            assert all((micro.exchange is not None) == shares for micro in wave)
            tokens = {
                (rank, sample, token)
                for rank, micro in enumerate(wave)
                for sample, start, length in zip(
                    micro.segments.sample, micro.segments.start, micro.segments.length, strict=True
                )
                for token in range(start, start + length)
            }
            for rank, micro in enumerate(wave):
                if micro.exchange is None:
                    continue
                numbers = micro.exchange.received_number
                rows = zip(
                    micro.exchange.received_from,
                    micro.exchange.samples[numbers],
                    micro.exchange.received_start,
                    micro.exchange.received,
                    strict=True,
                )
                received = {
                    (other, sample, token)
                    for other, sample, start, length in rows
                    for token in range(start, start + length)
                }
                assert received <= tokens
                assert rank not in {other for other, *_ in received}
                parent = micro.segments.parent
                front = 0 if parent is None else micro.segments.start[parent == ELSEWHERE].sum()
                assert len(received) == front


def test_a_part_sees_what_other_ranks_hold_and_is_in_no_tree() -> None:
    recipe = Recipe(layout=Packed(max_tokens=20), topology=Topology(dp=2))
    plan = make_plan([9, 5, 4], recipe, prefixes=Prefixes(np.arange(3), np.array([0, 3, 3])))
    first, part = [(0, 0, 5, -1)], (0, 5, 4, ELSEWHERE)
    tree = [(1, 0, 2, -1), (1, 2, 3, 0), (2, 2, 2, 0)]
    good = plan_of_cells(plan, [[first], [[*tree, part]]])
    assert violations(good) == []
    assert good.stats()["shared_tokens_saved"] == 2
    wrong = {
        "parents_first": [first, [tree[0], (0, 2, 7, 0), *tree[1:]]],  # behind others' prefix
        "prefixes_equal": [[*first, (1, 5, 1, 0)], [*tree, part]],  # in front of others
        "not all its parts see": [[(0, 0, 2, -1), (0, 2, 3, 0)], [*tree, part]],  # a tree itself
    }
    for fault, rows in wrong.items():
        assert fault in str(violations(plan_of_cells(plan, [[each] for each in rows])))


def test_an_exchange_by_hand() -> None:
    plan = make_plan([9, 2], Recipe(layout=Packed(max_tokens=9), topology=Topology(dp=3)))
    rows = [[(0, 0, 4, -1)], [(1, 0, 2, -1), (0, 4, 2, ELSEWHERE)], [(0, 6, 3, ELSEWHERE)]]
    plan = plan_of_cells(plan, [[each] for each in rows])
    assert violations(plan) == []
    one, two, three = (plan[0, rank][0].exchange for rank in range(3))
    assert one is not None
    assert two is not None
    assert three is not None
    assert (one.sent.tolist(), one.sent_to.tolist()) == ([0, 0], [1, 2])
    assert (two.sent.tolist(), two.sent_to.tolist(), two.number.tolist()) == ([1], [2], [-1, 0])
    assert (two.received_number.tolist(), two.received.tolist()) == ([0], [4])
    assert (three.received.tolist(), three.received_from.tolist()) == ([4, 2], [0, 1])
    assert one.digest == two.digest == three.digest
    assert one.lengths.tolist() == [9]
    assert [column.tolist() for column in plan.exchanged] == [[8, 2, 0], [0, 4, 6]]
    assert plan.segments.behind is not None
    assert plan.segments.behind.tolist() == [0, 0, 4, 6]
    assert plan.order.tolist() == [0, 3, 1, 2]
    assert plan.restore([10, 20, 11, 12]).tolist() == [10, 11, 12, 20]


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(2, 5))
def test_context_ranks_divide_every_sample_evenly_and_get_what_they_see(
    seed: int, dp: int, cp: int
) -> None:
    rng = np.random.default_rng(seed)
    topology, steps = Topology(dp=dp, cp=cp), Steps(samples=9)
    layout: Any = [Packed(max_tokens=64), Padded(max_tokens=128), Packed(rows=2, pad_to=120)][
        seed % 3
    ]
    plan = make_plan(
        rng.integers(1, 50, 20),
        Recipe(layout=layout, topology=topology, steps=steps, overflow="truncate"),
    )
    divided = on_context_ranks(plan)
    assert violations(divided) == []
    assert (divided.num_ranks, divided.num_steps) == (dp * cp, plan.num_steps)
    for step, ranks in enumerate(divided):
        for data, micros in enumerate(plan[step]):
            for position, micro in enumerate(micros):
                parts = [ranks[data * cp + rank][position] for rank in range(cp)]
                assert {part.slots for part in parts} == {micro.slots // cp}
                assert sum(part.tokens for part in parts) == micro.tokens
                for number, length in zip(
                    micro.segments.sample, micro.segments.length, strict=True
                ):
                    columns = [part.segments for part in parts]
                    held = [
                        (s.start, s.length) for s in columns for s in [s.take(s.sample == number)]
                    ]
                    work = [int((n * (2 * a + n + 1)).sum()) // 2 for a, n in held]
                    assert sum(work) == length * (length + 1) // 2
                    # Parts differ by at most one token each.
                    assert max(work) - min(work) <= 2 * length


@given(st.integers(0, 10**6))
def test_files_pickles_and_single_steps_keep_what_is_shared(seed: int) -> None:
    plan = shared(seed, trees=bool(seed % 2))
    assert Plan.from_bytes(plan.to_bytes()) == plan
    samples = [np.flatnonzero(plan.step_of == step) for step in range(plan.num_steps)]
    parts = [step_plan(plan, step, chosen) for step, chosen in enumerate(samples)]
    for step, part in enumerate(parts):
        for ours, theirs in zip(part[0], plan[step], strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert (one.exchange is None) == (other.exchange is None)
                if one.exchange is not None and other.exchange is not None:
                    assert one.exchange.sent.tolist() == other.exchange.sent.tolist()
    assert join_plans(parts, samples).segments.sample.tolist() == plan.segments.sample.tolist()


def test_a_shared_plan_cannot_run_on_fewer_ranks_or_without_a_shared_sample() -> None:
    plan = shared(3, ranks=4, steps=12)
    assert plan.segments.is_shared.any()
    with pytest.raises(
        PlanError, match="shares samples between its 4 ranks, so it cannot run on 2"
    ):
        on_fewer_ranks(plan, 2)
    micro = next(m for m in plan[0, 0] if m.exchange is not None)
    assert micro.exchange is not None
    with pytest.raises(InputError, match="is shared between ranks"):
        micro.without([int(micro.exchange.samples[0])])
    numbers = micro.renumbered(np.arange(12) + 100)
    assert numbers.exchange is not None
    assert (numbers.exchange.samples == micro.exchange.samples + 100).all()
