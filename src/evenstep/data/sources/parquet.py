"""ParquetText: rows of Parquet files, read in any order."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evenstep.core.ragged import IntArray, offsets_of
from evenstep.data.sources.content import samples_digest, spread
from evenstep.data.sources.files import Paths, files_digest, files_of
from evenstep.data.sources.source import Draw, Sample
from evenstep.data.sources.text import RowDecoder, as_tokenize, other_field
from evenstep.data.sources.transform import ItemTransform, Transform
from evenstep.errors import FileError, InputError

_GROUPS_KEPT = 4


class ParquetText:
    """The rows of one or several Parquet files, concatenated; needs pyarrow.

    `paths` is a path, a pattern such as `"data/*.parquet"`, or a list of either. Matches of a
    pattern are sorted; a list keeps its order. An item is `transform(row)`, one sample or a list of
    several; without a transform, the tokens of `field`, and no other column is read. A transform
    may have parameters named `sample_id`, `epoch` and `seed` (see `Draw`).

    Footers are read on first use. Parquet is decoded by row group, and the last four groups are
    cached. So reading in order is fast, but reading in shuffled order decodes a group for almost
    every row; write a `TokenFile` first to shuffle.

        ParquetText(["a.parquet", "b.parquet"], field="content", tokenizer=tokenizer)
    """

    def __init__(
        self,
        paths: Paths,
        *,
        field: str = "text",
        tokenizer: Any = None,
        transform: Transform | None = None,
    ) -> None:
        self.paths = files_of(paths)
        self._decoder = RowDecoder(field, as_tokenize(tokenizer), ItemTransform.of(transform))
        self._reset()

    def _reset(self) -> None:
        self._decoded: OrderedDict[int, Any] = OrderedDict()  # group -> table, newest last
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "_decoder": self._decoder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def __len__(self) -> int:
        return int(self._index.offsets[-1])

    def __getitem__(self, item: int, /) -> Sample | list[Sample]:
        return self._read(item)

    @property
    def seeded(self) -> bool:
        """Whether the transform takes a sample's id, epoch or seed."""
        return self._decoder.transform.seeded

    def drawn(self, item: int, draw: Draw) -> Sample | list[Sample]:
        """An item with a seeded transform."""
        return self._read(item, draw)

    def _read(self, item: int, draw: Draw | None = None) -> Sample | list[Sample]:
        if not 0 <= item < len(self):
            raise IndexError(f"item {item} of {len(self)}")
        index = self._index
        group = int(np.searchsorted(index.offsets, item, "right")) - 1  # skips empty groups
        row = self._table(group).slice(item - int(index.offsets[group]), 1).to_pylist()[0]
        file = int(index.file[group])
        number = item - int(index.offsets[index.first[file]])
        return self._decoder.decode(row, f"{self.paths[file]}, row {number}", draw)

    def _first_drawn(self, item: int) -> Sample | list[Sample]:
        """The item as epoch 0 of seed 0 draws it."""
        return self._read(item, Draw(item, 0, 0))

    @cached_property
    def fingerprint(self) -> str:
        """Covers 16 samples of the first row group as they are read, so also tokenizer, field and
        transform; the size and footer (counts, schema, statistics) of every file, and 64 blocks of
        64 KiB (see `files_digest`). Not the names of files."""
        index = self._index
        digest = hashlib.blake2b(f"parquet {index.digest} ".encode(), digest_size=16)
        digest.update(files_digest(self.paths))
        group = int(index.offsets[index.offsets > 0][0]) if len(self) else 0
        digest.update(samples_digest(self._first_drawn, spread(group)))
        return digest.hexdigest()

    @cached_property
    def _index(self) -> _Index:
        digest = hashlib.blake2b(digest_size=16)
        counts: list[int] = []
        files: list[int] = []
        first: list[int] = []
        for number, path in enumerate(self.paths):
            metadata, about = self._footer(path)
            digest.update(about)
            first.append(len(counts))
            counts += [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
            files += [number] * metadata.num_row_groups
        offsets = offsets_of(np.array(counts, np.int64))
        return _Index(offsets, np.array(files, np.int64), first, digest.hexdigest())

    def _footer(self, path: Path) -> tuple[Any, bytes]:
        """The metadata of a file, and its size and footer as bytes for the fingerprint."""
        with reading(path) as parquet:
            metadata = parquet.read_metadata(path)
            with path.open("rb") as file:
                size = file.seek(-8, os.SEEK_END) + 8  # ... footer | its size, 4 bytes | PAR1
                length = int.from_bytes(file.read(4), "little")
                file.seek(size - 8 - length)
                about = f" {size} {metadata.num_rows} ".encode() + file.read(length)
            names = metadata.schema.to_arrow_schema().names
        if self._decoder.transform.function is None and self._decoder.field not in names:
            raise InputError(
                f"{path} has no column {self._decoder.field!r}; it has {', '.join(names[:20])}. "
                f"{other_field(names)}, or pass a transform."
            )
        return metadata, about

    def _table(self, group: int) -> Any:
        """A decoded row group, from the cache if possible. One thread decodes at a time."""
        with self._lock:
            if group not in self._decoded:
                file = int(self._index.file[group])
                given = self._decoder.transform.function is not None
                columns = None if given else [self._decoder.field]
                number = group - self._index.first[file]
                path = self.paths[file]
                with reading(path) as parquet, parquet.ParquetFile(path) as opened:
                    self._decoded[group] = opened.read_row_group(number, columns=columns)
                while len(self._decoded) > _GROUPS_KEPT:
                    self._decoded.popitem(last=False)
            self._decoded.move_to_end(group)
            return self._decoded[group]


class _Index(NamedTuple):
    """Row groups of all files: where their rows start, and their file; each file's first group."""

    offsets: IntArray
    file: IntArray
    first: list[int]
    digest: str


@contextmanager
def reading(path: Path) -> Iterator[Any]:
    """Yield pyarrow.parquet, and turn its errors into a FileError."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise FileError(
            f"reading {path} needs pyarrow, which is not installed. Install it with: "
            f"pip install 'evenstep[parquet]'."
        ) from None
    try:
        yield parquet
    except (OSError, ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise FileError(
            f"{path} is not readable Parquet ({reason}). Check the path, or write the file again."
        ) from None
