"""Samples in memory are a measured source if every item is one sample."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.data import InMemory, MeasuredSource
from evenstep.errors import InputError
from tests.internals import read_samples


def samples(*rows: list[int]) -> list[dict[str, list[int]]]:
    return [{"input_ids": row} for row in rows]


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=20))
def test_items_and_lengths_are_those_of_the_samples(rows: list[list[int]]) -> None:
    source = InMemory(samples(*rows))
    assert isinstance(source, MeasuredSource)
    assert [source[item] for item in range(len(source))] == samples(*rows)
    lengths = source.lengths_of(np.arange(len(rows)))
    assert lengths.tolist() == [len(row) for row in rows]
    assert lengths.dtype == np.int64


def test_arrays_are_samples() -> None:
    source = InMemory([np.array([1, 2]), np.array([3])])
    assert source.lengths_of(np.array([1, 0, 1])).tolist() == [1, 2, 1]


def test_an_item_that_is_a_list_is_several_samples() -> None:
    source = InMemory([samples([1], [2, 3]), {"input_ids": [4]}])
    assert [s["input_ids"] for _, s in read_samples(source, 0)] == [[1], [2, 3]]
    with pytest.raises(InputError, match=r"item 0 is a list.*PooledStream"):
        source.lengths_of(np.array([1]))


@pytest.mark.parametrize("sample", [{"text": "a"}, 7, None])
def test_an_item_without_a_length_is_named(sample: Any) -> None:
    with pytest.raises(InputError, match="item 1 has no length"):
        InMemory([{"input_ids": [1]}, sample]).lengths_of(np.array([0]))
    assert InMemory([sample]).fingerprint  # can still be pooled with the caller's length_of


@pytest.mark.parametrize("item", [-1, 2, 100])
def test_an_index_out_of_range_is_refused(item: int) -> None:
    source = InMemory(samples([1], [2]))
    with pytest.raises(IndexError):
        source[item]
    with pytest.raises(IndexError):
        source.lengths_of(np.array([0, item]))


def test_the_fingerprint_covers_tokens_order_and_number() -> None:
    sources = [
        InMemory(samples([1, 2], [3])),
        InMemory(samples([1], [2, 3])),
        InMemory(samples([3], [1, 2])),
        InMemory(samples([1, 2], [3], [3])),
        InMemory([samples([1, 2], [3])]),
        InMemory(samples()),
    ]
    assert len({source.fingerprint for source in sources}) == len(sources)


def test_the_fingerprint_does_not_depend_on_the_container_of_tokens() -> None:
    assert (
        InMemory(samples([1, 2], [3])).fingerprint
        == InMemory([np.array([1, 2], np.uint16), {"input_ids": (3,)}]).fingerprint
    )


def test_the_fingerprint_of_objects_does_not_depend_on_their_address() -> None:
    class Clip:
        def __len__(self) -> int:
            return 3

    assert InMemory([Clip()]).fingerprint == InMemory([Clip()]).fingerprint


def test_it_can_be_pickled() -> None:
    source = InMemory(samples([1, 2], [3]))
    copy = pickle.loads(pickle.dumps(source))
    assert copy.fingerprint == source.fingerprint
    assert copy[1] == source[1]
