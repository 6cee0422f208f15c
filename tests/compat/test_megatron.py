"""Megatron's packing scheduler. The base classes are ours: PyPI has no release with them.

They have the constructors of `BasePackingScheduler` at d98e8a64 (main) and d48bd6be (dev).
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Cost
from evenstep.compat.megatron import PlannedPacking
from tests.compat.attempts import attempt
from tests.examples import examples

BUDGET = 16  # per dp x cp rank


class MainScheduler:
    """The constructor on main."""

    def __init__(
        self,
        max_seqlen_per_dp_cp_rank: int,
        cp_size: int,
        dp_size: int,
        microbatch_group_size_per_vp_stage: int | None,
    ) -> None:
        self.max_seqlen_per_dp_cp_rank = max_seqlen_per_dp_cp_rank
        self.cp_size, self.dp_size = cp_size, dp_size
        self.microbatch_group_size_per_vp_stage = microbatch_group_size_per_vp_stage


class DevScheduler(MainScheduler):
    """The constructor on dev."""

    def __init__(self, *args: int | None, max_num_seqs: int | None = None) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.max_num_seqs = max_num_seqs


class OnMain(PlannedPacking, MainScheduler):
    pass


class OnDev(PlannedPacking, DevScheduler):
    cost = Cost.tokens()


@examples(300)
@given(
    lengths=st.lists(st.integers(1, BUDGET), min_size=1, max_size=40),
    dp=st.integers(1, 3),
    cp=st.integers(1, 2),
    group=st.sampled_from([None, 2]),
    most=st.sampled_from([None, 2]),
)
def test_micro_batches_keep_budget_number_and_multiple(
    lengths: list[int], dp: int, cp: int, group: int | None, most: int | None
) -> None:
    scheduler: PlannedPacking = OnMain(BUDGET, cp, dp, group)
    if most is not None:
        scheduler = OnDev(BUDGET, cp, dp, group, max_num_seqs=most)
    pairs = [(100 + i, n) for i, n in enumerate(lengths)]
    found, fault = attempt(lambda: scheduler.get_groups_and_subsamples(pairs), AssertionError)
    if found is None:
        assert "cannot fill" in fault
        assert len(lengths) % (dp * (group or 1))
        return
    assert len(found) % (group or 1) == 0
    assert {len(micro) for micro in found} == {dp * cp}
    for micro in found:
        for rank, ids in enumerate(micro):
            assert ids
            assert ids == micro[rank - rank % cp]
            assert sum(lengths[i - 100] for i in ids) <= BUDGET * cp
            assert most is None or len(ids) <= most
    once = [i for micro in found for ids in micro[::cp] for i in ids]
    assert sorted(once) == [100 + i for i in range(len(lengths))]


def test_one_pack_is_divided_between_two_ranks() -> None:
    """main raises here."""
    found = OnMain(BUDGET, 1, 2, None).get_groups_and_subsamples([(0, 5), (1, 5)])
    assert sorted(map(tuple, found[0])) == [(0,), (1,)]


def test_a_sample_over_the_budget_is_named() -> None:
    """main and dev run it, after an empty pack if it is the first."""
    with pytest.raises(AssertionError, match="sample 7 has 33 tokens but a micro-batch holds 32"):
        OnMain(BUDGET, 2, 1, None).get_groups_and_subsamples([(7, 33), (8, 1)])
