"""Lists and datasets as sources: in memory, by index, or one item after the other."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from inspect import getattr_static
from operator import index
from os import PathLike
from typing import Any, NoReturn, Protocol, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenstep.core.ragged import IntArray, frozen
from evenstep.data.files import Jsonl, RowSource, column_lengths, dataset_column, refuse_empty
from evenstep.data.source import (
    Draw,
    ItemTransform,
    MeasuredSource,
    Progress,
    Sample,
    Source,
    Transform,
    TransformedItems,
    check_items,
    column_digest,
    digest_of,
    is_seeded,
    length_of,
    parameters_of,
    samples_digest,
    spread,
)
from evenstep.errors import ConfigError, InputError, SampleError

# Lengths that are counted -------------------------------------------------------------------------

_PATIENCE = 5.0  # seconds until a warning says how long it will take


def known_lengths(dataset: Any, progress: Progress | None = None) -> IntArray | None:
    """The lengths of all items of a source or a Hugging Face dataset; None if they are known only
    by reading its items. Of a dataset, those of the column `input_ids`."""
    if hasattr(dataset, "lengths_of"):
        lengths: IntArray = dataset.lengths_of(np.arange(len(dataset)))
        return lengths
    if isinstance(dataset, RowSource):
        return dataset.list_lengths(progress)
    if _has_column(dataset):
        return column_lengths([dataset_column(dataset, "input_ids", "the dataset")], progress)
    return None


def measured_lengths(
    dataset: Any,
    read: Callable[[int], Sample] | None,
    progress: Progress | None = None,
) -> IntArray:
    """The lengths of all items of a dataset; of what `read` gives, if it is not None.

    Without `read`, `known_lengths` are not read. Otherwise every item is read once.
    `progress(done, total)` is called meanwhile; without it, a warning says how long it takes, if
    that is long.
    """
    total, start, warned = len(dataset), time.monotonic(), progress is not None
    if read is None:
        if (known := known_lengths(dataset, progress)) is not None:
            return known
        seeded = is_seeded(dataset)
        read = (lambda i: dataset.drawn(i, Draw(i, 0, 0))) if seeded else dataset.__getitem__
    lengths = np.zeros(total, np.int64)
    for item in range(total):
        lengths[item] = item_length(item, read(item))
        if progress is not None:
            progress(item + 1, total)
        elapsed = time.monotonic() - start
        if elapsed > _PATIENCE and not warned:
            warned = True
            minutes = elapsed * total / (item + 1) / 60
            warnings.warn(
                f"reading all {total:,} items once to know their lengths takes about "
                f"{minutes:.1f} minutes. Pass them with MeasuredMapped(dataset, lengths=...), or "
                f"use a PooledStream, which needs none.",
                stacklevel=2,
            )
    return lengths


def _has_column(dataset: Any) -> bool:
    """Whether it is a Hugging Face dataset with `input_ids`, read as they are stored."""
    columns = getattr(dataset, "column_names", None)
    if not (isinstance(columns, list) and "input_ids" in columns):
        return False
    kind = getattr(dataset, "format", {}).get("type")
    return hasattr(dataset, "select_columns") and kind != "custom"  # custom: `set_transform`


def item_length(item: int, sample: Sample) -> int:
    """The length of an item that is one sample."""
    if isinstance(sample, list):
        raise InputError(
            f"item {item} is a list, that is several samples, so it has no single length. Pass one "
            f"mapping or array per item, or use a PooledStream."
        )
    try:
        return length_of(sample)
    except (KeyError, TypeError) as error:
        raise InputError(
            f"item {item} has no length ({type(error).__name__}: {error}). Pass a mapping with "
            f"input_ids, or a sequence of tokens."
        ) from None


# Lengths alone ------------------------------------------------------------------------------------


class Lengths:
    """One length per sample, in memory or memory-mapped; never copied or scanned.

    >>> Lengths(np.array([5, 3, 4])).lengths_of(np.array([2, 0])).tolist()
    [4, 5]
    """

    def __init__(self, lengths: NDArray[np.integer]) -> None:
        array: object = lengths
        if not (isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in "iu"):
            got = f"a {type(array).__name__}"
            if isinstance(array, np.ndarray):
                got = f"an array of shape {array.shape} and dtype {array.dtype}"
            raise InputError(
                f"lengths must be a flat numpy array of integers, got {got}. Use "
                f"np.asarray(lengths), or np.load(..., mmap_mode='r') for a large file."
            )
        self._lengths = lengths

    @property
    def fingerprint(self) -> str:
        """Covers the number of lengths and 4096 of them, evenly spread."""
        return column_digest(self._lengths.__getitem__, len(self))

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths_of(self, items: IntArray) -> IntArray:
        """The lengths of these items."""
        return self._lengths[items].astype(np.int64)

    def __getitem__(self, item: int) -> NoReturn:
        raise InputError(
            f"sample {item} cannot be read: the source holds only lengths. Read it from your own "
            f"dataset by its id, or pass the stream a source of samples."
        )


# Samples in memory --------------------------------------------------------------------------------

_FINGERPRINT_ITEMS = 64  # in the fingerprint


class InMemory:
    """Samples held in a sequence. An item that is a `list` is several samples.

    If every item is one sample, the source knows its lengths. They are counted on first use.

    >>> source = InMemory([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}])
    >>> len(source), source[1], source.lengths_of(np.array([1, 0])).tolist()
    (2, {'input_ids': [8]}, [1, 3])
    """

    def __init__(self, samples: Sequence[Sample | list[Sample]]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, item: int, /) -> Sample | list[Sample]:
        if not 0 <= item < len(self):
            raise IndexError(f"item {item} of {len(self)}")
        return self._samples[item]

    def lengths_of(self, items: IntArray) -> IntArray:
        """The lengths of these items. Raises if an item of the source is several samples."""
        check_items(items, len(self))
        return self._lengths[items]

    @cached_property
    def fingerprint(self) -> str:
        """Covers the number of items and all values of up to 64 of them, evenly spread."""
        items = spread(len(self), _FINGERPRINT_ITEMS)
        samples = samples_digest(self._samples.__getitem__, items)
        return digest_of(f"memory {len(self)}", samples).hex()

    @cached_property
    def _lengths(self) -> IntArray:
        return np.array(
            [item_length(item, sample) for item, sample in enumerate(self._samples)], int
        )


# Datasets by index --------------------------------------------------------------------------------


class MapStyle(Protocol):
    """Items by index: a torch `Dataset`, a Hugging Face `Dataset`, a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: Any, /) -> Any: ...


