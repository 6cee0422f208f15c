"""ROLL's sequence packing: a hard cap, equal counts, results in the order of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.compat.roll import (
    LoadBalancePacker,
    SequencePackingConfig,
    make_micro_batch_iter_for_sequence_packing,
    restore_results_order,
)
from evenstep.errors import ConfigError
from tests.compat.roll_data import Data, rollouts
from tests.examples import examples
from tests.internals import sequence_packing

CAP = 128


def config_of(cap: int = CAP) -> SequencePackingConfig:
    return SequencePackingConfig(algorithm="load_balance", max_packed_sequence_length_train=cap)


def packed(data: Data, cap: int = CAP, *, tp: int = 1, cp: int = 1, vp: int = 1) -> list[Data]:
    return list(
        make_micro_batch_iter_for_sequence_packing(
            data, tp, cp, vp, is_train=True, dp_group=object(), config=config_of(cap)
        )
    )


@examples(200)
@given(
    lengths=st.lists(st.integers(0, CAP - 7), max_size=12),
    tp=st.sampled_from([1, 2]),
    vp=st.integers(1, 3),
)
def test_every_row_is_in_one_pack_within_the_cap(lengths: list[int], tp: int, vp: int) -> None:
    data = rollouts(lengths, CAP)
    found = packed(data, tp=tp, vp=vp)
    packs = data.meta_info["partition_indices_list"]
    assert sorted(row for rows in packs for row in rows) == list(range(len(lengths)))
    assert len(found) % vp == 0
    assert len(found) == len(packs)
    for number, micro in enumerate(found):
        about, rows = micro.meta_info, packs[number]
        assert micro.batch["scores"].tolist() == rows == about["partition_indices"]
        assert (about["micro_batch_idx"], about["num_micro_batchs"]) == (number, len(found))
        assert about["is_padding_batch"] == (not rows)
        assert sum(max(-(-lengths[row] // 16), 1) * 16 for row in rows) <= CAP
    if lengths:
        joined = torch.cat([micro.batch["scores"] for micro in found])
        results = {"values": joined * 10, "loss": torch.tensor(3.0)}
        restored = restore_results_order(results, packs, config_of())
        assert restored["values"].tolist() == [10 * row for row in range(len(lengths))]
        assert float(restored["loss"]) == 3


def test_the_cap_is_hard() -> None:
    """ROLL packs two of three rows of 2500 under a cap of 4096: 5000 tokens."""
    data = rollouts([2500] * 3, 2500)
    assert [len(micro) for micro in packed(data, 4096)] == [1, 1, 1]
    with pytest.raises(AssertionError, match="sample 0 has 2512 tokens"):
        packed(rollouts([2500], 2500), 2000)


def test_a_rank_with_fewer_rows_than_packs_has_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it asserts while the other ranks hang."""
    monkeypatch.setattr(sequence_packing, "_most_over_ranks", lambda count, group: max(count, 4))
    found = packed(rollouts([100, 3], CAP))
    assert len(found) == 4
    assert sorted(len(micro) for micro in found) == [0, 0, 1, 1]


def test_without_an_algorithm_rows_stay_in_order() -> None:
    data = rollouts([3, 1, 2, 2, 1], 4)
    found = list(make_micro_batch_iter_for_sequence_packing(data, 1, 1, 1, micro_batch_size=2))
    assert [micro.batch["scores"].tolist() for micro in found] == [[0, 1], [2, 3], [4]]
    results = {"values": torch.arange(5)}
    assert restore_results_order(results, [])["values"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ConfigError, match="needs a micro_batch_size"):
        list(make_micro_batch_iter_for_sequence_packing(data, 1, 1, 1))


def test_work_and_options() -> None:
    assert LoadBalancePacker.calculate_workload(100) == 24576 * 100 + 100**2
    with pytest.raises(ConfigError, match="max_packed_sequence_length_forward is missing"):
        list(
            LoadBalancePacker(config_of()).make_micro_batch_iter_for_sequence_packing(
                rollouts([3], 4), 1, 1, 1
            )
        )
    with pytest.raises(ConfigError, match="unknown algorithm 'best'"):
        SequencePackingConfig(algorithm="best")  # type: ignore[arg-type]
