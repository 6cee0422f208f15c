"""Iterated: an iterable, or a function that returns one, as a sequential source."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from evenstep.data.sources.source import Draw, Sample
from evenstep.data.sources.transform import ItemTransform, Transform, parameters_of
from evenstep.errors import InputError, SampleError


class Iterated:
    """Items of an iterable that yields the same items every time, in any process.

    `items` is a torch or Hugging Face `IterableDataset`, a list, or a function that returns an
    iterable. `set_epoch` is called if it exists. A function may have the parameters `start`, the
    index of the first item to yield, and `epoch`. Without `start`, the items before it are read
    and discarded on resume. A transform may have parameters named `sample_id`, `epoch` and `seed`
    (see `Draw`); the id of an item is its index.

    Streams distribute items over ranks and workers, so the iterable must not do so itself. The
    default fingerprint covers little more than the type. Pass one of your own, such as a version
    of the data, to have changed data detected on resume.

    >>> source = Iterated(range(10, 15), transform=lambda n: {"input_ids": [n]})
    >>> [source.decode(item) for item in source.open(start=3, epoch=0)]
    [{'input_ids': [13]}, {'input_ids': [14]}]
    """

    def __init__(
        self,
        items: Iterable[Any] | Callable[..., Iterable[Any]],
        *,
        transform: Transform | None = None,
        fingerprint: str | None = None,
    ) -> None:
        if isinstance(items, Iterator) and iter(items) is items:
            raise InputError(
                f"expected an iterable that can be read again, got a {type(items).__name__}. Pass "
                f"the function that returns it, or a dataset."
            )
        if not (isinstance(items, Iterable) or callable(items)):
            raise InputError(
                f"expected an iterable or a function that returns one, got "
                f"{type(items).__name__}. For a dataset with items by index, use Mapped(dataset)."
            )
        self.items = items
        self.transform = ItemTransform.of(transform)
        self._given = fingerprint

    @property
    def fingerprint(self) -> str:
        """The given fingerprint, or one of the type and the name of a Hugging Face dataset."""
        if self._given is not None:
            return self._given
        name = getattr(self.items, "__qualname__", type(self.items).__qualname__)
        info = getattr(self.items, "info", None) if _is_hugging_face(self.items) else None
        about = [str(getattr(info, key, "")) for key in ("dataset_name", "config_name", "version")]
        text = " ".join(["iterated", name, *about])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def open(self, start: int, epoch: int) -> Iterator[Any]:
        """The raw items from index `start` on.

        An iterator that raises is finished, so its errors are raised even with `on_error="skip"`.
        """
        try:
            iterable, first = self._opened(start, epoch)
            iterator = iter(iterable)
        except Exception as error:
            raise _broken(start, error) from error
        return _counted(iterator, first, start)

    def decode(self, item: Any) -> Sample | list[Sample]:
        """The sample, or list of samples, of one raw item."""
        return self.transform(item)

    @property
    def seeded(self) -> bool:
        """Whether the transform takes a sample's id, epoch or seed."""
        return self.transform.seeded

    def drawn(self, item: Any, draw: Draw) -> Sample | list[Sample]:
        """The same with a seeded transform."""
        return self.transform(item, draw)

    def _opened(self, start: int, epoch: int) -> tuple[Iterable[Any], int]:
        """An iterable, and the index of its first item."""
        items: Any = self.items
        set_epoch = getattr(items, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        if _is_hugging_face(items):
            return _hugging_face(items, start, epoch)
        if isinstance(items, Iterable):
            return items, 0
        wanted = {"start": start, "epoch": epoch}
        passed = {name: wanted[name] for name in wanted if name in parameters_of(items)}
        return items(**passed), start if "start" in passed else 0


def _counted(iterator: Iterator[Any], index: int, start: int) -> Iterator[Any]:
    """The items from index `start` on; `index` is that of the iterator's first item."""
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        except SampleError:
            raise
        except Exception as error:
            raise _broken(index, error) from error
        if index >= start:
            yield item
        index += 1


def _broken(index: int, error: Exception) -> SampleError:
    return SampleError(
        f"item {index} cannot be read ({type(error).__name__}: {error}). An iterator that raises "
        f"cannot continue. Repair the item, or catch the error inside the iterable."
    )


def _is_hugging_face(items: object) -> bool:
    return any(
        base.__name__ == "IterableDataset" and base.__module__.startswith("datasets.")
        for base in type(items).__mro__
    )


def _hugging_face(dataset: Any, start: int, epoch: int) -> tuple[Iterable[Any], int]:
    """All items of a Hugging Face stream, in every worker, and the index of the first.

    `skip` fixes the order of shards, which later epochs shuffle, and counts items before
    `split_dataset_by_node`. In those cases, items before `start` are read instead of skipped.
    """
    first = 0
    if start and epoch == 0 and getattr(dataset, "_distributed", None) is None:
        dataset, first = dataset.skip(start), start
    # Plain iteration omits the items of other DataLoader workers; iterating over batches does not.
    return map(_only_row, dataset.iter(batch_size=1)), first


def _only_row(batch: Any) -> Any:
    """{"a": [1], "b": [2]} -> {"a": 1, "b": 2}; a table of one row is returned as it is."""
    return (
        {key: column[0] for key, column in batch.items()} if isinstance(batch, Mapping) else batch
    )
