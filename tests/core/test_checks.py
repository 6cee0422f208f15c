"""Each check finds the fault it is named for, and only a broken plan fails."""

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from evenstep import (
    Cost,
    Limits,
    Packed,
    Padded,
    Plan,
    Prefixes,
    Recipe,
    SecondWork,
    Sharing,
    Steps,
    Topology,
    make_plan,
    violations,
)
from evenstep.errors import PlanError
from evenstep.testing import assert_valid_plan
from tests.handmade import handmade
from tests.internals import CHECKS, ELSEWHERE, Segments, violations_by_check
from tests.shared_plans import plan_of_cells

LENGTHS = [5, 3, 7, 2, 6, 4, 1, 8]


def changed(plan: Plan, **fields: Any) -> Plan:
    """The plan with some fields replaced, however wrong."""
    names = (
        "recipe", "lengths", "step_of", "segments", "row_offsets", "micro_offsets",
        "cell_offsets", "widths", "groups", "columns", "prefix_order", "prefix_shared",
    )  # fmt: skip
    return Plan(**{name: getattr(plan, name) for name in names} | fields)


def with_segments(plan: Plan, **columns: Any) -> Plan:
    s = plan.segments
    kept = {"sample": s.sample, "start": s.start, "length": s.length, "parent": s.parent}
    return changed(plan, segments=Segments(**kept | columns))


def swapped(values: np.ndarray[Any, Any], i: int, j: int) -> np.ndarray[Any, Any]:
    copy = values.copy()
    copy[[i, j]] = copy[[j, i]]
    return copy


def at(values: np.ndarray[Any, Any], i: int, value: int) -> np.ndarray[Any, Any]:
    copy = values.copy()
    copy[i] = value
    return copy


@dataclass(frozen=True)
class Fault:
    """A way to make a plan fail one check."""

    check: str
    recipe: Recipe
    spoil: Callable[[Plan], Plan]
    arguments: dict[str, Any] = field(default_factory=dict)

    def plan(self) -> Plan:
        """The plan that `spoil` breaks."""
        lengths = [9, 1, 1, 1, 1, 1, 1, 1] if self.check == "sizes_equal" else LENGTHS
        lengths = TREE_LENGTHS if "prefixes" in self.arguments else lengths
        return make_plan(**{"lengths": lengths, "recipe": self.recipe, **self.arguments})


def swap_samples(plan: Plan) -> Plan:
    """Swap whole samples, with their lengths, between steps or micro-batches."""
    last = len(plan.segments) - 1
    s = plan.segments
    return with_segments(plan, sample=swapped(s.sample, 0, last), length=swapped(s.length, 0, last))


def one_rank_short(plan: Plan) -> Plan:
    """Move the last micro-batch of rank 0 to rank 1."""
    offsets = plan.cell_offsets.copy()
    offsets[1] -= 1
    return changed(plan, cell_offsets=offsets)


def steps_reversed(plan: Plan) -> Plan:
    """The last step first; its samples stay in that step."""
    last = plan.num_steps - 1
    nested = [
        [
            [
                [
                    micro.segments.sample[a:b].tolist()
                    for a, b in itertools.pairwise(micro.row_offsets.tolist())
                ]
                for micro in plan[last - step, rank]
            ]
            for rank in range(plan.num_ranks)
        ]
        for step in range(plan.num_steps)
    ]
    return handmade(plan.lengths.tolist(), nested, plan.recipe)


def an_empty_step(plan: Plan) -> Plan:
    """One more step at the end in which every rank runs one micro-batch of nothing."""
    rows, micros, cells = plan.row_offsets, plan.micro_offsets, plan.cell_offsets
    more = np.arange(1, plan.num_ranks + 1)
    return changed(
        plan,
        row_offsets=np.append(rows, np.full(plan.num_ranks, rows[-1])),
        micro_offsets=np.append(micros, micros[-1] + more),
        cell_offsets=np.append(cells, cells[-1] + more),
        widths=np.append(plan.widths, np.full(plan.num_ranks, plan.recipe.width_unit)),
    )


