"""The datasets of cosmos-rl: batches as documented, with its known faults corrected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from evenstep.compat.cosmos_rl import LoadBalancedDataset, ShardedIterableDataset
from evenstep.errors import ConfigError, SampleError


class Rows(Dataset):  # type: ignore[misc]
    """Sample i has its own length and holds its index."""

    def __init__(self, count: int, fault: int = -1) -> None:
        self.count, self.fault = count, fault

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, item: int) -> dict[str, Any]:
        if item == self.fault:
            raise IndexError("a hole in the data")
        return {"id": item, "input_ids": torch.full((1 + item * 7 % 19,), item)}


class Flow(IterableDataset):  # type: ignore[misc]
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (Rows(self.count)[item] for item in range(self.count))


def ids(items: Any) -> list[int]:
    return [sample["id"] for item in items for batch in item for sample in batch]


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("base", [Rows(40), Flow(40)])
def test_shares_of_ranks_and_workers_are_disjoint_and_complete(base: Any, workers: int) -> None:
    seen = [
        sample["id"]
        for rank in range(2)
        for sample in DataLoader(
            ShardedIterableDataset(base, rank, 2), batch_size=None, num_workers=workers
        )
    ]
    assert sorted(seen) == list(range(40))


def test_readers_and_epochs_have_different_orders() -> None:
    def order(rank: int, epoch: int) -> tuple[int, ...]:
        dataset = ShardedIterableDataset(Rows(64), rank, 8)
        dataset.set_epoch(epoch)
        return tuple(sample["id"] % 1000 for sample in dataset)

    orders = [order(rank, epoch) for rank in range(8) for epoch in range(8)]
    assert len(set(orders)) == 64
    assert all(sorted(sum((order(r, e) for r in range(8)), ())) == list(range(64)) for e in (0, 3))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("packing", [False, True])
def test_batches_keep_the_budget_and_hold_every_sample_once(workers: int, packing: bool) -> None:
    dataset = LoadBalancedDataset(
        Rows(60), pool_size=8, max_tokens_for_batch=40, seq_packing_enabled=packing,
        infinite_loop=False, accumulate_steps=2,
    )  # fmt: skip
    items = list(DataLoader(dataset, batch_size=None, num_workers=workers))
    assert Counter(ids(items)) == Counter(range(60))
    for item in items:
        assert 1 <= len(item) <= 2
        for batch in item:
            lengths = [len(sample["input_ids"]) for sample in batch]
            used = sum(lengths) if packing else len(lengths) * max(lengths)
            assert used <= 40


def test_the_defaults_are_those_of_cosmos_rl() -> None:
    dataset = LoadBalancedDataset(Rows(4))
    assert dataset.stream.pool.samples == 32
    assert dataset.stream.recipe.layout.max_tokens == 32768
    assert dataset.stream.pool.strategy == "prefer_closest"
    assert dataset.stream.infinite_loop


def test_invalid_options_are_refused_in_the_constructor() -> None:
    word: Any = "no"
    with pytest.raises(ConfigError, match="shuffle must be true or false, got 'no'"):
        ShardedIterableDataset(Rows(4), shuffle=word)
    with pytest.raises(ConfigError, match=r"seed must be in \[0, 2\*\*63\), got -1"):
        ShardedIterableDataset(Rows(4), seed=-1)
    for name in ("seq_packing_enabled", "infinite_loop"):
        options: Any = {name: "no"}
        with pytest.raises(ConfigError, match=f"{name} must be true or false, got 'no'"):
            LoadBalancedDataset(Rows(4), **options)


def test_a_loop_reshuffles_every_epoch_until_the_steps_are_done() -> None:
    dataset = LoadBalancedDataset(Rows(10), max_tokens_for_batch=40, max_num_steps=12, pool_size=2)
    items = list(dataset)
    assert len(items) == len(dataset) == 12
    assert len(ids(items)) > 10


def test_a_sample_at_the_limit_is_a_batch_of_its_own() -> None:
    dataset = LoadBalancedDataset(
        Rows(30), max_tokens_for_batch=64, max_tokens_len=15, infinite_loop=False
    )
    for item in dataset:
        for batch in item:
            assert len(batch) == 1 or all(len(sample["input_ids"]) < 15 for sample in batch)


def test_an_error_in_a_sample_is_not_the_end_of_the_data() -> None:
    dataset = LoadBalancedDataset(Rows(20, fault=7), infinite_loop=False)
    with pytest.raises(SampleError, match="sample 7 cannot be read"):
        list(dataset)


def test_skipped_items_are_the_first_of_a_full_run() -> None:
    def make() -> LoadBalancedDataset:
        return LoadBalancedDataset(Rows(40), max_tokens_for_batch=40, max_num_steps=9)

    whole = [ids([item]) for item in make()]
    later = make()
    later.skip_batches(4)
    assert [ids([item]) for item in later] == whole[4:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_resumes_exactly(workers: int) -> None:
    def make() -> Any:
        dataset = LoadBalancedDataset(Rows(50), max_tokens_for_batch=40, infinite_loop=False)
        return StatefulDataLoader(dataset, batch_size=None, num_workers=workers)

    whole = [ids([item]) for item in make()]
    first = make()
    taken = []
    for count, item in enumerate(first, 1):
        taken.append(ids([item]))
        if count == 3:
            state = first.state_dict()
            break
    second = make()
    second.load_state_dict(state)
    assert taken + [ids([item]) for item in second] == whole


def test_a_model_that_cannot_pack_gets_batches_for_padding() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(hidden_size=8, n_layer=1, n_head=2, vocab_size=11))
    with pytest.warns(UserWarning, match="pad"):
        dataset = LoadBalancedDataset(
            Rows(30), max_tokens_for_batch=40, seq_packing_enabled=True, model=model,
            infinite_loop=False,
        )  # fmt: skip
    for item in dataset:
        for batch in item:
            lengths = [len(sample["input_ids"]) for sample in batch]
            assert len(lengths) * max(lengths) <= 40


def test_an_item_that_is_a_list_is_one_sample() -> None:
    data = [[5, 6, 7], [8], [9, 9]]
    assert list(ShardedIterableDataset(data, shuffle=False)) == data
    batches = LoadBalancedDataset(
        ShardedIterableDataset(data, shuffle=False), max_tokens_for_batch=4, infinite_loop=False
    )
    found = [batch for item in batches for batch in item]
    assert sorted(sample for batch in found for sample in batch) == sorted(data)
    assert all(len(batch) * max(map(len, batch)) <= 4 for batch in found)
