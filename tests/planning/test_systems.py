"""The worked cases of NeMo-RL, ROLL and VeOmni, with the numbers as they should be."""

import numpy as np
import pytest

from evenstep import Cost, Packed, Padded, Plan, Recipe, Steps, Topology, make_plan, pack
from evenstep.errors import ConfigError, InputError

TENS = [10, 20, 30, 40, 50, 60, 70, 80, 90]
MIXED = [46, 24, 55, 88, 11, 14, 73, 17]
ROLL = [7, 6, 8, 5, 1, 3, 8, 6]


def bins(lengths: list[int], capacity: int, packer: str) -> list[list[int]]:
    return pack(lengths, capacity, packer).tolist()


def as_sets(rows: list[list[int]]) -> set[frozenset[int]]:
    return {frozenset(row) for row in rows}


def widths_by_rank(plan: Plan) -> list[list[int]]:
    return [[micro.width for micro in plan[0, rank]] for rank in range(plan.num_ranks)]


class TestNeMoPackers:
    @pytest.mark.parametrize(
        ("packer", "expected"),
        [
            ("concatenative", [[0, 1, 2, 3], [4], [5], [6], [7], [8]]),
            ("first_fit_decreasing", [[8, 0], [7, 1], [6, 2], [5, 3], [4]]),
            ("modified_first_fit_decreasing", [[8, 0], [7, 1], [6, 2], [5, 3], [4]]),
        ],
    )
    def test_tens_at_capacity_100(self, packer: str, expected: list[list[int]]) -> None:
        assert bins(TENS, 100, packer) == expected

    def test_equal_lengths_go_later_items_first_in_first_fit_decreasing(self) -> None:
        assert bins([30] * 5, 100, "first_fit_decreasing") == [[4, 3, 2], [1, 0]]
        assert bins([30] * 5, 100, "concatenative") == [[0, 1, 2], [3, 4]]
        modified = bins([30] * 5, 100, "modified_first_fit_decreasing")
        assert as_sets(modified) == {frozenset([0, 1, 2]), frozenset([3, 4])}

    def test_mixed_lengths_at_capacity_100(self) -> None:
        assert len(bins(MIXED, 100, "concatenative")) == 5
        assert bins(MIXED, 100, "first_fit_decreasing") == [[3, 4], [6, 1], [2, 7, 5], [0]]
        modified = bins(MIXED, 100, "modified_first_fit_decreasing")
        assert as_sets(modified) == as_sets([[3, 4], [6, 5], [2, 7, 1], [0]])

    def test_concatenative_at_two_capacities(self) -> None:
        lengths = [4, 1, 3, 2, 1, 3, 4, 5]
        assert bins(lengths, 5, "concatenative") == [[0, 1], [2, 3], [4, 5], [6], [7]]
        assert bins(lengths, 8, "concatenative") == [[0, 1, 2], [3, 4, 5], [6], [7]]

    def test_too_many_bins_for_the_sequences_are_refused(self) -> None:
        with pytest.raises(InputError, match="Cannot create 3 bins with only 2 sequences"):
            pack([1, 1], 10, min_bin_count=3)
        with pytest.raises(ConfigError):
            pack([1, 1], 10, min_bin_count=-1)
        with pytest.raises(ConfigError):
            pack([1, 1], 10, bin_count_multiple=0)

    def test_a_length_over_capacity_or_below_one_is_refused_by_name(self) -> None:
        with pytest.raises(InputError, match="item 1 has length 11 but a bin holds 10"):
            pack([1, 11], 10)
        with pytest.raises(InputError, match="item 0 has length 0"):
            pack([0, 1], 10)

    def test_splitting_to_reach_a_count_keeps_the_work_even(self) -> None:
        lengths = np.array([8, 7, 6, 5, 4, 3, 2, 1])
        split = pack(lengths, 100, min_bin_count=4)
        assert sorted(split.sums(lengths)) == [9, 9, 9, 9]


class TestNeMoMetrics:
    @pytest.mark.parametrize(
        ("packer", "utilization", "balance", "efficiency"),
        [("first_fit_decreasing", 0.9, 0.7515, 1.0), ("concatenative", 0.75, 0.7506, 0.8333)],
    )
    def test_bin_metrics(
        self, packer: str, utilization: float, balance: float, efficiency: float
    ) -> None:
        # A balance other than refined keeps the packer's own bins.
        recipe = Recipe(layout=Packed(max_tokens=100, packer=packer), balance="lpt")
        stats = make_plan(TENS, recipe).stats()
        assert stats["bin_utilization"] == pytest.approx(utilization)
        assert stats["waste_ratio"] == pytest.approx(1 - utilization)
        assert stats["bin_balance"] == pytest.approx(balance, abs=1e-4)
        assert stats["packing_efficiency"] == pytest.approx(efficiency, abs=1e-4)