class Mapped(TransformedItems):
    """A dataset of unknown lengths; `transform` turns its items into samples.

    A transform may have parameters named `sample_id`, `epoch` and `seed` (see `Draw`), so that what
    it draws is exact on resume. The dataset may be another source.

    >>> source = Mapped(["ab", "c"], transform=lambda text: {"input_ids": list(text.encode())})
    >>> len(source), source[1]
    (2, {'input_ids': [99]})
    """

    def __init__(self, dataset: MapStyle, *, transform: Transform | None = None) -> None:
        self.dataset = dataset
        self.transform = ItemTransform.of(transform)

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def seeded(self) -> bool:
        """Whether the transform takes a sample's id, epoch or seed."""
        return self.transform.seeded or is_seeded(self.dataset)

    @cached_property
    def fingerprint(self) -> str:
        """Covers the number of items, and 16 samples as they are read, evenly spread; so also the
        transform. Not the samples if two reads of them differ. Not the dataset's name or path."""
        return digest_of(f"mapped {len(self)} ", self._samples_digest(len(self))).hex()

    def _read(self, item: int, draw: Draw | None = None) -> Sample | list[Sample]:
        dataset: Any = self.dataset
        if not 0 <= item < len(dataset):
            raise IndexError(f"item {item} of {len(self)}")
        drawn = draw is not None and is_seeded(dataset)
        content = dataset.drawn(item, draw) if drawn else dataset[index(item)]
        return content if self.transform.function is None else self.transform(content, draw)


