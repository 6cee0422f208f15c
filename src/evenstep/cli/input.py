"""Input of a command: a file, or a pipe that can be read only once."""

from __future__ import annotations

import io
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

from evenstep.errors import FileError


@dataclass(frozen=True, slots=True)
class Input:
    """An input that can be read from the beginning several times.

    A regular file is opened each time. The content of anything else, such as `/dev/stdin` or
    `<(seq 100)`, is kept in `kept`, because a pipe can be read only once.
    """

    path: Path
    kept: bytes | None = None

    @classmethod
    def at(cls, path: Path) -> Input:
        """The input at `path`; a pipe is read at once."""
        try:
            regular = stat.S_ISREG(path.stat().st_mode)
            return cls(path, None if regular else path.read_bytes())
        except OSError as error:
            raise FileError(
                f"{path} cannot be read ({error.strerror or error}). Check the path."
            ) from None

    def open(self) -> BinaryIO:
        """Open it as bytes, from the beginning."""
        return self.path.open("rb") if self.kept is None else io.BytesIO(self.kept)

    def text(self) -> TextIO:
        """Open it as text, without a byte order mark; line ends are kept."""
        return io.TextIOWrapper(self.open(), encoding="utf-8-sig", newline="")