# Two prompts of 4 and 3 tokens, one with a branch of its own: nodes 0, 2 and 5 are shared.
#   segment  0         1         2         3         4         5         6         7
#   tokens   0: 0-2    0: 2-5    1: 2-5    1: 5-7    2: 5-8    3: 0-1    3: 1-3    4: 1-5
TREES = {"prefixes": Prefixes(np.arange(5), np.array([0, 3, 6, 0, 2]))}
TREE_LENGTHS = [5, 7, 8, 3, 5]
one_pack = Recipe(layout=Packed(max_tokens=32))


def with_parent(plan: Plan, i: int, value: int) -> Plan:
    """Segment i sees another segment in front."""
    assert plan.segments.parent is not None
    return with_segments(plan, parent=at(plan.segments.parent, i, value))


def reordered(plan: Plan, order: list[int]) -> Plan:
    """The same tree in another order of segments."""
    segments = plan.segments.take(np.array(order))
    assert segments.parent is not None
    number = np.argsort(order)
    parent = np.where(segments.parent < 0, -1, number[segments.parent])
    return with_segments(
        plan,
        sample=segments.sample,
        start=segments.start,
        length=segments.length,
        parent=parent,
    )


def two_rows(plan: Plan) -> Plan:
    """The last segments of the only row in a row of their own."""
    return changed(plan, row_offsets=np.array([0, 6, 8]), micro_offsets=np.array([0, 2]))


def sharing(*ranks: list[tuple[int, int, int, int]]) -> Callable[[Plan], Plan]:
    """One wave of segments (sample, start, length, parent) of the samples of `pair`."""
    return lambda plan: plan_of_cells(plan, [[rows] for rows in ranks])


