"""MegatronTokens: the tokens of Megatron's `.bin` and `.idx` files.

    .bin = tokens of all sequences
    .idx = header | lengths, int32 | pointers, int64 | documents, int64
    header = magic, 9 bytes | version, 8 | dtype code, 1 | number of sequences, 8 | of documents, 8

All numbers are little-endian. `lengths[i]` tokens from byte `pointers[i]` on are sequence i.
Document i is the sequences `documents[i]` to `documents[i + 1]`; the array has one entry more than
there are documents, and the header counts its entries.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenstep.core.ragged import IntArray, offsets_of
from evenstep.core.text import one_of
from evenstep.data.files import Paths, files_digest, files_of
from evenstep.data.source import Shards
from evenstep.data.token_file import damaged
from evenstep.errors import FileError

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
CODES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
Unit: TypeAlias = Literal["document", "sequence"]
_ENDS = (".bin", ".idx")


class MegatronTokens(Shards):
    """Samples of files that Megatron's `preprocess_data.py` wrote, concatenated.

    `paths` is a path, a pattern such as `"data/*.idx"`, or a list of either; a path is the name of
    either file of a pair, or what both names share. A sample is a document, or a sequence with
    `unit="sequence"`; they differ if documents were split into sentences. Those without tokens are
    left out. `source[i]` has `input_ids`, a read-only view of the mapped file. Every process opens
    the files on first use and reads the indices once.

        MegatronTokens("data/wiki_text_document")
    """

    def __init__(self, paths: Paths, *, unit: Unit = "document") -> None:
        one_of("unit", unit, Unit)
        self.paths = list(dict.fromkeys(map(_shared, files_of(paths))))
        self.unit = unit

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "unit": self.unit}

    def __getitem__(self, item: int, /) -> dict[str, NDArray[Any]]:
        shard, number = self._locate(item)
        opened = self._opened[shard]
        number = number if opened.kept is None else int(opened.kept[number])
        return {"input_ids": opened.tokens(*opened.sequences(number))}

    def lengths_of(self, items: IntArray) -> IntArray:
        """The lengths of these items."""
        return self._lengths_by_shard(items, self._opened)

    @cached_property
    def fingerprint(self) -> str:
        """Covers number and sizes of samples and files, and 64 blocks of 64 KiB of the files (see
        `files_digest`). Not their names."""
        text = f"megatron {self.unit} {self.shards.tolist()} "
        digest = hashlib.blake2b(text.encode(), digest_size=16)
        digest.update(files_digest([_beside(path, end) for path in self.paths for end in _ENDS]))
        return digest.hexdigest()

    def _shard_sizes(self) -> list[int]:
        return [len(opened.lengths) for opened in self._opened]

    @cached_property
    def _opened(self) -> list[_Opened]:
        return [_open(path, self.unit) for path in self.paths]


class _Opened(NamedTuple):
    """The mapped files.

    bounds   the first sequence of each document, and the end; None if samples are sequences
    kept     the numbers of the samples with tokens; None if all have some
    lengths  of the samples that are kept
    """

    path: Path
    data: mmap.mmap | bytes
    dtype: np.dtype[Any]
    sizes: NDArray[np.int32]
    pointers: NDArray[np.int64]
    bounds: NDArray[np.int64] | None
    kept: IntArray | None
    lengths: NDArray[Any]

    def lengths_of(self, at: IntArray) -> IntArray:
        """The lengths of samples of this file."""
        return self.lengths[at].astype(np.int64)

    def sequences(self, number: int) -> tuple[int, int]:
        """The first sequence of a sample, and the one after its last."""
        if self.bounds is None:
            return number, number + 1
        return int(self.bounds[number]), int(self.bounds[number + 1])

    def tokens(self, first: int, end: int) -> NDArray[Any]:
        """The tokens of these sequences; a view if they follow each other in the file."""
        sizes = self.sizes[first:end].astype(np.int64) * self.dtype.itemsize
        starts = self.pointers[first:end]
        if (starts[1:] == starts[:-1] + sizes[:-1]).all():
            return self._view(int(starts[0]), int(sizes.sum()))
        parts = zip(starts.tolist(), sizes.tolist(), strict=True)
        return np.concatenate([self._view(start, size) for start, size in parts])

    def _view(self, start: int, size: int) -> NDArray[Any]:
        if not 0 <= start <= start + size <= len(self.data):
            raise damaged(
                self.path, f"a sample spans bytes {start} to {start + size} of {len(self.data)}"
            )
        return np.frombuffer(self.data, self.dtype, size // self.dtype.itemsize, start)


def _open(path: Path, unit: Unit) -> _Opened:
    data_path, index_path = (_beside(path, end) for end in _ENDS)
    index, data = _mapped(index_path), _mapped(data_path)
    dtype, sizes, pointers, documents = _columns(index_path, index)
    if unit == "sequence" or _one_each(documents, len(sizes)):
        bounds, lengths = None, sizes
    else:
        if len(documents) < 1 or documents[0] != 0 or documents[-1] != len(sizes):
            raise damaged(index_path, f"its documents do not span {len(sizes)} sequences")
        if (np.diff(documents) < 0).any():
            raise damaged(index_path, "its documents are not in order")
        bounds, lengths = documents, np.diff(offsets_of(sizes.astype(np.int64))[documents])
    kept = None if (lengths > 0).all() else np.flatnonzero(lengths)
    lengths = lengths if kept is None else lengths[kept]
    return _Opened(data_path, data, dtype, sizes, pointers, bounds, kept, lengths)


def _columns(path: Path, index: mmap.mmap | bytes) -> tuple[np.dtype[Any], Any, Any, Any]:
    """The dtype of tokens, and the arrays lengths, pointers and documents of an index."""
    if index[: len(MAGIC)] != MAGIC:
        raise FileError(
            f"{path} is not an index of Megatron's memory-mapped format. Write one with "
            f"preprocess_data.py."
        )
    if len(index) < HEADER.size:
        raise damaged(path, f"it has {len(index)} bytes")
    _, version, code, sequences, documents = HEADER.unpack(index[: HEADER.size])
    if version != 1 or code not in CODES:
        raise FileError(f"{path} has version {version} and dtype {code}, which are unknown.")
    dtype = np.dtype(f"<{CODES[code]}")
    if dtype.kind == "f":
        raise FileError(f"{path} is an index of {dtype} values, expected integer tokens.")
    expected = HEADER.size + 12 * sequences + 8 * documents
    if len(index) == expected + sequences and sequences:
        raise FileError(f"{path} has a mode per sequence. Only text is read; write it without.")
    if len(index) != expected:
        raise damaged(path, f"it has {len(index)} bytes instead of {expected}")
    lengths = np.frombuffer(index, "<i4", sequences, HEADER.size)
    pointers = np.frombuffer(index, "<i8", sequences, HEADER.size + 4 * sequences)
    ends = np.frombuffer(index, "<i8", documents, HEADER.size + 12 * sequences)
    if sequences and lengths.min() < 0:
        raise damaged(path, f"a sequence has {lengths.min()} tokens")
    return dtype, lengths, pointers, ends


def _one_each(documents: NDArray[np.int64], sequences: int) -> bool:
    """Whether every document is one sequence: [0, 1, 2, 3] for 3 sequences."""
    return len(documents) == sequences + 1 and bool((documents == np.arange(sequences + 1)).all())


def _shared(path: Path) -> Path:
    """What the names of both files share."""
    return path.with_suffix("") if path.suffix in _ENDS else path


def _beside(path: Path, end: str) -> Path:
    return path.with_name(path.name + end)


def _mapped(path: Path) -> mmap.mmap | bytes:
    try:
        with path.open("rb") as file:
            # An empty file cannot be mapped.
            empty = os.fstat(file.fileno()).st_size == 0
            return b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise FileError(
            f"{path} cannot be read ({error.strerror or error}). Check the path."
        ) from None
