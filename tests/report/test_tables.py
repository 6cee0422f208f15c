from dataclasses import replace

import pytest

from evenstep import Cost, Packed, Padded, Recipe, Topology, make_plan
from evenstep.report import Entry, Row, comparison_page, plan_page, plan_picture, sections
from tests.handmade import handmade
from tests.internals import HEADER, cells, cost_line, factor, percent, seconds, step_table, times

RECIPE = Recipe(layout=Packed(max_tokens=10), topology=Topology(dp=2))
EVEN = handmade([5, 5, 5, 5], [[[[[0, 1]]], [[[2, 3]]]]], RECIPE)
UNEVEN = handmade([5, 5, 5, 5], [[[[[0, 1]], [[2]]], [[[3]], [[]]]]], RECIPE)


def test_every_section_has_its_rows() -> None:
    found = {section.title: section.rows for section in sections(UNEVEN.stats())}
    assert list(found) == ["Plan", "Padding", "Balance", "Bounds", "Over-long samples"]
    assert [row.label for row in found["Over-long samples"]] == ["none"]
    assert "1 empty" in found["Plan"][2].note


def test_an_optimal_plan_is_reported_as_optimal() -> None:
    bounds = {section.title: section.rows for section in sections(EVEN.stats())}["Bounds"]
    assert "the count per rank is optimal" in bounds[0].note
    assert "no plan of this recipe is faster" in bounds[1].note


def test_the_floor_of_padded_rows_is_said_to_be_loose_where_ranks_wait_in_every_wave() -> None:
    padded = Recipe(layout=Padded(samples=2), topology=Topology(dp=2), balance="none")
    loose = {}
    for name, recipe in {
        "padded": padded,
        "static": replace(padded, layout=Padded(samples=2, pad_to=10)),
        "once per step": replace(padded, sync_every="step"),
        "packed": replace(RECIPE, balance="none"),
    }.items():
        plan = make_plan([2, 9, 5, 4, 3, 8], recipe)
        assert not plan.stats()["balance_optimal"] or name == "static"
        notes = [row.note for row in sections(plan.stats(), recipe)[3].rows]
        loose[name] = "leaves out padding" in notes[1]
        assert "leaves out" not in sections(plan.stats())[3].rows[1].note
        assert ("leaves out padding" in plan_page(plan)) == loose[name]
    assert [name for name, is_loose in loose.items() if is_loose] == ["padded"]


def test_the_balance_says_what_the_cost_counts() -> None:
    balance = {section.title: section.rows for section in sections(EVEN.stats())}["Balance"]
    assert (balance[0].label, balance[0].value) == ("cost", "tokens only")
    assert "attention is not counted" in balance[0].note


def test_plans_with_different_costs_name_each_once() -> None:
    squares = replace(RECIPE, cost=Cost(per_token=0, per_pair=1))
    other = handmade([5, 5, 5, 5], [[[[[0, 1]]], [[[2, 3]]]]], squares)
    assert cost_line([EVEN, UNEVEN, other]) == "cost: tokens only or L²"
    assert "cost: L²" in plan_picture(other)
    assert "cost: tokens only or L²" in comparison_page([Entry("a", EVEN), Entry("b", other)])


def test_a_count_of_one_is_singular() -> None:
    stats = handmade([10], [[[[[0]]]]], Recipe(layout=Packed(max_tokens=10))).stats()
    stats |= {"num_truncated": 1, "tokens_truncated": 1, "num_dropped": 2, "tokens_dropped": 30}
    notes = [row.note for section in sections(stats) for row in section.rows]
    assert "1 token lost" in notes
    assert "30 tokens lost" in notes
    assert any(note.startswith("lower bound 1") for note in notes)


def test_padding_removed_is_against_padded_batches_of_8() -> None:
    lengths = [4] * 7 + [10] + [6, 2]  # batches of 8 in order: 8 · 10 + 2 · 6 slots, 46 tokens
    plan = make_plan(lengths, Recipe(layout=Packed(max_tokens=46)))
    padding = {row.label: row for row in sections(plan.stats())[1].rows}
    note = "100 % of the 46 of padded batches of 8"
    assert padding["padding removed"] == Row("padding removed", "46", note)
    even = make_plan([4] * 8, Recipe(layout=Packed(max_tokens=32)))
    padding = {row.label: row for row in sections(even.stats())[1].rows}
    assert padding["padding removed"].note == "padded batches of 8 have none"


def test_the_table_of_steps_has_a_row_for_each() -> None:
    header, rows = step_table(EVEN.step_stats())
    assert [len(row) for row in rows] == [len(header)]


def test_the_best_of_a_column_is_marked() -> None:
    even, uneven, none = cells([Entry("a", EVEN), Entry("b", UNEVEN), Entry("c", fault="x")])
    assert len(even) == len(uneven) == len(HEADER)
    assert none == []
    time = HEADER.index("modelled time")
    assert (even[time].text, even[time].best) == ("1.0000×", True)
    assert not uneven[time].best
    assert not even[-1].best


def test_a_single_strategy_is_not_marked_as_best() -> None:
    assert not any(cell.best for cell in cells([Entry("a", EVEN)])[0])


def test_a_page_shows_faults_and_bottlenecks() -> None:
    page = comparison_page([Entry("a", EVEN), Entry("b", fault="sample 3 is too long")])
    assert "sample 3 is too long" in page
    lonely = handmade([9, 1], [[[[[0]]], [[[1]]]]], RECIPE)
    assert 'class="bottleneck"' in plan_page(lonely)
    assert 'class="bottleneck"' not in plan_page(EVEN)


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0, "0 %"),
        (0.000001, "< 0.01 %"),
        (0.01234, "1.23 %"),
        (0.5, "50.0 %"),
        (0.99999, "99.99 %"),
        (1, "100 %"),
    ],
)
def test_percentages_never_round_to_none_or_all(ratio: float, text: str) -> None:
    assert percent(ratio) == text


def test_numbers_are_written_for_people() -> None:
    assert [factor(1.00345), factor(4.2)] == ["1.0034×", "4.20×"]
    assert [seconds(0.00123), seconds(12.34)] == ["1.2 ms", "12.3 s"]
    assert [times(1, "micro-batch"), times(2, "step")] == ["1 micro-batch", "2 steps"]
