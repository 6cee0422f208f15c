"""NeMo-RL's packers and metrics: its rules on random lengths, and where bins differ by design."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from evenstep import Topology
from evenstep.compat.nemo_rl import (
    ConcatenativePacker,
    FirstFitDecreasingPacker,
    FirstFitShufflePacker,
    ModifiedFirstFitDecreasingPacker,
    PackingAlgorithm,
    PackingMetrics,
    get_packer,
)
from evenstep.errors import ConfigError, InputError

TENS = [10, 20, 30, 40, 50, 60, 70, 80, 90]
MIXED = [46, 24, 55, 88, 11, 14, 73, 17]
CASES = 500


def random_cases(seed: int) -> list[tuple[list[int], int]]:
    """(lengths, capacity) of many shapes: few or many items, small or large ones."""
    rng = np.random.default_rng(seed)
    cases = []
    for _ in range(CASES):
        capacity = int(rng.integers(1, 200))
        most = int(rng.integers(1, capacity + 1))
        cases.append((rng.integers(1, most + 1, rng.integers(0, 40)).tolist(), capacity))
    return cases


def first_fit(items: list[tuple[int, int]], capacity: int) -> list[list[int]]:
    """(length, index) in order, each into the first bin with room."""
    bins: list[list[int]] = []
    room: list[int] = []
    for length, index in items:
        at = next((b for b, left in enumerate(room) if left >= length), len(bins))
        if at == len(bins):
            bins.append([])
            room.append(capacity)
        bins[at].append(index)
        room[at] -= length
    return bins


def five_phases(lengths: list[int], capacity: int) -> list[list[int]]:
    """Modified first fit decreasing, as the document lists it; bins of lengths."""
    falling = sorted(lengths, reverse=True)
    bins = [[n] for n in falling if 2 * n > capacity]
    medium = [n for n in falling if 2 * n <= capacity < 3 * n]
    small = [n for n in falling if 3 * n <= capacity < 6 * n]
    tiny = [n for n in falling if 6 * n <= capacity]
    paired = []
    for each in bins:
        fit = next((n for n in medium if n <= capacity - sum(each)), 0)
        paired.append(fit > 0)
        if fit:
            medium.remove(fit)
            each.append(fit)
    for each, has_medium in reversed(list(zip(bins, paired, strict=True))):
        room = capacity - sum(each)
        if has_medium or len(small) < 2 or small[-1] + small[-2] > room:
            continue
        least = small.pop()
        mate = next(n for n in small if n <= room - least)
        small.remove(mate)
        each += [least, mate]
    left = sorted(medium + small + tiny, reverse=True)
    for each in bins:
        while fits := [n for n in left if n <= capacity - sum(each)]:
            left.remove(fits[0])
            each.append(fits[0])
    packed = first_fit([(n, index) for index, n in enumerate(left)], capacity)
    return bins + [[left[index] for index in each] for each in packed]


@pytest.mark.parametrize(
    ("packer", "expected"),
    [
        ("concatenative", [[0, 1, 2, 3], [4], [5], [6], [7], [8]]),
        ("first_fit_decreasing", [[8, 0], [7, 1], [6, 2], [5, 3], [4]]),
        ("modified_first_fit_decreasing", [[8, 0], [7, 1], [6, 2], [5, 3], [4]]),
    ],
)
def test_the_worked_cases(packer: str, expected: list[list[int]]) -> None:
    assert get_packer(packer, 100).pack(TENS) == expected


def test_equal_and_mixed_lengths() -> None:
    assert get_packer("concatenative", 100).pack([30] * 5) == [[0, 1, 2], [3, 4]]
    assert get_packer("first_fit_decreasing", 100).pack([30] * 5) == [[4, 3, 2], [1, 0]]
    assert len(get_packer("concatenative", 100).pack(MIXED)) == 5
    assert get_packer("first_fit_decreasing", 100).pack(MIXED) == [[3, 4], [6, 1], [2, 7, 5], [0]]
    # Of the same bins, NeMo-RL lists the items in the order in which its phases found them, and the
    # emptiest bin of leftovers first.
    modified = get_packer("modified_first_fit_decreasing", 100)
    assert [sorted(each) for each in modified.pack(MIXED)] == [[3, 4], [5, 6], [1, 2, 7], [0]]
    assert sorted(modified.pack([30] * 5)) == [[0, 1, 2], [3, 4]]


def test_the_document_s_four_sequences_make_one_pack() -> None:
    lengths = [3, 6, 2, 3]
    for algorithm in PackingAlgorithm:
        assert len(get_packer(algorithm, 15).pack(lengths)) == 1
    assert 1 - sum(lengths) / (4 * 6) == pytest.approx(0.4, abs=0.02)


def test_concatenative_is_next_fit() -> None:
    for lengths, capacity in random_cases(0):
        bins: list[list[int]] = []
        room = 0
        for index, length in enumerate(lengths):
            if length > room:
                bins.append([])
                room = capacity
            bins[-1].append(index)
            room -= length
        assert ConcatenativePacker(capacity).pack(lengths) == bins


def test_first_fit_decreasing_takes_the_higher_index_of_equal_lengths_first() -> None:
    for lengths, capacity in random_cases(1):
        items = sorted(((n, i) for i, n in enumerate(lengths)), reverse=True)
        assert FirstFitDecreasingPacker(capacity).pack(lengths) == first_fit(items, capacity)


def test_modified_first_fit_decreasing_has_the_bins_of_the_five_phases() -> None:
    """Up to equal lengths. NeMo-RL's code packs leftovers into the emptiest bin instead."""
    for lengths, capacity in random_cases(2):
        found = ModifiedFirstFitDecreasingPacker(capacity).pack(lengths)
        sizes = Counter(tuple(sorted(lengths[i] for i in each)) for each in found)
        assert sizes == Counter(tuple(sorted(each)) for each in five_phases(lengths, capacity))


