"""Iterated: any iterable, or a function that makes one, as a source that is read in order."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from evenstep.data.sources.source import Sample
from evenstep.data.sources.text import Transform
from evenstep.errors import InputError, SampleError


class Iterated:
    """Items of an iterable that gives the same items whenever it is iterated, in any process.

    A torch or Hugging Face `IterableDataset`, a list, or a function such as a generator function.
    `set_epoch` is called where there is one. A function with a parameter `start` is given the
    number of the first item wanted, so that resuming costs nothing; one with a parameter `epoch`
    is given the epoch. Otherwise what comes before the start is read and passed over.

    Streams share items out by themselves: an iterable that looks at its DataLoader worker or rank
    and leaves items out would be divided twice. The fingerprint knows little more than the type:
    pass one of your own, such as a version of the data, and a changed dataset is refused.

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
                f"a {type(items).__name__} can be read only once, so there would be no second "
                f"epoch and no resuming. Pass the function that makes it, or a dataset."
            )
        if not (isinstance(items, Iterable) or callable(items)):
            raise InputError(
                f"a {type(items).__name__} is neither iterable nor a function, so there are no "
                f"items. Pass one that is, or use Mapped where items have numbers."
            )
        self.items = items
        self.transform = transform
        self._given = fingerprint

    @property
    def fingerprint(self) -> str:
        """The one that was given, or one of the type and the name that Hugging Face knows."""
        if self._given is not None:
            return self._given
        name = getattr(self.items, "__qualname__", type(self.items).__qualname__)
        info = getattr(self.items, "info", None) if _is_hugging_face(self.items) else None
        about = [str(getattr(info, key, "")) for key in ("dataset_name", "config_name", "version")]
        text = " ".join(["iterated", name, *about])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def open(self, start: int, epoch: int) -> Iterator[Any]:
        """The raw items from number `start` on.

        An iterator that raises is finished, so its fault is an error under every policy.
        """
        try:
            iterable, first = self._opened(start, epoch)
            iterator = iter(iterable)
        except Exception as error:
            raise _broken(start, error) from error
        return _counted(iterator, first, start)

    def decode(self, item: Any) -> Sample | list[Sample]:
        """The sample, or a list of samples, of one raw item."""
        return item if self.transform is None else self.transform(item)

    def _opened(self, start: int, epoch: int) -> tuple[Iterable[Any], int]:
        """An iterable, and the number of its first item."""
        items: Any = self.items
        set_epoch = getattr(items, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        if _is_hugging_face(items):
            return _hugging_face(items, start, epoch)
        if isinstance(items, Iterable):
            return items, 0
        wanted = {"start": start, "epoch": epoch}
        passed = {name: wanted[name] for name in wanted if name in _parameters(items)}
        return items(**passed), start if "start" in passed else 0


def _counted(iterator: Iterator[Any], number: int, start: int) -> Iterator[Any]:
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        except SampleError:
            raise
        except Exception as error:
            raise _broken(number, error) from error
        if number >= start:
            yield item
        number += 1


def _broken(number: int, error: Exception) -> SampleError:
    return SampleError(
        f"item {number} cannot be read ({type(error).__name__}: {error}), and an iterator that "
        f"raised is finished, so all behind it is lost. Repair the item, or catch the fault inside "
        f"the iterable."
    )


def _parameters(function: Callable[..., Any]) -> set[str]:
    """The parameters that can be passed by name."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set()  # some builtins have no signature
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name for parameter in found if parameter.kind in named}


def _is_hugging_face(items: object) -> bool:
    return any(
        base.__name__ == "IterableDataset" and base.__module__.startswith("datasets.")
        for base in type(items).__mro__
    )


def _hugging_face(dataset: Any, start: int, epoch: int) -> tuple[Iterable[Any], int]:
    """Items of a Hugging Face stream, all of them in every worker.

    `skip` fixes the order of shards, which later epochs shuffle, and counts before a split by
    node; where that would give other items, what comes before the start is read instead.
    """
    first = 0
    if start and epoch == 0 and getattr(dataset, "_distributed", None) is None:
        dataset, first = dataset.skip(start), start
    # Plain iteration leaves out what other DataLoader workers would read; batches do not.
    return map(_only_row, dataset.iter(batch_size=1)), first


def _only_row(batch: Any) -> Any:
    """{"a": [1], "b": [2]} -> {"a": 1, "b": 2}; a table of one row stays one."""
    return (
        {key: column[0] for key, column in batch.items()} if isinstance(batch, Mapping) else batch
    )
