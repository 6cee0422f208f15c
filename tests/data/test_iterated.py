"""Iterables are opened at any item, and their errors are not treated as their end."""

import pickle
from collections.abc import Iterator
from itertools import islice
from typing import Any

import datasets
import pytest
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset

from evenstep.data import Iterated, SequentialSource
from evenstep.errors import InputError, SampleError
from tests.internals import read_samples


class Torch(IterableDataset):  # type: ignore[misc]
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, 100 * self.epoch + 5))


def five() -> Iterator[int]:
    yield from range(5)


def hugging_face(shards: int = 3) -> Any:
    rows = [{"n": n, "tokens": [n] * n} for n in range(12)]
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=shards)


@pytest.mark.parametrize("items", [range(5), list(range(5)), five, Torch(), lambda: range(5)])
def test_opening_at_any_start_gives_the_rest(items: Any) -> None:
    source = Iterated(items)
    assert isinstance(source, SequentialSource)
    for start in (0, 3, 5, 9):
        assert list(source.open(start, 0)) == list(range(start, 5))


def test_the_epoch_is_set_if_possible() -> None:
    assert list(Iterated(Torch()).open(3, epoch=2)) == [203, 204]


def test_a_function_that_takes_a_start_reads_nothing_before_it() -> None:
    read = []

    def numbers(start: int, *, epoch: int) -> Iterator[int]:
        for n in range(start, 5):
            read.append(n)
            yield 10 * epoch + n

    assert list(Iterated(numbers).open(3, epoch=1)) == [13, 14]
    assert read == [3, 4]


@pytest.mark.parametrize("epoch", [0, 1, 2])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_hugging_face_stream_resumes_exactly_in_every_epoch(epoch: int, shuffled: bool) -> None:
    dataset = hugging_face()
    dataset = dataset.shuffle(seed=1, buffer_size=4) if shuffled else dataset
    source = Iterated(dataset)
    dataset.set_epoch(epoch)
    rows = list(dataset)
    for start in range(13):
        assert list(source.open(start, epoch)) == rows[start:]


def test_a_hugging_face_stream_that_is_split_by_node_resumes_exactly() -> None:
    dataset = split_dataset_by_node(hugging_face(4), rank=1, world_size=2)
    rows = list(dataset)
    assert len(rows) == 6
    assert list(Iterated(dataset).open(2, 0)) == rows[2:]


def test_rows_of_a_hugging_face_stream_keep_their_format() -> None:
    row = next(Iterated(hugging_face().with_format("numpy")).open(3, 0))
    assert row["tokens"].tolist() == [3, 3, 3]
    frame = next(Iterated(hugging_face().with_format("pandas")).open(3, 0))
    assert frame["n"].tolist() == [3]


class Everything(IterableDataset):  # type: ignore[misc]
    def __init__(self, source: Iterated) -> None:
        self.source = source

    def __iter__(self) -> Iterator[int]:
        return (row["n"] for row in self.source.open(1, 0))


def test_every_worker_sees_all_items_of_a_hugging_face_stream() -> None:
    """Streams distribute items over workers; Hugging Face must not do so, too."""
    loader = DataLoader(Everything(Iterated(hugging_face())), batch_size=None, num_workers=2)
    assert sorted(loader) == sorted([*range(1, 12)] * 2)


def test_an_endless_function_is_opened_at_any_start() -> None:
    def endless(start: int) -> Iterator[int]:
        while True:
            yield start
            start += 1

    assert list(islice(Iterated(endless).open(10**12, 0), 2)) == [10**12, 10**12 + 1]


def test_items_are_transformed_only_when_decoded() -> None:
    source = Iterated(range(3), transform=lambda n: [n, n / 0])
    items = list(source.open(0, 0))
    assert items == [0, 1, 2]
    with pytest.raises(SampleError, match="sample 1 cannot be read"):
        read_samples(source, 1, items[1])
    assert Iterated(range(3)).decode(2) == 2


def test_an_iterator_is_refused() -> None:
    for once in (five(), iter([1]), map(str, [1])):
        with pytest.raises(InputError, match="that can be read again, got"):
            Iterated(once)


def test_anything_but_an_iterable_is_refused() -> None:
    with pytest.raises(
        InputError, match="expected an iterable or a function that returns one, got int"
    ):
        Iterated(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("fault", [ValueError, StopIteration])
def test_an_error_of_the_iterator_names_the_item_and_is_not_its_end(
    start: int, fault: type[Exception]
) -> None:
    def broken() -> Iterator[int]:
        yield from (0, 1, 2)
        raise fault("torn page")

    items = Iterated(broken).open(start, 0)
    assert next(items) == start
    with pytest.raises(SampleError, match="item 3 cannot be read") as caught:
        list(items)
    assert "cannot continue" in str(caught.value)


def test_an_error_before_the_start_names_its_own_item() -> None:
    def broken() -> Iterator[int]:
        yield 0
        raise OSError("gone")

    with pytest.raises(SampleError, match=r"item 1 cannot be read \(OSError: gone\)"):
        next(Iterated(broken).open(5, 0))


def test_a_sample_error_of_the_iterator_is_passed_on() -> None:
    def broken() -> Iterator[int]:
        yield 0
        raise SampleError("shard 3 is gone")

    with pytest.raises(SampleError, match=r"^shard 3 is gone$"):
        list(Iterated(broken).open(0, 0))


def test_a_function_without_a_signature_is_called_without_arguments() -> None:
    assert list(Iterated(dict).open(2, 1)) == []


def test_an_iterable_that_cannot_be_opened_names_the_item() -> None:
    def broken() -> Iterator[int]:
        raise KeyError("absent")

    with pytest.raises(SampleError, match=r"item 4 cannot be read \(KeyError: 'absent'\)"):
        next(Iterated(broken).open(4, 0))


def test_the_fingerprint_is_given_or_covers_the_type() -> None:
    assert Iterated(range(3), fingerprint="v1").fingerprint == "v1"
    sources = [Iterated(five), Iterated([1]), Iterated(Torch()), Iterated(hugging_face())]
    assert len({source.fingerprint for source in sources}) == len(sources)
    assert Iterated(hugging_face()).fingerprint == Iterated(hugging_face()).fingerprint


@pytest.mark.parametrize("items", [range(5), five, Torch(), hugging_face()])
def test_it_can_be_pickled(items: Any) -> None:
    source = Iterated(items)
    copy = pickle.loads(pickle.dumps(source))
    assert copy.fingerprint == source.fingerprint
    assert list(copy.open(2, 0)) == list(source.open(2, 0))
