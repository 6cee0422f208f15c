"""TRL's packing: rows, columns and formats as there, and rollouts within the budget."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st

from evenstep.compat.trl import TokenBudgetBatcher, pack_dataset
from tests.compat.attempts import flat
from tests.examples import examples
from tests.forests import forest

ROWS = {
    "input_ids": [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]],
    "attention_mask": [[1, 1, 1, 0, 0], [1, 0], [1, 1, 0], [1]],
}


@pytest.fixture(autouse=True)
def quiet() -> None:
    import datasets

    datasets.disable_progress_bars()


@pytest.mark.parametrize(
    ("strategy", "ids", "lengths"),
    [
        ("bfd", [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7]], [[4], [3, 1], [2]]),
        ("bfd_split", [[1, 2, 3, 4], [8, 9, 10, 5], [6, 7, 11]], [[4], [3, 1], [2, 1]]),
        ("wrapped", [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]], None),
    ],
)
def test_the_example_of_the_document(strategy: Any, ids: Any, lengths: Any) -> None:
    found = pack_dataset(Dataset.from_dict(ROWS), 4, strategy=strategy)[:]
    assert found["input_ids"] == ids
    assert found.get("seq_lengths") == lengths
    assert [len(row) for row in found["attention_mask"]] == [len(row) for row in ids]


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_a_dataset_without_rows_stays_one(strategy: Any) -> None:
    assert pack_dataset(Dataset.from_dict({"input_ids": []}), 4, strategy=strategy).num_rows == 0


@examples(60)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=40),
    size=st.integers(1, 20),
    batch=st.sampled_from([7, 1000]),
    strategy=st.sampled_from(["bfd", "bfd_split", "wrapped"]),
)
def test_rows_are_full_at_most_and_hold_every_token_once(
    lengths: list[int], size: int, batch: int, strategy: Any
) -> None:
    ends = np.cumsum([0, *lengths])
    rows = [list(range(a, b)) for a, b in pairwise(ends)]
    data = Dataset.from_dict({"input_ids": rows, "labels": [[-i for i in row] for row in rows]})
    options = {"batch_size": batch, "keep_in_memory": True}
    found = pack_dataset(data, size, strategy=strategy, map_kwargs=options)[:]
    kept = [row[:size] if strategy == "bfd" else row for row in rows]
    tokens = flat(found["input_ids"])
    assert sorted(tokens) == sorted(flat(kept))
    assert flat(found["labels"]) == [-token for token in tokens]
    assert max(map(len, found["input_ids"]), default=0) <= size
    if strategy == "wrapped":
        return
    for row, parts in zip(found["input_ids"], found["seq_lengths"], strict=True):
        assert sum(parts) == len(row)
        at = 0
        for part in parts:
            assert row[at : at + part] == list(range(row[at], row[at] + part))
            at += part


def test_format_types_and_dictionaries_are_kept() -> None:
    data = Dataset.from_dict(ROWS).with_format("numpy", columns=["input_ids"])
    found = pack_dataset(data, 4)
    assert (found.format["type"], found.format["columns"]) == (
        "numpy",
        ["input_ids", "seq_lengths"],
    )
    assert found.features["attention_mask"] == data.features["attention_mask"]
    both = pack_dataset(DatasetDict(train=Dataset.from_dict(ROWS)), 4, "wrapped")
    assert both["train"]["input_ids"][0] == [1, 2, 3, 4]
    streamed = pack_dataset(Dataset.from_dict(ROWS).to_iterable_dataset(), 4)
    assert next(iter(streamed))["seq_lengths"] == [4]


def test_wrong_columns_and_strategies_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown packing strategy 'best'"):
        pack_dataset(Dataset.from_dict(ROWS), 4, strategy="best")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'text' has type string"):
        pack_dataset(Dataset.from_dict({"input_ids": [[1]], "text": ["a"]}), 4)
    with pytest.raises(ValueError, match="must have values of the same length"):
        pack_dataset(Dataset.from_dict({"a": [[1, 2]], "b": [[1]]}), 4)


def rollouts(lengths: list[int]) -> list[dict[str, Any]]:
    return [{"input_ids": [0] * n, "number": i} for i, n in enumerate(lengths)]


@pytest.mark.filterwarnings("ignore:dropped")
@examples(150)
@given(
    lengths=st.lists(st.integers(1, 34), max_size=60),
    processes=st.integers(1, 4),
    budget=st.integers(16, 32),
)
def test_every_row_of_every_micro_batch_has_samples_within_the_budget(
    lengths: list[int], processes: int, budget: int
) -> None:
    found = list(TokenBudgetBatcher(rollouts(lengths), processes, budget))
    for rows in found:
        assert len(rows) == processes
        for row in rows:
            assert row
            assert sum(len(sample["input_ids"]) for sample in row) <= budget
    held = [[sample["number"] for row in rows for sample in row] for rows in found]
    wanted = [i for i, n in enumerate(lengths) if n <= budget]
    lost = len(wanted) - len(flat(held))
    assert lost < processes
    # Micro-batches follow the order of arrival.
    assert [sorted(numbers) for numbers in held] == slices(wanted, [len(n) for n in held])


def slices(numbers: list[int], sizes: list[int]) -> list[list[int]]:
    ends = np.cumsum([0, *sizes])
    return [numbers[a:b] for a, b in pairwise(ends)]


def test_dropped_samples_are_named() -> None:
    batcher = TokenBudgetBatcher(rollouts([9, 3, 3, 3]), 2, 8)
    with pytest.warns(UserWarning, match="dropped a sample of 9 tokens, more than token_budget=8"):
        assert len(list(batcher)) == 1
    batcher = TokenBudgetBatcher(rollouts([3]), 2, 8)
    with pytest.warns(UserWarning, match="dropped the last 1 samples"):
        assert list(batcher) == []
    assert batcher.metrics is None
    metrics: dict[str, list[float]] = defaultdict(list)
    with pytest.warns(UserWarning, match="dropped a sample"):
        list(TokenBudgetBatcher(rollouts([9]), 2, 8, metrics))
    assert metrics == {"batch/dropped_oversize_total": [1.0]}


@pytest.mark.filterwarnings("ignore")
@examples(40)
@given(seed=st.integers(0, 10**6), processes=st.integers(1, 3), budget=st.integers(14, 30))
def test_tree_rows_hold_every_sample_and_count_a_prefix_once(
    seed: int, processes: int, budget: int
) -> None:
    rng = np.random.default_rng(seed)
    samples = []
    for number, tokens in enumerate(forest(rng, 12)):
        mask = torch.from_numpy(rng.integers(0, 2, len(tokens)))
        about = {"completion_mask": mask, "group_id": number % 3, "number": number}
        samples.append({"input_ids": torch.tensor(tokens), **about})
    samples = [sample for sample in samples if len(sample["input_ids"]) <= budget]
    batches = list(TokenBudgetBatcher(samples, processes, budget, defaultdict(list)))
    for rows in batches:
        assert len(rows) == processes
        for row in rows:
            assert row.samples
            assert len(row.tokens) <= budget
            assert row.trained <= budget
    numbers = [
        sorted(sample["number"] for row in rows for sample in row.samples) for rows in batches
    ]
    arrived = [sample["number"] for sample in samples]
    assert flat(numbers) == arrived[: len(flat(numbers))]
    assert len(arrived) - len(flat(numbers)) < processes