class MeasuredMapped(Mapped):
    """A dataset whose items are single samples of known length.

    `lengths` are those of the samples that `transform` returns, one per item, or the name of a
    column of a Hugging Face dataset. By default they are counted on first use: from the column
    `input_ids` of a Hugging Face dataset, the `field` of a `ParquetText`, or those of another
    source, unless there is a transform; else by reading every item once. A seeded transform (see
    `Mapped`) must not change the length of a sample from epoch to epoch.

    >>> data = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}]
    >>> source = MeasuredMapped(data, lengths=[3, 1])
    >>> source.lengths_of(np.array([1, 0])).tolist(), source[1]
    ([1, 3], {'input_ids': [8]})
    """

    def __init__(
        self,
        dataset: MapStyle,
        *,
        lengths: ArrayLike | str | None = None,
        transform: Transform | None = None,
    ) -> None:
        super().__init__(dataset, transform=transform)
        self._lengths_or_column = lengths

    def _read(self, item: int, draw: Draw | None = None) -> Sample:
        sample = super()._read(item, draw)
        if isinstance(sample, list):
            raise InputError(
                f"item {item} is a list, that is several samples, but has one length. Return one "
                f"mapping or array from transform, or use a PooledStream with Mapped(dataset)."
            )
        return sample

    def lengths_of(self, items: IntArray) -> IntArray:
        """The lengths of these items."""
        check_items(items, len(self))
        return self._lengths[items]

    @cached_property
    def fingerprint(self) -> str:
        """Covers what that of `Mapped` does, and all lengths."""
        lengths = self._lengths.astype("<i8").tobytes()
        return digest_of(f"measured {super().fingerprint} ", lengths).hex()

    @cached_property
    def _lengths(self) -> IntArray:
        lengths: Any = self._lengths_or_column
        if lengths is None:
            plain = self.transform.function is None
            read = None if plain else lambda item: Mapped._read(self, item, Draw(item, 0, 0))
            lengths = measured_lengths(self.dataset, read)
        elif isinstance(lengths, str):
            columns = getattr(self.dataset, "column_names", None)
            if not (isinstance(columns, list) and lengths in columns):
                raise InputError(
                    f"unknown column {lengths!r} for lengths; the {type(self.dataset).__name__} "
                    f"has {columns or 'no named columns'}. Name another column, or pass the "
                    f"lengths."
                )
            lengths = cast("Any", self.dataset).with_format("numpy")[lengths][:]
        lengths = np.asarray(lengths)
        if lengths.shape != (len(self),):
            raise InputError(
                f"expected one length per item, got lengths of shape {lengths.shape} for "
                f"{len(self)} items."
            )
        if len(lengths) and lengths.dtype.kind not in "iu":
            raise InputError(
                f"lengths must be integers, got {lengths.dtype}. Pass the number of tokens of "
                f"every item."
            )
        return frozen(lengths.astype(np.int64))


# Items one after the other ------------------------------------------------------------------------


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
        self._fingerprint = fingerprint

    @property
    def fingerprint(self) -> str:
        """The one that was passed, or one of the type and the name of a Hugging Face dataset."""
        if self._fingerprint is not None:
            return self._fingerprint
        name = getattr(self.items, "__qualname__", type(self.items).__qualname__)
        info = getattr(self.items, "info", None) if _is_hugging_face(self.items) else None
        about = [str(getattr(info, key, "")) for key in ("dataset_name", "config_name", "version")]
        return digest_of(" ".join(["iterated", name, *about])).hex()

    def open(self, start: int, epoch: int) -> Iterator[Any]:
        """The raw items from index `start` on.

        An iterator that raises is finished, so its errors are raised even with `on_error="skip"`.
        """
        index = start
        try:
            iterable, index = self._opened(start, epoch)
            for item in iterable:
                if index >= start:
                    yield item
                index += 1
        except SampleError:
            raise
        except Exception as error:
            raise SampleError(
                f"item {index} cannot be read ({type(error).__name__}: {error}). An iterator that "
                f"raises cannot continue. Repair the item, or catch the error inside the iterable."
            ) from error

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
            # `skip` fixes the order of shards, which later epochs shuffle, and counts items before
            # `split_dataset_by_node`. In those cases, items before `start` are read instead.
            skips = start > 0 and epoch == 0 and getattr(items, "_distributed", None) is None
            # Plain iteration omits the items of other DataLoader workers; batches do not.
            batches = (items.skip(start) if skips else items).iter(batch_size=1)
            return map(_only_row, batches), start if skips else 0
        if isinstance(items, Iterable):
            return items, 0
        wanted = {"start": start, "epoch": epoch}
        passed = {name: wanted[name] for name in wanted if name in parameters_of(items)}
        return items(**passed), start if "start" in passed else 0


def _is_hugging_face(items: object) -> bool:
    return any(
        base.__name__ == "IterableDataset" and base.__module__.startswith("datasets.")
        for base in type(items).__mro__
    )


def _only_row(batch: Any) -> Any:
    """{"a": [1], "b": [2]} -> {"a": 1, "b": 2}; a table of one row is returned as it is."""
    listed = isinstance(batch, Mapping)
    return {name: column[0] for name, column in batch.items()} if listed else batch


# What users pass -> a source ----------------------------------------------------------------------


def as_source(value: object) -> Source:
    """A source as it is; a list of samples, a map-style or an iterable dataset in its wrapper.

    Datasets are those of torch and of Hugging Face, or anything with `__len__` and `__getitem__`.
    The error for anything else names the wrapper to use.

    >>> as_source([{"input_ids": [5, 6]}])[0]
    {'input_ids': [5, 6]}
    """
    return cast("Source", value) if is_source(value) else _wrap(value, measured=False)