def test_first_fit_shuffle_is_first_fit_in_an_order_of_its_seed() -> None:
    for seed, (lengths, capacity) in enumerate(random_cases(3)):
        order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
        expected = first_fit([(lengths[i], i) for i in order], capacity)
        assert FirstFitShufflePacker(capacity, seed=seed).pack(lengths) == expected


def test_a_shuffle_does_not_depend_on_global_random_state() -> None:
    np.random.seed(1)  # noqa: NPY002
    first = get_packer("first_fit_shuffle", 100).pack(MIXED)
    np.random.seed(2)  # noqa: NPY002
    assert get_packer("first_fit_shuffle", 100).pack(MIXED) == first
    orders = {str(get_packer("first_fit_shuffle", 100, seed=s).pack(MIXED)) for s in range(9)}
    assert len(orders) > 1


@pytest.mark.parametrize("algorithm", list(PackingAlgorithm))
def test_more_bins_are_filled_evenly(algorithm: PackingAlgorithm) -> None:
    """NeMo-RL moves single sequences into bins of their own: 36 becomes 30, 1, 2 and 3."""
    lengths = [8, 7, 6, 5, 4, 3, 2, 1]
    bins = get_packer(algorithm, 100, min_bin_count=3, bin_count_multiple=4).pack(lengths)
    assert [sum(lengths[i] for i in each) for each in bins] == [9, 9, 9, 9]


def singletons_moved(bins: list[list[int]], target: int) -> list[list[int]]:
    """NeMo-RL's way to more bins: the last item of the bin with the most items, again and again."""
    moved = [list(each) for each in bins]
    for _ in range(target - len(bins)):
        source = max((each for each in moved if len(each) > 1), key=len)
        moved.append([source.pop()])
    return moved


@pytest.mark.parametrize("algorithm", list(PackingAlgorithm))
def test_the_count_is_the_target_and_bins_are_no_larger_than_there(
    algorithm: PackingAlgorithm,
) -> None:
    for lengths, capacity in random_cases(4)[:200]:
        natural = get_packer(algorithm, capacity).pack(lengths)
        least, multiple = len(natural) // 2 + 2, 3
        target = -(-max(len(natural), least) // multiple) * multiple
        packer = get_packer(algorithm, capacity, min_bin_count=least, bin_count_multiple=multiple)
        if target > len(lengths):
            match = f"Cannot create {target} bins with only {len(lengths)} sequences"
            with pytest.raises(ValueError, match=match):
                packer.pack(lengths)
            continue
        bins = packer.pack(lengths)
        assert len(bins) == target
        assert sorted(i for each in bins for i in each) == list(range(len(lengths)))
        largest = max(sum(lengths[i] for i in each) for each in bins)
        there = singletons_moved(natural, target)
        assert largest <= max(sum(lengths[i] for i in each) for each in there)


def test_wrong_arguments_are_value_errors() -> None:
    wrong: Any = object()
    cases: list[tuple[Any, ...]] = [
        ("best", 10),
        (wrong, 10),
        ("concatenative", 0),
        ("concatenative", 10, False, -1),
        ("concatenative", 10, False, None, 0),
    ]
    for arguments in cases:
        with pytest.raises(ConfigError):
            get_packer(*arguments)
    for lengths, match in (([5, 11], "length 11 but a bin holds 10"), ([3, 0], "length 0")):
        for algorithm in PackingAlgorithm:  # there, only MFFD refuses a length of 0
            with pytest.raises(InputError, match=match):
                get_packer(algorithm, 10).pack(lengths)


def test_names_are_taken_in_any_case_and_as_enum() -> None:
    for name in ("CONCATENATIVE", "Concatenative", PackingAlgorithm.CONCATENATIVE):
        assert isinstance(get_packer(name, 10), ConcatenativePacker)


# Metrics -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packer", "utilization", "balance", "efficiency"),
    [("first_fit_decreasing", 0.9, 0.7515, 1.0), ("concatenative", 0.75, 0.7506, 0.8333)],
)
def test_the_metrics_of_the_worked_case(
    packer: str, utilization: float, balance: float, efficiency: float
) -> None:
    made = get_packer(packer, 100)
    metrics = made.compute_metrics(TENS, made.pack(TENS))
    assert metrics["average_utilization"] == pytest.approx(utilization)
    assert metrics["waste_ratio"] == pytest.approx(1 - utilization)
    assert metrics["bin_balance"] == pytest.approx(balance, abs=1e-4)
    assert metrics["bin_efficiency"] == pytest.approx(efficiency, abs=1e-4)
    assert metrics["num_sequences"] == 9
    assert metrics["total_sequence_length"] == 450
    assert metrics["total_bin_capacity"] == 100 * metrics["num_bins"]
    assert metrics["total_waste"] == metrics["total_bin_capacity"] - 450
    assert metrics["theoretical_min_bins"] == 5


