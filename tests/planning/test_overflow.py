"""Over-long samples: each policy on each layout, and none of them touches its neighbours."""

from dataclasses import replace

import numpy as np
import pytest

from evenstep import (
    Limits,
    Packed,
    Padded,
    Recipe,
    Topology,
    make_plan,
    violations,
)
from evenstep.errors import PlanError
from evenstep.testing import assert_valid_plan
from tests.internals import Layout, Overflow, Segments

LENGTHS = [1, 33, 33, 5, 70]


@pytest.mark.parametrize("cut", ["optimal", "greedy"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_longer_than_the_budget_run_alone_and_widen_no_other(cut: str, ranks: int) -> None:
    layout = Padded(max_tokens=32, cut=cut)  # type: ignore[arg-type]
    recipe = Recipe(layout=layout, topology=Topology(dp=ranks), overflow="alone")
    plan = make_plan(LENGTHS, recipe)
    assert_valid_plan(plan)
    micros = [micro for rank in range(ranks) for micro in plan[0, rank]]
    wide = {tuple(m.segments.sample.tolist()): m.width for m in micros if m.width > 32}
    assert wide == {(1,): 33, (2,): 33, (4,): 70}


def test_a_group_with_an_over_long_member_is_refused() -> None:
    recipe = Recipe(layout=Padded(max_tokens=32), overflow="alone")
    with pytest.raises(PlanError, match="group 1 has 2 segments"):
        make_plan([33, 33], recipe, groups=[1, 1])


@pytest.mark.parametrize(
    "layout",
    [
        Packed(max_tokens=32),
        Padded(max_tokens=32),
        Packed(rows=2, pad_to=32),
        Packed(samples=2, max_tokens=64),
    ],
)
@pytest.mark.parametrize(("overflow", "kept"), [("split", 142), ("truncate", None), ("drop", None)])
def test_policies_are_counted(layout: Layout, overflow: str, kept: int | None) -> None:
    plan = make_plan(LENGTHS, Recipe(layout=layout, overflow=overflow))  # type: ignore[arg-type]
    assert_valid_plan(plan)
    stats = plan.stats()
    lost = stats["tokens_truncated"] + stats["tokens_dropped"]
    assert stats["tokens"] + lost == 142
    assert kept is None or stats["tokens"] == kept
    assert (
        stats[{"split": "num_split", "truncate": "num_truncated", "drop": "num_dropped"}[overflow]]
        > 0
    )


@pytest.mark.parametrize(
    ("overflow", "lengths"),
    [("split", [10, 10, 5]), ("truncate", [10, 5]), ("drop", [5]), ("alone", [20, 5])],
)
def test_what_a_limit_on_cost_makes_too_long_is_treated_as_asked_without_a_budget(
    overflow: Overflow, lengths: list[int]
) -> None:
    recipe = Recipe(layout=Packed(samples=2), limits=Limits(cost=10), overflow=overflow)
    plan = make_plan([20, 5], recipe)
    assert_valid_plan(plan)
    assert plan.segments.length.tolist() == lengths


@pytest.mark.parametrize("overflow", ["truncate", "drop", "split"])
def test_where_nothing_limits_a_sample_none_is_cut_or_dropped(overflow: Overflow) -> None:
    plan = make_plan([500, 600], Recipe(layout=Packed(samples=2), overflow=overflow))
    assert_valid_plan(plan)
    whole = plan.segments
    cut = Segments(whole.sample, whole.start, np.array([1, 600]))
    damaged = replace(plan, segments=cut, widths=np.array([601]))
    assert any(fault.startswith("overflow_as_asked: ") for fault in violations(damaged))
