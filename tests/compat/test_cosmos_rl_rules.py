"""cosmos-rl's rules of a pool, its worked examples, and what is ours."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from evenstep.compat.cosmos_rl import (
    LoadBalancedDataset,
    ShardedIterableDataset,
    get_sample_length,
)
from evenstep.data import InMemory
from evenstep.demo import Decoder, DecoderShape
from evenstep.errors import ConfigError, InputError
from evenstep.tensors import Batch, Collator, cross_entropy
from evenstep.train import Runner

LENGTHS = (7, 6, 8, 5, 1, 3, 8, 6)
DRAWN = (4, 1, 5, 2, 0, 3, 7, 6)


def rows(lengths: Any) -> list[dict[str, Any]]:
    return [{"id": n, "input_ids": [n] * length} for n, length in enumerate(lengths)]


def in_order(lengths: Any, **options: Any) -> LoadBalancedDataset:
    """A finite dataset on one rank, drawn in the order of `lengths`."""
    data = ShardedIterableDataset(rows(lengths), shuffle=False)
    return LoadBalancedDataset(data, infinite_loop=False, **options)


def ids(items: Any) -> list[list[list[int]]]:
    return [[[sample["id"] for sample in batch] for batch in item] for item in items]


# The rules, written as `semantics` of the document: a list of lengths -> batches of indices.


def by_rule(
    lengths: list[int], budget: int, pool_size: int, mode: str, alone: int | None = None
) -> list[list[int]]:
    coming, pool, batches = list(range(len(lengths))), list[int](), []
    while coming or pool:
        while coming and len(pool) < pool_size:
            pool.append(coming.pop(0))
        batch = [pool.pop(0)]
        while lengths[batch[0]] < min(budget, alone or budget):
            chosen = next_of(lengths, budget, pool, batch, mode, alone)
            if chosen is None:
                break
            pool.remove(chosen)
            batch.append(chosen)
        batches.append(batch)
    return batches


def next_of(
    lengths: list[int], budget: int, pool: list[int], batch: list[int], mode: str, alone: int | None
) -> int | None:
    longest = max(lengths[i] for i in batch)
    # Ours: a sample that must be alone joins no other batch either.
    free = [i for i in pool if alone is None or lengths[i] < alone]
    if mode == "packing":
        used = sum(lengths[i] for i in batch)
        return next((i for i in free if used + lengths[i] <= budget), None)
    fits = [i for i in free if max(longest, lengths[i]) * (len(batch) + 1) <= budget]
    near = (lambda i: abs(lengths[i] - longest)) if mode == "prefer_closest" else (lambda i: 0)
    return min(fits, key=lambda i: (max(longest, lengths[i]), near(i)), default=None)


def check_rules(cases: int, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(cases):
        budget = draw.randint(1, 40)
        lengths = [draw.randint(1, draw.choice([4, 12, 45])) for _ in range(draw.randint(1, 24))]
        pool, steps = draw.randint(1, 12), draw.randint(1, 3)
        alone = draw.choice([None, None, draw.randint(1, 40)])
        for mode in ("prefer_closest", "prefer_first", "packing"):
            strategy: Any = {} if mode == "packing" else {"batching_strategy": mode}
            dataset = in_order(
                lengths, pool_size=pool, max_tokens_for_batch=budget, accumulate_steps=steps,
                seq_packing_enabled=mode == "packing", max_tokens_len=alone, **strategy,
            )  # fmt: skip
            found = ids(dataset)
            expected = by_rule(lengths, budget, pool, mode, alone)
            assert [batch for item in found for batch in item] == expected, (lengths, budget, mode)
            assert [len(item) for item in found[:-1]] == [steps] * (len(found) - 1)


def test_hundreds_of_random_pools_follow_the_rules() -> None:
    check_rules(150, seed=1)


@pytest.mark.slow
def test_thousands_of_random_pools_follow_the_rules() -> None:
    check_rules(3000, seed=2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[[4, 5, 3]], [[1, 7]], [[2, 6]], [[0]]]),
        ({"batching_strategy": "prefer_first"}, [[[4, 5, 3]], [[1, 7]], [[2, 0]], [[6]]]),
        ({"seq_packing_enabled": True}, [[[4, 1, 5, 3]], [[2, 0]], [[7, 6]]]),
        (
            {"seq_packing_enabled": True, "pool_size": 3, "accumulate_steps": 2},
            [[[4, 1, 5], [2, 0]], [[3, 7], [6]]],
        ),
    ],
)
def test_the_replayed_example(options: Any, expected: Any) -> None:
    data = [rows(LENGTHS)[n] for n in DRAWN]
    dataset = LoadBalancedDataset(
        ShardedIterableDataset(data, shuffle=False),
        **{"pool_size": 8, "max_tokens_for_batch": 16, "infinite_loop": False, **options},
    )
    assert ids(dataset) == expected


# Names, defaults and attributes


def test_every_argument_is_an_attribute_with_the_documented_default() -> None:
    dataset = LoadBalancedDataset(rows(LENGTHS))
    expected = {
        "pool_size": 32, "max_tokens_for_batch": 32768, "length_key": "input_ids",
        "batching_strategy": "prefer_closest", "max_tokens_len": 32768,
        "seq_packing_enabled": False, "seed": 0, "dp_rank": 0, "dp_world_size": 1,
        "accumulate_steps": 1, "infinite_loop": True, "accumulated_tokens_this_rank": 0,
        "accumulated_samples_this_rank": 0, "accumulated_batches_this_rank": 0,
    }  # fmt: skip
    assert {name: getattr(dataset, name) for name in expected} == expected
    assert isinstance(dataset.base_dataset, ShardedIterableDataset)
    sharded = ShardedIterableDataset(rows(LENGTHS), dp_rank=1, dp_world_size=3, seed=5)
    assert (sharded.dp_rank, sharded.dp_world_size, sharded.seed, len(sharded)) == (1, 3, 5, 3)


def test_an_unset_budget_is_that_of_the_document() -> None:
    assert LoadBalancedDataset(rows(LENGTHS), max_tokens_for_batch=None).max_tokens_len == 32768


@pytest.mark.parametrize(("ranks", "steps", "expected"), [(1, 1, 10), (3, 1, 4), (3, 3, 2)])
def test_the_length_is_approximate(ranks: int, steps: int, expected: int) -> None:
    for endless in (True, False):
        dataset = LoadBalancedDataset(
            rows([1] * 10), dp_world_size=ranks, accumulate_steps=steps, infinite_loop=endless
        )
        assert len(dataset) == expected


def test_it_counts_what_this_rank_has_done() -> None:
    dataset = in_order(LENGTHS, max_tokens_for_batch=16, accumulate_steps=2)
    items = list(dataset)
    batches = [batch for item in items for batch in item]
    slots = [len(batch) * max(len(s["input_ids"]) for s in batch) for batch in batches]
    assert dataset.accumulated_tokens_this_rank == sum(slots)
    assert dataset.accumulated_samples_this_rank == len(LENGTHS)
    assert dataset.accumulated_batches_this_rank == len(batches)


def test_a_sample_has_the_length_of_its_key_or_of_its_first_list() -> None:
    assert get_sample_length({"input_ids": torch.zeros(4, 2)}) == 4
    assert get_sample_length({"tokens": [1, 2]}, "tokens") == 2
    assert get_sample_length({"count": 7, "input_ids": [1]}, "count") == 7  # ours: a number
    assert get_sample_length({"id": 3, "none": [], "ids": [1, 2], "more": [1]}) == 2
    assert get_sample_length({"scalar": torch.tensor(3), "ids": torch.zeros(5)}) == 5
    with pytest.raises(ValueError, match=r"no 'input_ids' and no list or tensor.*\['id'\]"):
        get_sample_length({"id": 3})


@pytest.mark.parametrize("steps", [0, -1])
def test_fewer_than_one_batch_per_item_is_refused(steps: int) -> None:
    with pytest.raises(ValueError, match=r"steps\.micro_batches"):
        LoadBalancedDataset(rows(LENGTHS), accumulate_steps=steps)


# Configurations of the document

FIRST = {
    "train": {
        "max_num_steps": 100,
        "sequence_packing": False,
        "train_policy": {
            "enable_dp_load_balancing": True,
            "load_balanced_pool_size": 32,
            "load_balanced_max_tokens_for_batch": 32768,
            "load_balanced_batching_strategy": "prefer_closest",
            "load_balanced_batches_per_optimizer_step": 1,
        },
    }
}
SECOND: dict[str, Any] = {
    "train": {
        "max_num_steps": 1000,
        "train_policy": {
            "enable_dp_load_balancing": True,
            "load_balanced_pool_size": 64,
            "load_balanced_max_tokens_for_batch": 65536,
            "load_balanced_batching_strategy": "prefer_closest",
            "load_balanced_batches_per_optimizer_step": 4,
            "dataloader_seed": 42,
        },
    }
}


def test_the_configurations_of_the_document_mean_what_they_say() -> None:
    first = LoadBalancedDataset.from_config(rows(LENGTHS), FIRST)
    assert (first.pool_size, first.max_tokens_for_batch, len(first)) == (32, 32768, 100)
    second = LoadBalancedDataset.from_config(rows(LENGTHS), SECOND, dp_rank=1, dp_world_size=2)
    assert (second.pool_size, second.max_tokens_for_batch, second.seed) == (64, 65536, 42)
    assert (second.accumulate_steps, len(second), second.dp_rank) == (4, 1000, 1)
    assert all(len(item) == 4 for item in islice(second, 20))  # 4000 batches in 1000 steps
    packing = {"train": {**SECOND["train"], "sequence_packing": True}}
    third = LoadBalancedDataset.from_config(rows(LENGTHS), packing)
    assert third.seq_packing_enabled
    assert third.stream.recipe.layout.kind == "packed"


def test_a_load_balanced_configuration_needs_a_number_of_steps() -> None:
    policy = {"enable_dp_load_balancing": True}
    with pytest.raises(ConfigError, match=r"train\.max_num_steps is missing"):
        LoadBalancedDataset.from_config(rows(LENGTHS), {"train": {"train_policy": policy}})
    with pytest.raises(ConfigError, match="enable_dp_load_balancing is false"):
        LoadBalancedDataset.from_config(rows(LENGTHS), {"train": {"max_num_steps": 3}})


def test_an_epoch_in_the_configuration_is_ignored_with_a_warning() -> None:
    config = {"train": {**FIRST["train"], "max_num_steps": 4, "epoch": 3}}
    with pytest.warns(UserWarning, match=r"train\.epoch=3 is ignored"):
        dataset = LoadBalancedDataset.from_config(rows(LENGTHS), config)
    assert len(list(dataset)) == 4


# What is ours


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("packing", [False, True])
def test_three_finite_ranks_end_after_the_same_item(workers: int, packing: bool) -> None:
    lengths = [1 + n * 7 % 19 for n in range(200)]
    counts, seen = [], Counter[int]()
    for rank in range(3):
        dataset = LoadBalancedDataset(
            rows(lengths), max_tokens_for_batch=40, dp_rank=rank, dp_world_size=3,
            infinite_loop=False, seq_packing_enabled=packing,
        )  # fmt: skip
        items = list(DataLoader(dataset, batch_size=None, num_workers=workers))
        assert all(item and all(item) for item in items)  # none is empty
        counts.append(len(items))
        seen.update(i for item in ids(items) for batch in item for i in batch)
    assert len(set(counts)) == 1
    assert seen == Counter(range(200))


def test_known_lengths_are_not_read_to_find_the_common_end() -> None:
    class Watched(InMemory):
        read: list[int] = []  # noqa: RUF012

        def __getitem__(self, item: int) -> Any:
            self.read.append(item)
            return super().__getitem__(item)

    samples = [{"input_ids": [n] * (1 + n % 9)} for n in range(60)]
    counts = []
    for rank in range(3):
        source = Watched(samples)
        source.read.clear()
        dataset = LoadBalancedDataset(
            source, max_tokens_for_batch=20, dp_rank=rank, dp_world_size=3, infinite_loop=False
        )
        counts.append(len(list(dataset)))
        assert len(source.read) == 20  # a third of the samples
    assert len(set(counts)) == 1


@pytest.mark.parametrize("packing", [False, True])
def test_collated_items_run_and_have_the_loss_of_one_giant_batch(packing: bool) -> None:
    torch.manual_seed(0)
    shape = DecoderShape(vocab=30, hidden=8, layers=1, heads=2, kv_heads=1, ffn=8)
    model = Decoder(shape).double()
    samples = [{"input_ids": torch.randint(0, 30, (n,))} for n in LENGTHS]
    dataset = LoadBalancedDataset(
        samples, max_tokens_for_batch=16, accumulate_steps=2, infinite_loop=False,
        seq_packing_enabled=packing, max_tokens_len=8, collate=Collator(),
    )  # fmt: skip
    runner = Runner(model=model, loss=cross_entropy())
    losses, labels = 0.0, 0.0
    for item in dataset:
        assert all(isinstance(batch, Batch) for batch in item)
        result = runner.run(item)
        assert result.numbers is not None
        losses += result.loss * result.numbers.denominators["loss_tokens"]
        labels += result.numbers.denominators["loss_tokens"]
    giant = LoadBalancedDataset(
        samples, infinite_loop=False, seq_packing_enabled=True, collate=Collator()
    )
    (item,) = giant
    assert losses / labels == pytest.approx(runner.run(item).loss, rel=1e-12)


def test_a_sample_without_a_length_is_an_error_with_its_id() -> None:
    data = [{"input_ids": [1]}, {"text": "no tokens"}]
    with pytest.raises(Exception, match="sample 1 cannot be read"):
        list(LoadBalancedDataset(data, infinite_loop=False))
    with pytest.raises(InputError):
        get_sample_length(data[1])
