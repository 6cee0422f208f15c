"""Sequence parallelism: contiguous runs of every row that join again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Packed, Recipe, make_plan
from evenstep.errors import InputError
from evenstep.tensors import Collator, join_sequence, shard_sequence
from tests.examples import examples
from tests.tensors.works import Work, assert_shards_hold, make_work, same, works


def test_veomnis_two_ranks_get_what_its_collator_gives_them() -> None:
    samples = [
        {"input_ids": torch.tensor([11, 12, 13]), "labels": torch.tensor([2, 3, 4])},
        {"input_ids": torch.tensor([21, 22]), "labels": torch.tensor([1, 2])},
    ]
    plan = make_plan([3, 2], Recipe(layout=Packed(max_tokens=8, pad_to=8)))
    batch = Collator()(plan[0, 0][0], samples)
    first, second = (shard_sequence(batch, rank, 2) for rank in range(2))
    assert first.tokens.tolist() == [[11, 12, 13, 21]]
    assert second.tokens.tolist() == [[22, 0, 0, 0]]
    assert first.labels.tolist() == [[3, 4, -100, 2]]
    assert second.labels.tolist() == [[-100] * 4]
    assert first.position_ids.tolist() == [[0, 1, 2, 0]]
    assert second.position_ids.tolist() == [[1, 0, 1, 2]]  # positions of the tail count up too
    for shard in (first, second):
        assert shard.cu_seqlens.tolist() == [0, 3, 5, 8]
        assert shard.seqlens.tolist() == [3, 2, 0]
        assert shard.max_seqlen == 3
    assert first.local_cu_seqlens.tolist() == [0, 3, 4, 4]
    assert second.local_cu_seqlens.tolist() == [0, 0, 1, 4]
    assert second.local_seqlens.tolist() == [0, 1, 0]
    assert samples[0]["labels"].tolist() == [2, 3, 4]


def test_a_width_that_ranks_cannot_share_is_an_error_that_names_a_better_one() -> None:
    batch = make_work([7], Recipe(layout=Packed(max_tokens=8))).batches[0]
    with pytest.raises(InputError, match=r"the width 7 is not a multiple of 2.*the next one is 8"):
        shard_sequence(batch, 0, 2)
    with pytest.raises(InputError, match=r"rank must be in \[0, 7\), got -1"):
        shard_sequence(batch, -1, 7)


def test_shards_of_unequal_shapes_are_refused() -> None:
    with pytest.raises(InputError, match=r"of one shape, got .*\(1, 3\), \(1, 4\)"):
        join_sequence([torch.zeros(1, 4), torch.zeros(1, 3)])


@examples(60)
@given(works(), st.sampled_from([1, 2, 4]))
def test_joining_the_runs_gives_the_batch_again(work: Work, size: int) -> None:
    for batch in work.batches:
        if batch.width % size:
            continue
        shards = [shard_sequence(batch, rank, size) for rank in range(size)]
        assert_shards_hold(batch, shards, join_sequence)
        assert same(sum(shard.local_seqlens for shard in shards), batch.seqlens)
        assert same(sum(shard.local_cu_seqlens.diff() for shard in shards), batch.cu_seqlens.diff())
