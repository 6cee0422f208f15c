"""The plan as data: cells, order, files, measures."""

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from evenstep import (
    Cost,
    Limits,
    MicroBatch,
    Packed,
    Padded,
    Plan,
    Recipe,
    Steps,
    Topology,
    make_plan,
)
from evenstep.errors import EvenstepError, FileError, InputError
from evenstep.testing import Case, cases
from tests.examples import examples
from tests.internals import Segments


@pytest.fixture
def plan() -> Plan:
    recipe = Recipe(layout=Packed(max_tokens=12), topology=Topology(dp=2), steps=Steps(samples=5))
    return make_plan([5, 3, 7, 2, 6, 4, 1, 8, 2], recipe, groups=[0, 1, 2, 3, 4, 5, 6, 7, 8])


def test_cells_give_each_rank_its_micro_batches(plan: Plan) -> None:
    seen = [
        sample
        for step in range(plan.num_steps)
        for rank in range(plan.num_ranks)
        for micro in plan[step, rank]
        for sample in micro.segments.sample
    ]
    assert seen == plan.order.tolist()
    assert sorted(seen) == list(range(9))
    assert len(plan) == 2


def cells(micros: list[MicroBatch]) -> list[list[int]]:
    return [micro.segments.sample.tolist() for micro in micros]


def test_a_step_is_the_list_of_its_ranks_micro_batches(plan: Plan) -> None:
    by_cell = [[cells(plan[step, rank]) for rank in range(2)] for step in range(2)]
    assert [[cells(rank) for rank in plan[step]] for step in range(2)] == by_cell
    assert [[cells(rank) for rank in step] for step in plan] == by_cell
    assert [[cells(rank) for rank in step] for step in (plan[-2], plan[-1])] == by_cell
    assert [cells(plan[-1, rank]) for rank in range(2)] == by_cell[-1]
    assert cells(plan[np.int64(1), np.int64(0)]) == by_cell[1][0]
    assert cells(plan[np.int64(1)][0]) == by_cell[1][0]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (2, "step 2 is out of range: the plan has 2 steps"),
        (-3, "step -3 is out of range"),
        ((2, 0), "step 2 is out of range"),
        ((-3, 0), "step -3 is out of range"),
        ((0, 2), "rank 2 is out of range: the plan has ranks 0 to 1"),
        ((0, -1), "rank -1 is out of range"),
    ],
)
def test_an_index_out_of_range_is_an_error_in_a_sentence(
    plan: Plan, index: Any, message: str
) -> None:
    with pytest.raises(IndexError, match=message):
        plan[index]


def test_a_plan_of_nothing_has_no_step() -> None:
    empty = make_plan([], Recipe(layout=Packed(max_tokens=8)))
    assert list(empty) == []
    for index in (0, -1, (0, 0)):
        with pytest.raises(IndexError, match="the plan has 0 steps"):
            empty[index]


def test_a_plan_cannot_be_written_to(plan: Plan) -> None:
    with pytest.raises(ValueError, match="read-only"):
        plan.widths[0] = 1
    with pytest.raises(AttributeError):
        plan.widths = plan.widths  # type: ignore[misc]


def test_planning_does_not_keep_or_change_the_callers_array() -> None:
    lengths = np.array([5, 3, 7])
    plan = make_plan(lengths, Recipe(layout=Packed(max_tokens=8)))
    lengths[0] = 99
    assert plan.lengths.tolist() == [5, 3, 7]


def test_restoring_the_wrong_number_of_values_is_refused(plan: Plan) -> None:
    with pytest.raises(InputError, match="8 values but the plan has 9 segments"):
        plan.restore(range(8))


def test_restore_keeps_rows_whole(plan: Plan) -> None:
    rows = np.stack([plan.segments.sample, plan.segments.sample * 10], axis=1)
    assert plan.restore(rows).tolist() == [[i, 10 * i] for i in range(9)]


