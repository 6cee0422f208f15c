"""Input of a command: a file, or a pipe that can be read only once."""

from __future__ import annotations

import io
import re
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

from evenstep.core.plan_file import reading
from evenstep.errors import FileError

STANDARD = Path("-")
_STARTS = {b"\x93NUMPY": ".npy", b"PAR1": ".parquet"}


def called(path: Path) -> str:
    """What tables and messages call an input.

    >>> called(Path("runs/lengths.npy")), called(Path("-"))
    ('lengths.npy', 'standard input')
    """
    return "standard input" if path == STANDARD else path.name


@dataclass(frozen=True, slots=True)
class Input:
    """An input that can be read from the beginning several times.

    A regular file is opened each time. The content of anything else, such as `-` (standard input)
    or `<(seq 100)`, is kept in `kept`, because a pipe can be read only once.
    """

    path: Path
    kept: bytes | None = None

    @classmethod
    def at(cls, path: Path) -> Input:
        """The input at `path`; a pipe is read at once."""
        with reading(path):
            if path == STANDARD:
                return cls(Path(called(path)), standard_input())
            regular = stat.S_ISREG(path.stat().st_mode)
            return cls(path, None if regular else path.read_bytes())

    @property
    def suffix(self) -> str:
        """The suffix that tells the format; that of standard input is told by its beginning."""
        if self.kept is None or self.path != Path(called(STANDARD)):
            return self.path.suffix.lower()
        return _suffix_of(self.kept)

    def open(self) -> BinaryIO:
        """Open it as bytes, from the beginning."""
        return self.path.open("rb") if self.kept is None else io.BytesIO(self.kept)

    def text(self) -> TextIO:
        """Open it as text, without a byte order mark; line ends are kept."""
        return io.TextIOWrapper(self.open(), encoding="utf-8-sig", newline="")


def standard_input() -> bytes:
    """All of standard input."""
    if sys.stdin is None or sys.stdin.closed:
        raise FileError("standard input is closed. Pipe into it, or name a file.")
    return sys.stdin.buffer.read()


def _suffix_of(content: bytes) -> str:
    """The suffix that a file with this content would have; "" for text.

    >>> _suffix_of(b'{"length": 5}'), _suffix_of(b"length,group\\n5,a"), _suffix_of(b"5 3 8")
    ('.jsonl', '.csv', '')
    """
    for start, suffix in _STARTS.items():
        if content.startswith(start):
            return suffix
    text = content.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"{"):
        return ".jsonl"
    line = text.partition(b"\n")[0]
    named = re.match(rb"[A-Za-z_\"]", line) is not None
    return (".tsv" if b"\t" in line else ".csv") if named else ""
