"""LineFile: where the lines of a text file are, so that they can be read in any order."""

from __future__ import annotations

import os
import weakref
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.errors import FileError

_BLOCK, _PART = 1 << 24, 4096
_NEWLINE = 10


class LineFile:
    """The non-blank lines of a file, which is scanned for line ends once, on first use.

    Pickling keeps this index but not the open file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_file"}

    def __len__(self) -> int:
        return len(self._index.starts) - 1

    def __getitem__(self, item: int) -> bytes:
        """A line, with the blank lines after it."""
        starts = self._index.starts
        begin, end = int(starts[item]), int(starts[item + 1])
        line = _read(self._file, begin, end - begin)
        if len(line) != end - begin:
            raise self._changed(os.fstat(self._file).st_size, int(starts[-1]))
        return line

    def number(self, item: int) -> int:
        """The number of an item's line, from 1."""
        return self._index.line(item)

    @cached_property
    def _index(self) -> _Index:
        return _scanned(self._file)

    @cached_property
    def _file(self) -> int:
        """The descriptor of the open file. It is not mapped: touching a page of a file that was
        shortened kills the process. Forked processes may share it: reads name their position."""
        try:
            file = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, file)
            size = os.fstat(file).st_size
            os.pread(file, 1, 0)  # fails for a folder
        except OSError as error:
            raise FileError(
                f"{self.path} cannot be read ({error.strerror or error}). Check the path."
            ) from None
        index: _Index | None = vars(self).get("_index")  # from this or another process
        if index is not None and index.starts[-1] != size:
            raise self._changed(size, int(index.starts[-1]))
        return file

    def _changed(self, size: int, before: int) -> FileError:
        return FileError(
            f"{self.path} has {size} bytes but had {before} when it was indexed. Do not change the "
            f"file while it is in use."
        )


def _read(file: int, begin: int, size: int) -> bytes:
    """So many bytes from `begin` on; fewer at the end of the file."""
    data = os.pread(file, size, begin)
    while len(data) < size and (more := os.pread(file, size - len(data), begin + len(data))):
        data += more  # the system reads 2 GiB at most
    return data


class _Index(NamedTuple):
    """Where each item's line starts, with the size of the file at the end; for each blank line,
    the number of items before it."""

    starts: IntArray
    blanks: IntArray

    def line(self, item: int) -> int:
        """The line number of an item, from 1: items of lines [a, blank, b] -> 1, 3."""
        return item + 1 + int(np.searchsorted(self.blanks, item, "right"))


def _scanned(file: int) -> _Index:
    """Find the lines, block by block.

    A file of the lines "1", " " and "2" has the starts [0, 4, 5] (5 is its size) and blanks [1].
    """
    starts, blank = [np.zeros(0, np.int64)], [np.zeros(0, np.bool_)]
    at, ended = 0, True  # whether a line ends before this block
    while block := _read(file, at, _BLOCK):
        view = np.frombuffer(block, np.uint8)
        found = np.flatnonzero(np.append(ended, view[:-1] == _NEWLINE))
        first = view[found]
        empty = first == _NEWLINE
        for number in np.flatnonzero((first == 32) | (first == 9) | (first == 13)).tolist():
            empty[number] = _is_blank(file, at + int(found[number]))
        starts.append(found + at)
        blank.append(empty)
        at, ended = at + len(block), bool(view[-1] == _NEWLINE)
    empty = np.concatenate(blank)
    items = np.concatenate([*starts, [at]])[np.append(~empty, True)].astype(np.int64)
    return _Index(items, np.cumsum(~empty)[empty])


def _is_blank(file: int, begin: int) -> bool:
    """Whether the line that begins there has white space only."""
    while part := _read(file, begin, _PART):
        line, newline, _ = part.partition(b"\n")
        if line.strip():
            return False
        if newline:
            break
        begin += len(part)
    return True