class TestNeMoSharding:
    def test_samples_stay_in_their_global_batch(self) -> None:
        recipe = Recipe(
            layout=Packed(samples=2),
            topology=Topology(dp=2),
            steps=Steps(samples=4),
            balance="stride",
        )
        plan = make_plan([5] * 8, recipe)
        by_rank = [[plan[s, r][0].segments.sample.tolist() for s in range(2)] for r in range(2)]
        assert by_rank == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]

    def test_dynamic_batching_cuts_by_the_largest_row_over_the_ranks(self) -> None:
        recipe = Recipe(
            layout=Padded(max_tokens=32, round_to=4, cut="greedy"), topology=Topology(dp=2)
        )
        plan = make_plan([2, 8, 4, 16, 28, 32, 2, 32], recipe)
        assert widths_by_rank(plan) == [[8, 28, 32]] * 2
        assert [micro.rows for micro in plan[0, 0]] == [2, 1, 1]

    def test_two_rows_on_four_ranks_leave_two_ranks_with_an_empty_micro_batch(self) -> None:
        plan = make_plan([3, 4], Recipe(layout=Packed(max_tokens=8), topology=Topology(dp=4)))
        assert [plan[0, rank][0].is_empty for rank in range(4)] == [False, False, True, True]

    def test_alignment_counts_towards_the_pack(self) -> None:
        def width(lengths: list[int], unit: int) -> int:
            topology = Topology(tp=unit, sequence_parallel=unit > 1)
            plan = make_plan(lengths, Recipe(layout=Packed(max_tokens=64), topology=topology))
            return int(plan.widths[0])

        assert width([8, 5, 7], 4) == 24
        assert width([12, 3, 8, 1], 1) == 24
        assert width([12, 3, 8, 1], 4) == 28

    def test_pipeline_stages_pad_every_pack_to_the_longest(self) -> None:
        recipe = Recipe(layout=Packed(max_tokens=10), topology=Topology(pp=2))
        plan = make_plan([9, 7, 5], recipe)
        assert plan.widths.tolist() == [9, 9, 9]

    def test_the_order_is_a_forward_permutation(self) -> None:
        plan = make_plan([1, 2, 3, 4], Recipe(layout=Packed(samples=1), balance="stride"))
        rows = plan.segments.sample * 10
        assert plan.restore(rows).tolist() == [0, 10, 20, 30]


class TestRoll:
    @pytest.mark.parametrize(
        ("budget", "topology", "widths", "slots", "removed"),
        [
            (10, Topology(dp=2), [4, 6, 8, 8], 52, 0.35),
            (12, Topology(dp=2), [6, 8, 8], 56, 0.30),
            # Splitting for the pipeline tightens the width again: 4 and 6, where ROLL keeps 6, 6.
            (12, Topology(dp=2, pp=2, vpp=2, variable_seq_lengths=True), [4, 6, 8, 8], 52, 0.35),
        ],
    )
    def test_the_worked_example(
        self, budget: int, topology: Topology, widths: list[int], slots: int, removed: float
    ) -> None:
        layout = Padded(max_tokens=budget, round_to=2, cut="greedy")
        plan = make_plan(ROLL, Recipe(layout=layout, topology=topology))
        assert widths_by_rank(plan) == [widths, widths]
        assert plan.order.tolist() == [4, 3, 7, 2, 5, 1, 0, 6]
        stats = plan.stats(width=10)
        assert (stats["tokens"], stats["slots_before"], stats["slots"]) == (44, 80, slots)
        assert stats["removed_padding_ratio"] == pytest.approx(removed)

    def test_the_second_case(self) -> None:
        layout = Padded(max_tokens=20, round_to=2, cut="greedy")
        plan = make_plan([2, 4, 7, 6, 3, 4], Recipe(layout=layout, topology=Topology(dp=2)))
        assert widths_by_rank(plan) == [[4, 8]] * 2
        assert plan.order.tolist() == [0, 1, 3, 4, 5, 2]
        stats = plan.stats(width=20)
        assert (stats["tokens"], stats["slots_before"], stats["slots"]) == (26, 120, 32)
        assert stats["removed_padding_ratio"] == pytest.approx(0.7333, abs=1e-4)

    def test_one_micro_batch_is_split_as_often_as_the_pipeline_needs(self) -> None:
        """ROLL splits each micro-batch once at most, and fails here."""
        topology = Topology(pp=4, vpp=2, variable_seq_lengths=True)
        plan = make_plan(
            [4] * 8, Recipe(layout=Padded(max_tokens=32, cut="greedy"), topology=topology)
        )
        assert [micro.rows for micro in plan[0, 0]] == [2, 2, 2, 2]

    def test_seven_rows_on_two_ranks_are_planned(self) -> None:
        """An IndexError there."""
        for cut in ("greedy", "optimal"):
            layout = Padded(max_tokens=12, round_to=2, cut=cut)
            plan = make_plan(ROLL[:7], Recipe(layout=layout, topology=Topology(dp=2)))
            assert len(plan.segments) == 7

    def test_the_cap_is_hard(self) -> None:
        """Three sequences of 2500 under a cap of 4096: ROLL's load balance makes 5000."""
        cost = Cost(per_token=24576, per_pair=1)
        plan = make_plan([2500] * 3, Recipe(layout=Packed(max_tokens=4096), cost=cost))
        assert plan.slots.tolist() == [2500] * 3


class TestVeOmni:
    def test_fixed_batches_are_packed_without_padding(self) -> None:
        plan = make_plan([4, 2, 3, 1], Recipe(layout=Packed(samples=2), balance="stride"))
        assert [micro.segments.sample.tolist() for micro in plan[0, 0]] == [[0, 1], [2, 3]]
        assert plan.widths.tolist() == [6, 4]
        assert plan.stats()["padding"] == 0

    def test_fixed_batches_are_even_by_default(self) -> None:
        plan = make_plan([4, 2, 3, 1], Recipe(layout=Packed(samples=2)))
        assert plan.widths.tolist() == [5, 5]

    def test_padding_to_a_fixed_length_gives_static_shapes(self) -> None:
        plan = make_plan([4, 2, 3], Recipe(layout=Packed(max_tokens=8, pad_to=8)))
        assert plan.widths.tolist() == [8, 8]