def test_one_bin_is_balanced_and_no_bin_has_no_metrics() -> None:
    packer = get_packer("concatenative", 10)
    assert packer.compute_metrics([4], [[0]])["bin_balance"] == 1.0
    assert set(packer.compute_metrics([], []).values()) == {0}


def test_metrics_are_aggregated_over_calls_if_they_are_collected() -> None:
    packer = get_packer("first_fit_decreasing", 100, collect_metrics=True)
    packer.pack(TENS)
    packer.pack([100, 50])
    found = packer.get_aggregated_metrics()
    assert found == {
        "total_sequences": 11,
        "total_bins": 7,
        "average_utilization": pytest.approx(600 / 700),
        "min_utilization": pytest.approx(0.75),
        "max_utilization": pytest.approx(0.9),
        "average_waste_ratio": pytest.approx(100 / 700),
        "min_waste_ratio": pytest.approx(0.1),
        "max_waste_ratio": pytest.approx(0.25),
        "average_bin_count": 3.5,
        "bin_efficiency": pytest.approx(6 / 7),
    }
    packer.reset_metrics()
    assert packer.get_aggregated_metrics() == {}
    without = get_packer("concatenative", 100)
    without.pack(TENS)
    assert without.get_aggregated_metrics() == {}


def test_metrics_are_printed_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    packer = get_packer("concatenative", 100, collect_metrics=True)
    packer.pack(TENS)
    packer.print_metrics()
    assert "average_utilization: 0.75" in capsys.readouterr().out
    get_packer("concatenative", 100).print_metrics()
    assert "collect_metrics=True" in capsys.readouterr().out


def test_metrics_by_themselves() -> None:
    metrics = PackingMetrics()
    assert metrics.get_aggregated_stats() == {}
    assert metrics.update([60, 50, 40], [[0, 2], [1]], 100)["num_bins"] == 2
    assert metrics.get_aggregated_stats()["total_bins"] == 2


# Alignment ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "recipe", "multiple"),
    [
        (Topology(), "tensorwise", 16),
        (Topology(), "mxfp8", 32),
        (Topology(), "blockwise", 128),
        (Topology(tp=2), "mxfp8", 32),
        (Topology(tp=2, sequence_parallel=True), "mxfp8", 64),
        (Topology(cp=2), "tensorwise", 64),
        (Topology(cp=4, tp=2, sequence_parallel=True), "blockwise", 2048),
        (Topology(cp=8, tp=8, sequence_parallel=True), "blockwise", 16384),
        (Topology(cp=2, tp=2, pp=4, sequence_parallel=True), "tensorwise", 128),
    ],
)
def test_fp8_needs_packs_of_a_multiple(topology: Topology, recipe: Any, multiple: int) -> None:
    assert topology.fp8_multiple(recipe) == multiple
    assert multiple % (2 * topology.cp if topology.cp > 1 else 1) == 0


def test_an_unknown_fp8_recipe_is_refused() -> None:
    recipe: Any = "fp4"
    with pytest.raises(ConfigError, match="expected one of: tensorwise, mxfp8, blockwise"):
        Topology().fp8_multiple(recipe)