def test_a_plan_survives_its_file(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan")
    again = Plan.load(tmp_path / "plan")
    assert again.fingerprint == plan.fingerprint
    assert again.recipe == plan.recipe
    assert [p.name for p in tmp_path.iterdir()] == ["plan"]


def test_any_damaged_byte_is_noticed(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan"
    plan.save(path)
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        with pytest.raises(FileError):
            Plan.load(path)


def test_any_truncation_is_noticed(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan"
    plan.save(path)
    data = path.read_bytes()
    for size in range(0, len(data), 5):
        path.write_bytes(data[:size])
        with pytest.raises(FileError, match="truncated"):
            Plan.load(path)


@pytest.mark.parametrize("content", [b"hello", b"PK\x03\x04zip", b"\x80\x04pickle", b"{}"])
def test_foreign_files_are_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.bin"
    path.write_bytes(content * 9)
    with pytest.raises(FileError, match=r"other\.bin is not an Evenstep plan"):
        Plan.load(path)


def test_a_plan_of_another_shape_of_recipe_is_refused(plan: Plan, tmp_path: Path) -> None:
    from tests.internals import plan_file

    payload = plan_file.encode({"layout": {"kind": "stretched"}}, {})
    plan_file.replace_file(tmp_path / "plan", plan_file.pack(payload))
    with pytest.raises(FileError, match="this version cannot read"):
        Plan.load(tmp_path / "plan")


def test_saving_where_nothing_can_be_written_leaves_nothing(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be written"):
        plan.save(tmp_path / "absent" / "plan")
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileError, match="cannot be written"):
        plan.save(tmp_path / "folder")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_no_samples_give_a_plan_of_no_steps() -> None:
    plan = make_plan([], Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=4)))
    assert (plan.num_steps, plan.num_micro_batches) == (0, 0)
    assert plan.stats()["tokens"] == 0


def test_stats_name_the_sequence_that_no_assignment_can_balance() -> None:
    recipe = Recipe(layout=Packed(max_tokens=100), topology=Topology(dp=4), cost=Cost(per_pair=1.0))
    stats = make_plan([5, 100, 7, 9], recipe).stats()
    assert "sample 1 with 100 tokens" in stats["bottleneck"]
    assert "sharing=Sharing()" in stats["bottleneck"]
    # The heaviest rank carries that sequence and nothing else: no plan is better.
    assert stats["balance_optimal"]
    even = make_plan([5] * 16, recipe).stats()
    assert even["bottleneck"] == ""
    assert even["balance_optimal"]
    assert even["packs_optimal"]


def test_step_stats_add_up_to_those_of_the_plan(plan: Plan) -> None:
    steps, whole = plan.step_stats(), plan.stats()
    for name in ("tokens", "slots", "num_micro_batches", "num_samples", "padding"):
        assert sum(step[name] for step in steps) == whole[name]


def test_costs_count_padding_where_it_is_computed() -> None:
    cost = Cost(per_token=1, per_pair=1, per_segment=10, per_micro_batch=100)
    padded = make_plan([2, 4], Recipe(layout=Padded(max_tokens=8), cost=cost))
    assert padded.costs.tolist() == [2 * (4 + 16 + 10) + 100]
    packed = make_plan([2, 4], Recipe(layout=Packed(max_tokens=8, pad_to=8), cost=cost))
    assert packed.costs.tolist() == [8 + (4 + 16) + 2 * 10 + 100]


def test_a_square_that_does_not_fit_64_bits_costs_what_it_should() -> None:
    packed = Recipe(layout=Packed(max_tokens=2**33), cost=Cost(per_token=0, per_pair=1))
    assert make_plan([2**32], packed).costs.tolist() == [2.0**64]
    padded = Recipe(layout=Padded(max_tokens=2**33), cost=Cost(per_token=0, per_pair=1))
    assert make_plan([2**32], padded).costs.tolist() == [2.0**64]


def test_whole_coefficients_do_not_overflow() -> None:
    large = Recipe(layout=Packed(max_tokens=10**5), cost=Cost(per_token=10**14, per_pair=1))
    assert make_plan([10**5], large).costs.tolist() == [1e19 + 1e10]
    larger = Recipe(layout=Packed(max_tokens=10**5), cost=Cost(per_token=10**20))
    plan = make_plan([10**5, 10], larger)
    assert plan.costs.tolist() == [1e25, 1e21]
    assert plan.stats()["imbalance_cost_step"] == 1


@pytest.mark.parametrize("number", [int, float, np.int64, np.float32, np.float64])
def test_equal_plans_have_equal_fingerprints_whatever_numbers_they_were_made_with(
    number: Any, tmp_path: Path
) -> None:
    def made(kind: Any) -> Plan:
        cost = Cost(per_token=kind(24576), per_pair=kind(1))
        recipe = Recipe(layout=Packed(max_tokens=8), cost=cost, limits=Limits(cost=kind(10**6)))
        return make_plan([5, 3], recipe)

    plan = made(number)
    assert plan.recipe == made(float).recipe
    assert plan.fingerprint == made(float).fingerprint
    plan.save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan").fingerprint == plan.fingerprint


def test_a_plan_crosses_processes_and_can_be_copied() -> None:
    recipe = Recipe(layout=Packed(max_tokens=12), limits=Limits(columns={"patches": 9}))
    plan = make_plan([5, 3, 7], recipe, groups=[0, 0, 1], columns={"patches": [1, 2, 3]})
    pickled = [pickle.loads(pickle.dumps(plan, protocol)) for protocol in range(6)]
    for again in (*pickled, pickle.loads(pickle.dumps(pickled[-1])), copy.deepcopy(plan)):
        assert again.fingerprint == plan.fingerprint
        assert again.stats() == plan.stats()
        assert again.recipe == plan.recipe
        assert again.columns["patches"].tolist() == [1, 2, 3]
        for array in (again.widths, again.segments.length, again.columns["patches"]):
            assert not array.flags.writeable


# Equality --------------------------------------------------------------------------------------


@examples(60)
@given(cases())
def test_equal_plans_compare_equal_and_hash_alike(case: Case) -> None:
    try:
        plan = case.plan()
    except EvenstepError:
        return
    for again in (
        case.plan(),
        Plan.from_bytes(plan.to_bytes()),
        pickle.loads(pickle.dumps(plan)),
        copy.copy(plan),
        copy.deepcopy(plan),
        replace(plan),
    ):
        assert again == plan
        assert hash(again) == hash(plan)
        assert {plan: "found"}[again] == "found"


def one_more(values: Any) -> Any:
    changed = np.array(values)
    changed[-1] += 1
    return changed


def test_plans_that_differ_anywhere_are_not_equal(plan: Plan, tmp_path: Path) -> None:
    segments = plan.segments
    columns = {"sample": segments.sample, "start": segments.start, "length": segments.length}
    arrays = ("lengths", "step_of", "row_offsets", "micro_offsets", "cell_offsets", "widths")
    others = [
        *(replace(plan, **{name: one_more(getattr(plan, name))}) for name in arrays),
        *(replace(plan, **{name: getattr(plan, name)[:-1]}) for name in arrays),
        *(
            replace(plan, segments=Segments(**columns | {name: one_more(column)}))
            for name, column in columns.items()
        ),
        replace(plan, groups=None),
        replace(plan, groups=one_more(plan.groups)),
        replace(plan, columns={"patches": plan.lengths}),
        replace(plan, columns={"pixels": plan.lengths}),
        replace(plan, recipe=replace(plan.recipe, min_saving=0.5)),
    ]
    for number, other in enumerate(others):
        assert other != plan
        assert all(other != another for another in others[:number])
        assert other.fingerprint != plan.fingerprint
    plan.save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan") == plan


def test_a_plan_is_equal_to_plans_alone(plan: Plan) -> None:
    assert plan != plan.fingerprint
    assert plan != plan._arrays()
    assert plan.__eq__(None) is NotImplemented
    assert plan in [None, "plan", plan]


def test_static_rows_never_share_a_segment() -> None:
    plan = make_plan([7, 5, 4, 4, 3], Recipe(layout=Packed(rows=2, pad_to=12)))
    assert [(micro.rows, micro.width) for micro in plan[0, 0]] == [(2, 12)]
    assert max(plan.segments.length[a:b].sum() for a, b in zip(
        plan.row_offsets[:-1], plan.row_offsets[1:], strict=True)) <= 12  # fmt: skip


@pytest.mark.parametrize(
    ("lengths", "fault"),
    [
        ([3, 0, 4], "sample 1 has length 0"),
        ([3, -2], "sample 1 has length -2"),
        ([3, 2.5], "sample 1 has length 2.5"),
        ([3, float("nan")], "sample 1 has length nan"),
        (np.array([[1, 2], [3, 4]]), "shape"),
        ([[1, 2], [3, 4]], "got a list for the first one"),
        (np.array(["a"]), "type"),
        (["a"], "got a str for the first one"),
        ([1, 2**50], "sample 1 has length"),
        ([[1], [2, 3]], "got a list for the first one"),
    ],
)
def test_lengths_that_cannot_be_planned_are_refused_by_name(
    lengths: list[object], fault: str
) -> None:
    with pytest.raises(InputError, match=fault):
        make_plan(lengths, Recipe(layout=Packed(max_tokens=8)))  # type: ignore[arg-type]


def test_groups_and_columns_must_match_the_samples() -> None:
    recipe = Recipe(layout=Packed(max_tokens=8))
    with pytest.raises(InputError, match="group has 1 entries for 2 samples"):
        make_plan([1, 2], recipe, groups=[0])
    limited = Recipe.from_dict(
        recipe.to_dict() | {"limits": {"cost": None, "columns": {"patches": 3}}}
    )
    with pytest.raises(InputError, match="'patches', but it was not given"):
        make_plan([1, 2], limited)
    with pytest.raises(InputError, match="sample 1 has patches -1"):
        make_plan([1, 2], limited, columns={"patches": [0, -1]})
    with pytest.raises(EvenstepError, match=r"sample 1 takes 4 of limits.columns.patches"):
        make_plan([1, 2], limited, columns={"patches": [0, 4]})
