"""TokenFile: the tokens of many samples in memory-mapped files.

    header, 4096 bytes | input_ids | further columns | offsets
    header = magic, 16 bytes | sha256 of the rest, 32 bytes | JSON, padded with spaces

Columns are flat little-endian arrays, each starting at a multiple of 64 bytes. Sample i has the
entries `offsets[i]` to `offsets[i + 1]` of every column. The file contains no pickled data.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from evenstep.core.ragged import IntArray, offsets_of, rounded_up
from evenstep.data.sources.files import Paths, files_of
from evenstep.data.sources.source import check_items
from evenstep.errors import FileError

MAGIC = b"EVENSTEP TOKS 1\n"
HEADER_SIZE = 4096
TOKENS, OFFSETS = "input_ids", "offsets"
_TEXT = len(MAGIC) + 32
_ALIGNMENT = 64
_BLOCK = 1 << 24


class TokenFile:
    """Samples of files that a `TokenFileWriter` wrote, concatenated; every item is one sample.

    `paths` is a path, a pattern such as `"data/*.tokens"`, or a list of either. Matches of a
    pattern are sorted; a list keeps its order. All files must have the same columns. `file[i]` is a
    mapping of `input_ids` and the further columns, all read-only views of the mapped files. Every
    process opens the files on first use. Opening takes the same time for any number of samples.

    >>> import tempfile
    >>> from evenstep.data.sources.token_writer import write_token_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = write_token_file(f"{folder}/a.tokens", [[5, 6, 7], [8]], dtype=np.uint16)
    ...     len(file), file.lengths_of(np.array([1, 0])).tolist(), file[0]
    (2, [1, 3], {'input_ids': array([5, 6, 7], dtype=uint16)})
    """

    def __init__(self, paths: Paths) -> None:
        self.paths = files_of(paths)

    def __reduce__(self) -> tuple[type[Self], tuple[list[Path]]]:
        return type(self), (self.paths,)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, item: int, /) -> dict[str, NDArray[Any]]:
        if not 0 <= item < self._count:
            raise IndexError(f"item {item} of {len(self)}")
        opened, number = self._opened[0], item
        if number >= opened.header.samples:
            which = int(np.searchsorted(self._starts, item, "right")) - 1  # skips empty files
            opened, number = self._opened[which], item - int(self._starts[which])
        start, end = int(opened.offsets[number]), int(opened.offsets[number + 1])
        if not 0 <= start < end <= opened.header.tokens:
            raise damaged(opened.path, f"sample {number} spans tokens {start} to {end}")
        return {name: column[start:end] for name, column in opened.columns.items()}

    def lengths_of(self, items: IntArray) -> IntArray:
        """The lengths of these items. Reads no others."""
        check_items(items, len(self))
        at = np.asarray(items, np.int64)
        if len(self.paths) == 1:
            return self._opened[0].lengths_of(at)
        lengths = np.empty(len(at), np.int64)
        files = np.searchsorted(self._starts, at, "right") - 1
        for which in np.unique(files).tolist():
            here = files == which
            lengths[here] = self._opened[which].lengths_of(at[here] - self._starts[which])
        return lengths

    @property
    def fingerprint(self) -> str:
        """Covers all samples. It was computed when they were written, so nothing is read, and a
        file that was changed in place by other means is not noticed (see `verify`)."""
        found = [opened.header.fingerprint for opened in self._opened]
        if len(found) == 1:
            return found[0]
        return hashlib.blake2b(" ".join(found).encode(), digest_size=16).hexdigest()

    def verify(self) -> None:
        """Read the whole file and raise a FileError if it differs from what was written.

        Opening checks only sizes and the header.
        """
        for opened in self._opened:
            for name, section in [*opened.columns.items(), (OFFSETS, opened.offsets)]:
                digest, data = hasher(), section.view(np.uint8)
                for at in range(0, len(data), _BLOCK):
                    digest.update(data[at : at + _BLOCK].tobytes())
                if digest.hexdigest() != opened.header.digests[name]:
                    raise damaged(opened.path, f"the digest of {name} does not match")

    @cached_property
    def _count(self) -> int:
        return int(self._starts[-1])

    @cached_property
    def _starts(self) -> IntArray:
        return offsets_of(np.array([o.header.samples for o in self._opened], np.int64))

    @cached_property
    def _opened(self) -> list[_Opened]:
        found = [_open(path) for path in self.paths]
        for each in found:
            if each.columns.keys() != found[0].columns.keys():
                raise FileError(
                    f"{each.path} has the columns {', '.join(each.columns)}, but {found[0].path} "
                    f"has {', '.join(found[0].columns)}. Write both with the same columns."
                )
        return found


def _open(path: Path) -> _Opened:
    try:
        with path.open("rb") as file:
            block = file.read(HEADER_SIZE)
            size = os.fstat(file.fileno()).st_size
            header = Header.decode(path, block)
            sections, expected = header.sections()
            if size != expected:
                raise damaged(path, f"it has {size} bytes instead of {expected}")
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise FileError(
            f"{path} cannot be read ({error.strerror or error}). Check the path."
        ) from None
    columns = {name: data[a:b].view(dtype) for name, (a, b, dtype) in sections.items()}
    offsets = columns.pop(OFFSETS)
    if (offsets[0], offsets[-1]) != (0, header.tokens):
        raise damaged(path, f"its samples span tokens {offsets[0]} to {offsets[-1]}")
    return _Opened(path, header, columns, offsets)


class _Opened(NamedTuple):
    path: Path
    header: Header
    columns: dict[str, NDArray[Any]]
    offsets: NDArray[Any]

    def lengths_of(self, at: IntArray) -> IntArray:
        """The lengths of samples of this file."""
        lengths: IntArray = (self.offsets[at + 1] - self.offsets[at]).astype(np.int64)
        if len(at) and lengths.min() < 1:
            raise damaged(self.path, f"sample {at[lengths.argmin()]} has {lengths.min()} tokens")
        return lengths


@dataclass(frozen=True, slots=True)
class Header:
    """The columns and sizes of a token file, and the digest of each section."""

    columns: dict[str, np.dtype[Any]]
    samples: int
    tokens: int
    digests: dict[str, str]

    def sections(self) -> tuple[dict[str, tuple[int, int, np.dtype[Any]]], int]:
        """Start, end and dtype of each section, and the size of the file.

        >>> sections, size = Header({"input_ids": np.dtype("<u2")}, 2, 5, {}).sections()
        >>> sections["input_ids"], sections["offsets"], size
        ((4096, 4106, dtype('uint16')), (4160, 4184, dtype('int64')), 4184)
        """
        counts = [(name, dtype, self.tokens) for name, dtype in self.columns.items()]
        sections, end = {}, HEADER_SIZE
        for name, dtype, count in [*counts, (OFFSETS, np.dtype("<i8"), self.samples + 1)]:
            start = rounded_up(end, _ALIGNMENT)
            end = start + count * dtype.itemsize
            sections[name] = (start, end, dtype)
        return sections, end

    def encode(self) -> bytes:
        """The header as bytes; longer than `HEADER_SIZE` if the names of columns are too long."""
        values = {
            "columns": [[name, dtype.str] for name, dtype in self.columns.items()],
            "samples": self.samples,
            "tokens": self.tokens,
            "digests": self.digests,
        }
        text = json.dumps(values).encode().ljust(HEADER_SIZE - _TEXT)
        return MAGIC + hashlib.sha256(text).digest() + text

    @classmethod
    def decode(cls, path: Path, block: bytes) -> Header:
        """The inverse of `encode`. The digest is checked before the JSON is parsed."""
        if not block.startswith(MAGIC):
            raise FileError(
                f"{path} is not an Evenstep token file of version 1. Write one with "
                f"write_token_file."
            )
        digest, text = block[len(MAGIC) : _TEXT], block[_TEXT:]
        if len(block) != HEADER_SIZE or hashlib.sha256(text).digest() != digest:
            raise damaged(path, "its header does not match its digest")
        try:
            values = json.loads(text)
            columns = {str(name): column_type(dtype) for name, dtype in values["columns"]}
            samples, tokens = int(values["samples"]), int(values["tokens"])
            if TOKENS not in columns or OFFSETS in columns or min(samples, tokens) < 0:
                raise ValueError("missing input_ids, reserved name or negative size")
            digests = {name: str(values["digests"][name]) for name in (*columns, OFFSETS)}
            return cls(columns, samples, tokens, digests)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise damaged(path, f"its header is malformed: {error}") from None

    @property
    def fingerprint(self) -> str:
        """The same for the same samples in the same order."""
        return hashlib.blake2b(self.encode(), digest_size=16).hexdigest()


def column_type(dtype: DTypeLike) -> np.dtype[Any]:
    """The little-endian dtype of a stored column; a ValueError unless it is a plain number."""
    found = np.dtype(dtype).newbyteorder("<")
    if found.kind not in "biuf" or found.itemsize > 8:
        raise ValueError(f"{found} is not a plain number")
    return found


def hasher() -> hashlib.blake2b:
    """The hash function of section digests."""
    return hashlib.blake2b(digest_size=16)


def damaged(path: Path, fault: str) -> FileError:
    """The error for a file that differs from what was written."""
    return FileError(f"{path} is damaged or incomplete ({fault}). Copy or write it again.")