pair = Recipe(layout=Packed(max_tokens=16), topology=Topology(dp=2))
PAIR = {"lengths": [5, 3]}
packed = Recipe(layout=Packed(max_tokens=16), topology=Topology(dp=2))
counted = Recipe(layout=Packed(max_tokens=8), steps=Steps(micro_batches=2))
patches = Recipe(layout=Packed(max_tokens=16), limits=Limits(columns={"patches": 5}))
FAULTS = {
    "offsets go back through an overflow": Fault(
        "offsets_nest",
        packed,
        lambda p: changed(
            p, row_offsets=np.array([0, 2**63 - 1, -(2**63), -1, *p.row_offsets[4:]])
        ),
    ),
    "rows times width overflow to nothing": Fault(
        "numbers_in_range",
        Recipe(layout=Packed(rows=4, pad_to=8)),
        lambda p: changed(p, widths=at(p.widths, 0, 2**62)),
    ),
    "rows times width overflow below zero": Fault(
        "numbers_in_range",
        Recipe(layout=Packed(rows=4, pad_to=8)),
        lambda p: changed(p, widths=at(p.widths, 0, 2**61)),
    ),
    "all slots together overflow": Fault(
        "numbers_in_range", packed, lambda p: changed(p, widths=np.full(len(p.widths), 2**61))
    ),
    "a length is beyond any plan": Fault(
        "numbers_in_range", packed, lambda p: changed(p, lengths=at(p.lengths, 0, 2**62))
    ),
    "a negative column makes room": Fault(
        "numbers_in_range",
        patches,
        lambda p: changed(p, columns={"patches": [9, 9, -99, 9, 9, 9, 9, -99]}),
        {"columns": {"patches": [1] * 8}},
    ),
    "a column overflows to nothing": Fault(
        "numbers_in_range",
        patches,
        lambda p: changed(p, columns={"patches": np.full(8, 2**62)}),
        {"columns": {"patches": [1] * 8}},
    ),
    "without a budget, a width is far too wide": Fault(
        "slots_within_budget",
        Recipe(layout=Packed(samples=2)),
        lambda p: changed(p, widths=at(p.widths, 0, 2**50)),
    ),
    "steps of micro-batches run backwards": Fault("samples_stay_in_step", counted, steps_reversed),
    "a step but the last has too few micro-batches": Fault(
        "samples_stay_in_step",
        counted,
        lambda p: changed(
            p, recipe=Recipe(layout=Packed(max_tokens=8), steps=Steps(micro_batches=4))
        ),
    ),
    "the last step has too many micro-batches": Fault(
        "samples_stay_in_step",
        Recipe(layout=Packed(max_tokens=20), steps=Steps(micro_batches=2)),
        lambda p: changed(
            p, recipe=Recipe(layout=Packed(max_tokens=20), steps=Steps(micro_batches=1))
        ),
    ),
    "steps of samples end with an empty one": Fault(
        "samples_stay_in_step",
        Recipe(layout=Packed(max_tokens=16), topology=Topology(dp=2), steps=Steps(samples=4)),
        an_empty_step,
    ),
    "the only step is followed by an empty one": Fault(
        "samples_stay_in_step", packed, an_empty_step
    ),
    "steps of micro-batches end with an empty one": Fault(
        "samples_stay_in_step",
        Recipe(layout=Packed(max_tokens=16), steps=Steps(micro_batches=1)),
        an_empty_step,
    ),
    "a sample is in no step and not dropped": Fault(
        "samples_stay_in_step",
        Recipe(layout=Packed(max_tokens=16), steps=Steps(micro_batches=1), overflow="drop"),
        lambda p: changed(p, step_of=at(p.step_of, 0, -5)),
    ),
    "a row is counted twice": Fault(
        "offsets_nest", packed, lambda p: changed(p, row_offsets=at(p.row_offsets, 1, 99))
    ),
    "a sample runs twice": Fault(
        "segments_once", packed, lambda p: with_segments(p, sample=at(p.segments.sample, 0, 3))
    ),
    "a token is skipped": Fault(
        "segments_once", packed, lambda p: with_segments(p, start=at(p.segments.start, 0, 1))
    ),
    "an end is cut off": Fault(
        "segments_once", packed, lambda p: with_segments(p, length=at(p.segments.length, 0, 1))
    ),
    "a sample is dropped": Fault(
        "segments_once", packed, lambda p: changed(p, step_of=at(p.step_of, 2, -1))
    ),
    "a fitting sample is cut": Fault(
        "overflow_as_asked",
        Recipe(layout=Packed(max_tokens=16), overflow="truncate"),
        lambda p: with_segments(p, length=np.ones(8, np.int64)),
    ),
    "a fitting sample is dropped": Fault(
        "overflow_as_asked",
        Recipe(layout=Packed(max_tokens=16), overflow="drop"),
        lambda p: changed(p, step_of=np.full(8, -1)),
    ),
    "a sample that may not run alone is over-long": Fault(
        "overflow_as_asked",
        Recipe(layout=Packed(max_tokens=16), overflow="alone"),
        lambda p: changed(p, recipe=Recipe(layout=Packed(max_tokens=7))),
    ),
    "a short sample alone is far too wide": Fault(
        "slots_within_budget",
        Recipe(layout=Packed(max_tokens=8), overflow="alone"),
        lambda p: changed(p, widths=np.full(p.num_micro_batches, 1000)),
    ),
    "a step holds too many tokens": Fault(
        "samples_stay_in_step",
        Recipe(layout=Packed(max_tokens=16), steps=Steps(tokens=12)),
        lambda p: changed(p, recipe=Recipe(layout=Packed(max_tokens=16), steps=Steps(tokens=8))),
    ),
    "steps hold fewer samples than asked": Fault(
        "samples_stay_in_step",
        Recipe(layout=Packed(max_tokens=16), steps=Steps(samples=2)),
        lambda p: changed(p, recipe=Recipe(layout=Packed(max_tokens=16), steps=Steps(samples=4))),
    ),
    "a segment names no sample": Fault(
        "offsets_nest", packed, lambda p: with_segments(p, sample=at(p.segments.sample, 0, 99))
    ),
    "a column is too short": Fault(
        "offsets_nest", packed, lambda p: changed(p, step_of=np.zeros(3, np.int64))
    ),
    "a micro-batch is over budget": Fault(
        "slots_within_budget", packed, lambda p: changed(p, widths=at(p.widths, 0, 17))
    ),
    "a row is too narrow": Fault(
        "rows_hold_segments", packed, lambda p: changed(p, widths=at(p.widths, 0, 1))
    ),
    "a width is not rounded": Fault(
        "widths_aligned",
        Recipe(layout=Packed(max_tokens=16, round_to=4)),
        lambda p: changed(p, widths=at(p.widths, 0, 15)),
    ),
    "a fixed width is not kept": Fault(
        "widths_aligned",
        Recipe(layout=Packed(max_tokens=16, pad_to=16)),
        lambda p: changed(p, widths=at(p.widths, 0, 15)),
    ),
    "a padded row holds two": Fault(
        "rows_fit_layout",
        Recipe(layout=Padded(max_tokens=16)),
        lambda p: changed(p, row_offsets=at(p.row_offsets, 1, 2)),
    ),
    "a static micro-batch loses a row": Fault(
        "rows_fit_layout",
        Recipe(layout=Packed(rows=2, pad_to=8)),
        lambda p: changed(p, recipe=Recipe(layout=Packed(rows=3, pad_to=8))),
    ),
    "a fixed micro-batch holds too many": Fault(
        "rows_fit_layout",
        Recipe(layout=Packed(samples=2)),
        lambda p: changed(p, recipe=Recipe(layout=Packed(samples=1))),
    ),
    "a rank runs one fewer": Fault("counts_agree", packed, one_rank_short),
    "the pipeline's multiple is missed": Fault(
        "counts_agree",
        packed,
        lambda p: changed(
            p,
            recipe=Recipe(
                layout=Packed(max_tokens=16),
                topology=Topology(dp=2, pp=4, vpp=2, variable_seq_lengths=True),
            ),
        ),
    ),
    "samples change their step": Fault(
        "samples_stay_in_step",
        Recipe(layout=Packed(max_tokens=16), steps=Steps(samples=4)),
        swap_samples,
    ),
    "a step is larger than asked": Fault(
        "samples_stay_in_step",
        Recipe(layout=Packed(max_tokens=16), steps=Steps(samples=4)),
        lambda p: changed(p, recipe=Recipe(layout=Packed(max_tokens=16), steps=Steps(samples=3))),
    ),
    "a group is parted": Fault(
        "groups_together",
        packed,
        lambda p: changed(p, groups=np.zeros(8, np.int64)),
        {"groups": [0, 0, 1, 1, 2, 2, 3, 3]},
    ),
    "a pipeline shape differs": Fault(
        "shapes_equal",
        Recipe(layout=Packed(max_tokens=16), topology=Topology(pp=2)),
        lambda p: changed(p, widths=at(p.widths, 0, 16)),
    ),
    "too many segments": Fault(
        "rows_fit_layout",
        Recipe(layout=Packed(max_tokens=16, samples=3)),
        lambda p: changed(p, recipe=Recipe(layout=Packed(max_tokens=16, samples=1))),
    ),
    "too much cost": Fault(
        "limits_hold",
        Recipe(layout=Packed(max_tokens=16), cost=Cost(per_pair=1), limits=Limits(cost=80)),
        lambda p: changed(
            p,
            recipe=Recipe(
                layout=Packed(max_tokens=16), cost=Cost(per_pair=2), limits=Limits(cost=80)
            ),
        ),
    ),
    "too many patches": Fault(
        "limits_hold",
        Recipe(layout=Packed(max_tokens=16), limits=Limits(columns={"patches": 5})),
        lambda p: changed(p, columns={"patches": np.full(8, 6)}),
        {"columns": {"patches": [1] * 8}},
    ),
    "a row that may run alone costs too much because it is wider than it needs": Fault(
        "limits_hold",
        Recipe(layout=Padded(max_tokens=16), limits=Limits(cost=8), overflow="alone"),
        lambda p: changed(p, widths=np.where(p.widths == 8, 9, p.widths)),
    ),
    "a wave has two widths": Fault(
        "tokens_equal",
        replace(packed, equal_tokens=True),
        lambda p: changed(p, widths=at(p.widths, 0, int(p.widths[0]) - 1)),
    ),
    "a rank of a wave has no image": Fault(
        "kinds_together",
        replace(packed, second_work=SecondWork(column="patches", same_waves=True)),
        lambda p: changed(p, columns={"patches": np.array([1, 0, 0, 0, 0, 0, 0, 0])}),
        {"columns": {"patches": [0] * 8}},
    ),
    "samples run out of order": Fault(
        "order_kept",
        packed,
        lambda p: changed(p, recipe=replace(p.recipe, balance="none")),
    ),
    "sizes are uneven": Fault(
        "sizes_equal",
        packed,
        lambda p: changed(
            p,
            recipe=Recipe(layout=Packed(max_tokens=16), topology=Topology(dp=2), equal_sizes=True),
        ),
    ),
    "a parent is in no micro-batch": Fault(
        "offsets_nest", one_pack, lambda p: with_parent(p, 1, 8), TREES
    ),
    "prefixes are those of fewer samples": Fault(
        "offsets_nest", one_pack, lambda p: changed(p, prefix_order=np.arange(3)), TREES
    ),
    "a sample behind a shared prefix runs twice": Fault(
        "segments_once",
        one_pack,
        lambda p: with_segments(p, sample=at(p.segments.sample, 4, 1)),
        TREES,
    ),
    "the last tokens behind a shared prefix do not run": Fault(
        "segments_once",
        one_pack,
        lambda p: with_segments(p, length=at(p.segments.length, 4, 2)),
        TREES,
    ),
    "a sample no longer sees the beginning that others share": Fault(
        "segments_once", one_pack, lambda p: with_parent(p, 1, -1), TREES
    ),
    "a sample with all of its tokens shared is truncated": Fault(
        "overflow_as_asked",
        one_pack,
        lambda p: with_segments(p, length=at(p.segments.length, 7, 2)),
        TREES,
    ),
    "a micro-batch has more samples than asked, shared prefixes aside": Fault(
        "rows_fit_layout",
        Recipe(layout=Packed(max_tokens=32, samples=5)),
        lambda p: changed(p, recipe=Recipe(layout=Packed(max_tokens=32, samples=4))),
        TREES,
    ),
    "too many gathered keys": Fault(
        "limits_hold",
        replace(one_pack, limits=Limits(gathered=33)),
        lambda p: changed(p, recipe=replace(one_pack, limits=Limits(gathered=32))),
        TREES,
    ),
    "too much cost behind shared prefixes": Fault(
        "limits_hold",
        replace(one_pack, cost=Cost(per_pair=1), limits=Limits(cost=10_000)),
        lambda p: changed(p, recipe=replace(p.recipe, limits=Limits(cost=100))),
        TREES,
    ),
    "too many patches of samples that share": Fault(
        "limits_hold",
        replace(one_pack, limits=Limits(columns={"patches": 5})),
        lambda p: changed(p, columns={"patches": np.full(5, 2)}),
        {**TREES, "columns": {"patches": [1] * 5}},
    ),
    "a parent stands behind its child": Fault(
        "parents_first", one_pack, lambda p: reordered(p, [1, 0, 2, 3, 4, 5, 6, 7]), TREES
    ),
    "a tree is in two rows": Fault("parents_first", one_pack, two_rows, TREES),
    "siblings are apart": Fault(
        "parents_first", one_pack, lambda p: reordered(p, [0, 2, 3, 1, 4, 5, 6, 7]), TREES
    ),
    "a shared prefix is named after a sample elsewhere": Fault(
        "parents_first",
        one_pack,
        lambda p: with_segments(p, sample=at(p.segments.sample, 5, 0)),
        TREES,
    ),
    "a position is skipped behind a shared prefix": Fault(
        "positions_continue",
        one_pack,
        lambda p: with_segments(
            p, start=at(p.segments.start, 3, 6), length=at(p.segments.length, 3, 1)
        ),
        TREES,
    ),
    "a shared prefix begins behind the first token": Fault(
        "positions_continue",
        one_pack,
        lambda p: with_segments(
            p, start=at(p.segments.start, 5, 1), length=at(p.segments.length, 5, 0)
        ),
        TREES,
    ),
    "a parent is that of another tree": Fault(
        "positions_continue", one_pack, lambda p: with_parent(p, 7, 0), TREES
    ),
    "samples share the token before they part": Fault(
        "prefixes_equal",
        one_pack,
        lambda p: changed(p, prefix_shared=np.array([0, 2, 6, 0, 2])),
        TREES,
    ),
    "samples share without prefixes": Fault(
        "prefixes_equal", one_pack, lambda p: changed(p, prefix_order=None), TREES
    ),
    "an order of prefixes has a sample twice": Fault(
        "prefixes_equal",
        one_pack,
        lambda p: changed(p, prefix_order=np.array([0, 1, 2, 3, 3])),
        TREES,
    ),
    "samples of two trees share": Fault(
        "prefixes_equal",
        one_pack,
        lambda p: with_segments(
            p, sample=swapped(p.segments.sample, 1, 6), length=swapped(p.segments.length, 1, 6)
        ),
        TREES,
    ),
    "parts of a sample are in different waves": Fault(
        "shared_in_one_wave",
        pair,
        lambda p: plan_of_cells(
            p, [[[(0, 0, 2, -1)], [(1, 0, 3, -1)]], [[], [(0, 2, 3, ELSEWHERE)]]]
        ),
        PAIR,
    ),
    "the second part of a sample sees nothing": Fault(
        "shared_in_one_wave",
        Recipe(layout=Packed(max_tokens=16), topology=Topology(dp=3)),
        sharing([(0, 0, 2, -1)], [(0, 2, 1, -1), (1, 0, 3, -1)], [(0, 3, 2, ELSEWHERE)]),
        PAIR,
    ),
    "too many ranks share a sample": Fault(
        "sharing_as_asked",
        replace(pair, sharing=Sharing(most_ranks=1)),
        sharing([(0, 0, 2, -1)], [(1, 0, 3, -1), (0, 2, 3, ELSEWHERE)]),
        PAIR,
    ),
    "a rank receives too many tokens": Fault(
        "sharing_as_asked",
        replace(pair, sharing=Sharing(max_received=1)),
        sharing([(0, 0, 2, -1)], [(1, 0, 3, -1), (0, 2, 3, ELSEWHERE)]),
        PAIR,
    ),
    "a part lacks the token before it": Fault(
        "exchanges_agree",
        pair,
        sharing([(0, 0, 2, -1)], [(1, 0, 3, -1), (0, 3, 2, ELSEWHERE)]),
        PAIR,
    ),
    "the parts before one are in another wave": Fault(
        "exchanges_agree",
        pair,
        lambda p: plan_of_cells(
            p, [[[(0, 0, 2, -1)], [(1, 0, 3, -1)]], [[], [(0, 2, 3, ELSEWHERE)]]]
        ),
        PAIR,
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_a_fault_is_found_by_the_check_that_is_named_for_it(fault: Fault) -> None:
    plan = fault.plan()
    assert violations(plan) == []
    spoiled = fault.spoil(plan)
    assert any(found.startswith(f"{fault.check}: ") for found in violations(spoiled))
    assert violations_by_check(spoiled)[fault.check]
    with pytest.raises(PlanError, match=fault.check):
        assert_valid_plan(spoiled)


def test_every_check_is_named_and_has_a_fault_that_it_finds() -> None:
    module = vars(sys.modules[violations.__module__])
    takes = {"plan": "Plan", "return": "list[str]"}
    written = {
        name for name, each in module.items() if getattr(each, "__annotations__", 0) == takes
    }
    assert written - {"violations"} == set(CHECKS)
    assert {fault.check for fault in FAULTS.values()} == set(CHECKS)


def test_steps_of_micro_batches_may_end_with_a_short_one() -> None:
    plan = make_plan([8] * 5, counted)
    assert np.diff(plan.cell_offsets).tolist() == [2, 2, 1]
    assert violations(plan) == []


def test_groups_in_steps_of_micro_batches_stand_where_they_begin() -> None:
    plan = make_plan([4, 8, 4, 8, 8], counted, groups=[7, 1, 7, 2, 3])
    assert plan.step_of.tolist() == [0, 0, 0, 1, 1]
    late = make_plan([4, 8, 8, 8, 4], counted, groups=[7, 1, 2, 3, 7])
    assert late.step_of.tolist() == [0, 0, 1, 1, 0]
    assert violations(late) == []


def test_violations_are_a_flat_list_of_sentences_that_name_their_check() -> None:
    recipe = Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=2))
    wide = handmade([5, 5, 5, 4, 4, 5], [[[[[0, 1]], [[3]]], [[[2]], [[4, 5]]]]], recipe)
    assert violations(wide) == [
        "slots_within_budget: micro-batch 0 has 10 slots, more than 8",
        "slots_within_budget: micro-batch 3 has 9 slots, more than 8",
    ]


def test_a_plan_whose_offsets_do_not_nest_is_examined_no_further() -> None:
    plan = make_plan(LENGTHS, packed)
    torn = changed(plan, row_offsets=plan.row_offsets[:-1])
    assert list(violations_by_check(torn)) == ["offsets_nest"]
    assert violations(torn)
    assert all(fault.startswith("offsets_nest: ") for fault in violations(torn))
