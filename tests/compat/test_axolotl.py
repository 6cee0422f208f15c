"""axolotl's sampler: bins within the limits, every sample once, ranks even."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler

from evenstep.compat import axolotl
from evenstep.compat.axolotl import MultipackBatchSampler
from tests.compat.attempts import flat
from tests.examples import examples
from tests.internals import WORK

SIZE = 64


@examples(150)
@given(
    lengths=st.lists(st.integers(1, SIZE), min_size=1, max_size=60),
    batch_size=st.integers(1, 3),
    bin_size=st.sampled_from([2, 200]),
    sequential=st.booleans(),
    group_size=st.sampled_from([10, 100_000]),
)
def test_bins_keep_both_limits_and_hold_every_sample_once(
    lengths: list[int], batch_size: int, bin_size: int, sequential: bool, group_size: int
) -> None:
    sampler = MultipackBatchSampler(
        sampler=range(len(lengths)),
        batch_size=batch_size,
        batch_max_len=SIZE,
        lengths=np.array(lengths),
        bin_size=bin_size,
        drop_last=False,
        sequential=sequential,
        group_size=group_size,
    )
    batches = list(sampler)
    assert len(sampler) == len(batches)
    bins = [bin_ for batch in batches for bin_ in batch]
    assert sorted(flat(bins)) == list(range(len(lengths)))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    for bin_ in bins:
        assert bin_
        assert sum(lengths[i] for i in bin_) <= SIZE
        assert sequential or len(bin_) <= bin_size
    if sequential:
        assert flat(bins) == list(range(len(lengths)))
    assert 0 < sampler.efficiency() <= 1


def test_drop_last_drops_no_sample_while_there_are_enough() -> None:
    lengths = np.random.default_rng(0).integers(1, SIZE, 301)
    sampler = MultipackBatchSampler(RandomSampler(range(301)), 4, SIZE, lengths, 200)
    batches = list(sampler)
    assert {len(batch) for batch in batches} == {4}
    assert sorted(i for batch in batches for bin_ in batch for i in bin_) == list(range(301))
    few = MultipackBatchSampler(range(5), 4, SIZE, [SIZE] * 5, 200)
    assert [len(batch) for batch in few] == [4]


def test_an_epoch_has_its_own_order_and_the_same_length() -> None:
    lengths = np.random.default_rng(0).integers(1, SIZE, 300)
    sampler = MultipackBatchSampler(range(300), 2, SIZE, lengths, 200)
    first = list(sampler)
    assert list(sampler) == first
    length = len(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert len(list(sampler)) == length


def test_batches_that_ranks_run_together_have_similar_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 2000), 1, 4096).astype(np.int64)
    sampler = MultipackBatchSampler(range(2000), 1, 4096, lengths, 200)
    work = np.array([WORK.of_lengths(lengths[batch[0]]).sum() for batch in sampler])
    by_wave = work.reshape(-1, 4)
    assert by_wave.max(axis=1).sum() <= 1.01 * by_wave.mean(axis=1).sum()


def test_ranks_take_the_least_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axolotl, "most_over_ranks", lambda numbers, group: [-2])
    sampler = MultipackBatchSampler(range(6), 1, SIZE, [SIZE] * 6, 200)
    assert len(sampler) == 2
    assert len(list(sampler)) == 2


class Bins:
    """A dataset that reads whole bins, as axolotl's fetcher does."""

    def __getitem__(self, bin_: list[int]) -> list[int]:
        return [10 + i for i in bin_]


def test_a_data_loader_takes_it_as_batch_sampler() -> None:
    sampler = MultipackBatchSampler(range(4), 1, 8, [5, 3, 4, 4], 4)
    loader = DataLoader(Bins(), batch_sampler=sampler, collate_fn=lambda bins: bins)
    assert sorted(loader) == [[[10, 11]], [[12, 13]]]