def as_measured(value: object, lengths: ArrayLike | None = None) -> MeasuredSource:
    """The same for a source that knows its lengths.

    The `lengths` of a dataset, or of a `Jsonl` whose rows have `input_ids`, are measured on first
    use, if they are not given: from the column `input_ids` of a Hugging Face dataset, else by
    reading every item once.

    >>> as_measured([{"input_ids": [5, 6]}]).lengths_of(np.arange(1)).tolist()
    [2]
    """
    if not is_source(value):
        return cast("MeasuredSource", _wrap(value, measured=True, lengths=lengths))
    by_index = _has(value, *_BY_INDEX)
    if by_index and _has(value, "lengths_of"):
        return cast("MeasuredSource", value)
    refuse_empty(value)
    if isinstance(value, Jsonl) and value.has_tokens:
        return MeasuredMapped(value)
    measure = ", or measure it with MeasuredMapped(source)" if by_index else ""
    raise ConfigError(
        f"expected a source with known lengths, got {type(value).__name__}. Read it with a "
        f"PooledStream{measure}."
    )


def is_source(value: object) -> bool:
    """Whether `value` is a source itself. Nothing is read."""
    return _has(value, *_BY_INDEX) or _has(value, *_IN_ORDER)


def wrapped_fingerprint(source: object) -> str | None:
    """The fingerprint of the source that a source wraps, and of those inside it; None if it wraps
    none."""
    inside: list[str] = []
    while is_source(source := getattr(source, "dataset", None)):
        inside.append(str(getattr(source, "fingerprint")))  # noqa: B009
    return ",".join(inside) or None


_BY_INDEX = ("fingerprint", "__len__", "__getitem__")
_IN_ORDER = ("fingerprint", "open", "decode")
_REMEDIES = {
    "lengths": (
        "Wrap a list of samples, mappings with input_ids, with InMemory(samples)",
        "Wrap it with Lengths(np.asarray(lengths))",
    ),
    "texts": (
        "Turn text into tokens with Mapped(texts, transform=...), or open files with "
        "Jsonl(paths), ParquetText(paths) or TokenFile(paths)",
        "Turn text into tokens with MeasuredMapped(texts, transform=...), or open files with "
        "TokenFile(paths)",
    ),
    "datasets": ("Pass one of its values",) * 2,
    "items": ("Wrap it with Iterated(items)", "Use a PooledStream with Iterated(items)"),
    "iterable dataset": ("", "It has no known lengths: use a PooledStream"),
    "path": (
        "Open it with Jsonl(path), ParquetText(path) or TokenFile(path)",
        "Open it with TokenFile(path), or Jsonl(path) if its rows have input_ids; or use a "
        "PooledStream with Jsonl(path) or ParquetText(path)",
    ),
    "other": ("Pass a list of samples, a dataset or a source",) * 2,
}
"""What to do about each kind of argument that is not a source, and if lengths must be known."""


def _wrap(value: Any, measured: bool, lengths: ArrayLike | None = None) -> Source:
    """A list of samples or a dataset as a source, which knows its lengths if it is `measured`."""
    kind = _kind(value)
    if kind == "samples":
        return InMemory(value)
    if kind == "dataset":
        return MeasuredMapped(value, lengths=lengths) if measured else Mapped(value)
    if kind == "iterable dataset" and not measured:
        return Iterated(value)
    raise ConfigError(
        f"expected a source, got {type(value).__name__}. {_REMEDIES[kind][measured]} (from "
        f"evenstep.data)."
    )


def _kind(value: object) -> str:
    """The kind of an argument that is not a source."""
    if isinstance(value, (str, bytes, PathLike)):
        return "path"
    if isinstance(value, Mapping):
        return "datasets"
    if isinstance(value, np.ndarray):
        return "lengths" if value.ndim == 1 and value.dtype.kind in "biuf" else "samples"
    if isinstance(value, (list, tuple)):
        first = next(iter(value), None)
        if isinstance(first, (str, bytes, PathLike)):
            return "texts"
        return "lengths" if isinstance(first, (int, np.integer)) else "samples"
    # A torch IterableDataset may have __len__, and has a __getitem__ that raises.
    if any(base.__name__ == "IterableDataset" for base in type(value).__mro__):
        return "iterable dataset"
    if _has(value, "__len__", "__getitem__"):
        return "dataset"
    return "items" if isinstance(value, Iterable) or callable(value) else "other"


def _has(value: object, *names: str) -> bool:
    """Whether `value` has all of these attributes. Properties are not read: they may be slow."""
    missing = object()
    return all(
        getattr_static(value, name, missing) is not missing or hasattr(value, name)
        for name in names
    )
