"""Map-style datasets as sources, with and without known lengths."""

import pickle
from typing import Any

import datasets
import numpy as np
import pytest
from torch.utils.data import Dataset

from evenstep.data import Mapped, MeasuredMapped, MeasuredSource, SampleSource
from evenstep.errors import InputError
from tests.internals import read_samples

ROWS = [{"input_ids": list(range(n)), "length": n} for n in (3, 1, 2)]


class Torch(Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, item: int) -> dict[str, Any]:
        return ROWS[item]


def doubled(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [row, row]


@pytest.fixture(params=["torch", "hugging face", "list"])
def dataset(request: pytest.FixtureRequest) -> Any:
    return {"torch": Torch(), "hugging face": datasets.Dataset.from_list(ROWS), "list": ROWS}[
        request.param
    ]


def test_items_are_those_of_the_dataset(dataset: Any) -> None:
    source = Mapped(dataset)
    assert isinstance(source, SampleSource)
    assert [source[item] for item in range(len(source))] == ROWS
    assert source[np.int64(1)] == ROWS[1]  # type: ignore[index]


def test_without_lengths_it_is_not_a_measured_source(dataset: Any) -> None:
    assert not isinstance(Mapped(dataset), MeasuredSource)
    assert isinstance(MeasuredMapped(dataset, lengths=[3, 1, 2]), MeasuredSource)


def test_a_transform_makes_one_sample_or_several(dataset: Any) -> None:
    assert Mapped(dataset, transform=lambda row: row["length"])[2] == 2
    assert [s for _, s in read_samples(Mapped(dataset, transform=doubled), 1)] == [ROWS[1]] * 2


def test_given_lengths_are_looked_up(dataset: Any) -> None:
    source = MeasuredMapped(dataset, lengths=np.array([3, 1, 2], np.uint16))
    lengths = source.lengths_of(np.array([2, 0]))
    assert lengths.tolist() == [2, 3]
    assert lengths.dtype == np.int64
    assert source[0] == ROWS[0]


def test_a_column_of_a_hugging_face_dataset_gives_the_lengths() -> None:
    chosen = datasets.Dataset.from_list(ROWS).select([2, 0])
    assert MeasuredMapped(chosen, lengths="length").lengths_of(np.arange(2)).tolist() == [2, 3]


@pytest.mark.parametrize("item", [-1, 3])
def test_an_index_out_of_range_is_refused(dataset: Any, item: int) -> None:
    with pytest.raises(IndexError):
        Mapped(dataset)[item]
    source = MeasuredMapped(dataset, lengths=[3, 1, 2])
    with pytest.raises(IndexError):
        source[item]
    with pytest.raises(IndexError):
        source.lengths_of(np.array([item]))


def test_several_samples_cannot_share_one_length() -> None:
    source = MeasuredMapped(ROWS, lengths=[3, 1, 2], transform=doubled)
    with pytest.raises(InputError, match="item 1 is a list"):
        source[1]


@pytest.mark.parametrize(
    ("lengths", "fault"),
    [
        ([3, 1], r"lengths of shape \(2,\) for 3 items"),
        ([[3, 1, 2]], r"of shape \(1, 3\)"),
        ([3.0, 1.0, 2.0], "must be integers, got float64"),
        ("length", "unknown column 'length' for lengths; the list has no named columns"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(lengths: Any, fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        MeasuredMapped(ROWS, lengths=lengths).lengths_of(np.array([0]))


def test_an_unknown_column_is_refused_with_the_known_ones() -> None:
    source = MeasuredMapped(datasets.Dataset.from_list(ROWS), lengths="size")
    with pytest.raises(
        InputError, match=r"'size' for lengths; the Dataset has \['input_ids', 'length'\]"
    ):
        source.lengths_of(np.array([0]))


def test_the_fingerprint_of_a_hugging_face_dataset_covers_its_rows() -> None:
    one, same = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS)
    other = datasets.Dataset.from_list([ROWS[1], ROWS[0], ROWS[2]])
    assert Mapped(one).fingerprint == Mapped(same).fingerprint
    assert Mapped(one).fingerprint != Mapped(other).fingerprint
    assert Mapped(one).fingerprint != Mapped(one.select([0, 1])).fingerprint


def test_the_fingerprint_covers_samples_size_and_lengths() -> None:
    sources: list[Mapped | MeasuredMapped] = [
        Mapped(ROWS),
        Mapped(ROWS[:2]),
        Mapped(ROWS[::-1]),
        MeasuredMapped(ROWS, lengths=[3, 1, 2]),
        MeasuredMapped(ROWS, lengths=[3, 2, 1]),
    ]
    assert len({source.fingerprint for source in sources}) == len(sources)


def test_they_can_be_pickled(dataset: Any) -> None:
    source = MeasuredMapped(dataset, lengths=[3, 1, 2])
    copy = pickle.loads(pickle.dumps(source))
    assert copy.fingerprint == source.fingerprint
    assert copy[2] == source[2]
