"""Lists and datasets are accepted where a source is expected."""

from __future__ import annotations

import warnings
from typing import Any

import datasets
import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Dataset, IterableDataset

from evenstep import Packed, PlannedStream, PooledStream, Recipe, Steps, make_plan
from evenstep.data import (
    InMemory,
    Iterated,
    Jsonl,
    Lengths,
    Mapped,
    MeasuredMapped,
    TokenFile,
    as_source,
    write_token_file,
)
from evenstep.errors import ConfigError, InputError
from tests.internals import as_measured, measure
from tests.source_cases import Rows

ROWS = [{"input_ids": [k] * n} for k, n in enumerate((3, 1, 2, 5, 4))]
LENGTHS = [3, 1, 2, 5, 4]
RECIPE = Recipe(layout=Packed(max_tokens=8))


class Torch(Dataset):  # type: ignore[misc]
    def __init__(self) -> None:
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, item: int) -> Any:
        self.reads.append(item)
        return ROWS[item]


class TorchIterable(IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Any:
        return iter(ROWS)

    def __len__(self) -> int:
        return len(ROWS)


def hugging_face() -> Any:
    return datasets.Dataset.from_list(ROWS)


def tokens(stream: Any) -> list[list[int]]:
    """The tokens of every sample, in order of their ids."""
    found = {i: list(s["input_ids"]) for step in stream for _, ss in step for i, s in ss.items()}
    return [found[i] for i in sorted(found)]


BY_INDEX: dict[str, Any] = {
    "list": lambda: list(ROWS),
    "tuple": lambda: tuple(ROWS),
    "torch": Torch,
    "several": lambda: ConcatDataset([Torch(), Torch()]),
    "hugging face": hugging_face,
    "chosen rows": lambda: hugging_face().select([4, 0, 1]),
    "duck": lambda: Rows(ROWS),
}


@pytest.mark.parametrize("name", BY_INDEX)
def test_both_streams_take_lists_and_map_style_datasets(name: str) -> None:
    data = BY_INDEX[name]()
    expected = [list(data[item]["input_ids"]) for item in range(len(data))]
    assert tokens(PooledStream(data, RECIPE)) == expected
    planned = PlannedStream(data, Recipe(layout=RECIPE.layout, steps=Steps(samples=2)))
    assert tokens(planned) == expected
    assert planned.source.lengths_of(np.arange(len(data))).tolist() == list(map(len, expected))


@pytest.mark.parametrize("make", [TorchIterable, lambda: hugging_face().to_iterable_dataset()])
def test_a_pool_takes_iterable_datasets_and_a_plan_does_not(make: Any) -> None:
    assert tokens(PooledStream(make(), RECIPE)) == [row["input_ids"] for row in ROWS]
    with pytest.raises(ConfigError, match="has no known lengths: use a PooledStream"):
        PlannedStream(make(), RECIPE)


def test_a_source_is_taken_as_it_is() -> None:
    for source in (InMemory(ROWS), Mapped(ROWS), Iterated(ROWS), Lengths(np.array([1]))):
        assert as_source(source) is source
    assert isinstance(as_source(ROWS), InMemory)
    assert isinstance(as_source(Torch()), Mapped)
    assert isinstance(as_source(TorchIterable()), Iterated)
    assert isinstance(as_measured(Torch()), MeasuredMapped)


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ([5, 3, 4], r"InMemory\(samples\)"),
        (["some text"], r"Mapped\(texts, transform=...\)"),
        ("data/*.jsonl", r"Jsonl\(path\)"),
        (datasets.DatasetDict(train=hugging_face()), "one of its values"),
        ((n for n in range(3)), r"Iterated\(items\)"),
        (7, "a list of samples, a dataset or a source"),
    ],
)
def test_what_cannot_be_wrapped_is_refused_with_a_remedy(value: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"expected a source, got {type(value).__name__}.*"):
        as_source(value)
    with pytest.raises(ConfigError, match=remedy):
        as_source(value)


def test_lengths_of_a_hugging_face_dataset_come_from_its_column_alone() -> None:
    class Decoded:
        """Raises if a row is read."""

        def __getattr__(self, name: str) -> Any:
            return getattr(given, name)

        def __len__(self) -> int:
            return len(given)

        def __getitem__(self, item: Any) -> Any:
            raise AssertionError("a row was read")

    given = hugging_face().add_column("images", ["x"] * len(ROWS)).select([3, 0])
    assert as_measured(Decoded()).lengths_of(np.arange(2)).tolist() == [5, 3]


def test_lengths_of_a_column_with_a_transform_are_those_of_what_is_read() -> None:
    given = hugging_face().with_transform(
        lambda rows: {"input_ids": [ids * 2 for ids in rows["input_ids"]]}
    )
    assert as_measured(given).lengths_of(np.arange(5)).tolist() == [6, 2, 4, 10, 8]


def test_rows_without_tokens_are_named() -> None:
    absent = datasets.Dataset.from_dict({"input_ids": [[1], None]})
    with pytest.raises(InputError, match="row 1 has None as 'input_ids'"):
        as_measured(absent).lengths_of(np.arange(1))
    text = datasets.Dataset.from_dict({"text": ["a", "b"]})
    with pytest.raises(InputError, match=r"item 0 has no length .*input_ids"):
        as_measured(text).lengths_of(np.arange(1))


def test_items_are_measured_once_and_a_long_wait_is_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = Torch()
    source = as_measured(data)
    assert data.reads == []  # not before it is needed
    source.lengths_of(np.arange(2))
    source.lengths_of(np.arange(5))
    assert data.reads == [0, 1, 2, 3, 4]
    monkeypatch.setattr(measure, "_PATIENCE", -1.0)
    with pytest.warns(UserWarning, match="all 5 items once .* lengths=...") as warned:
        as_measured(Torch()).lengths_of(np.arange(5))
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calls: list[tuple[int, int]] = []
        measure.measured_lengths(Torch(), None, lambda *at: calls.append(at))
    assert calls[-1] == (5, 5)


def test_a_saved_plan_gives_the_lengths_of_a_dataset() -> None:
    data = Torch()
    plan = make_plan(LENGTHS, Recipe(layout=RECIPE.layout, steps=Steps(samples=2)))
    stream = PlannedStream.from_plan(data, plan)
    assert len(list(stream.walk_all())) == 3
    assert set(data.reads) <= set(range(5))
    assert tokens(stream) == [row["input_ids"] for row in ROWS]
    shuffled = PlannedStream(ROWS, plan.recipe, seed=3).plan_epoch(1)
    again = Torch()
    found = PlannedStream.from_plan(again, shuffled).source
    assert found.lengths_of(np.arange(5)).tolist() == LENGTHS
    assert again.reads == []


def test_lengths_of_another_source_are_passed_on(tmp_path: Any) -> None:
    file = write_token_file(tmp_path / "a.tokens", ROWS)
    assert MeasuredMapped(file).lengths_of(np.arange(5)).tolist() == LENGTHS
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n{"text": "d"}\n')
    lines = MeasuredMapped(Jsonl(tmp_path / "a.jsonl"))
    assert lines.lengths_of(np.arange(2)).tolist() == [3, 1]
    assert isinstance(as_source(file), TokenFile)
