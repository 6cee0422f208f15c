"""LineFile: where the lines of a text file are, so that they can be read in any order."""

from __future__ import annotations

import mmap
import os
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.errors import FileError

_BLOCK = 1 << 24
_NEWLINE = 10


class LineFile:
    """The non-blank lines of a file, which is scanned for line ends once, on first use.

    Pickling keeps this index but not the open file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_data"}

    def __len__(self) -> int:
        return len(self._index.starts) - 1

    def __getitem__(self, item: int) -> bytes:
        """A line, with the blank lines after it."""
        starts = self._index.starts
        return self._data[int(starts[item]) : int(starts[item + 1])]

    def number(self, item: int) -> int:
        """The number of an item's line, from 1."""
        return self._index.line(item)

    @cached_property
    def _index(self) -> _Index:
        return _scanned(self._data)

    @cached_property
    def _data(self) -> mmap.mmap | bytes:
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                # An empty file cannot be mapped.
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except OSError as error:
            raise FileError(
                f"{self.path} cannot be read ({error.strerror or error}). Check the path."
            ) from None
        index: _Index | None = vars(self).get("_index")  # from this or another process
        if index is not None and index.starts[-1] != size:
            raise FileError(
                f"{self.path} has {size} bytes but had {index.starts[-1]} when it was indexed. Do "
                f"not change the file while it is in use."
            )
        return data


class _Index(NamedTuple):
    """Where each item's line starts, with the size of the file at the end; for each blank line,
    the number of items before it."""

    starts: IntArray
    blanks: IntArray

    def line(self, item: int) -> int:
        """The line number of an item, from 1: items of lines [a, blank, b] -> 1, 3."""
        return item + 1 + int(np.searchsorted(self.blanks, item, "right"))


def _scanned(data: mmap.mmap | bytes) -> _Index:
    """Find the lines, block by block.

    >>> _scanned(b"1\\n \\n2")
    _Index(starts=array([0, 4, 5]), blanks=array([1]))
    """
    view = np.frombuffer(data, np.uint8)
    starts, blank = [np.zeros(0, np.int64)], [np.zeros(0, np.bool_)]
    for at in range(0, len(view), _BLOCK):
        found = np.flatnonzero(view[at : at + _BLOCK] == _NEWLINE) + at + 1
        found = np.append(0, found) if at == 0 else found
        found = found[found < len(view)]
        first = view[found]
        empty = first == _NEWLINE
        for number in np.flatnonzero((first == 32) | (first == 9) | (first == 13)).tolist():
            end = data.find(b"\n", found[number])
            empty[number] = data[found[number] : end if end >= 0 else len(data)].isspace()
        starts.append(found)
        blank.append(empty)
    empty = np.concatenate(blank)
    items = np.concatenate([*starts, [len(view)]])[np.append(~empty, True)].astype(np.int64)
    return _Index(items, np.cumsum(~empty)[empty])
