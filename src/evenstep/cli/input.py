"""What a command reads its samples from: a file, or a pipe that gives its bytes but once."""

from __future__ import annotations

import io
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

from evenstep.errors import FileError


@dataclass(frozen=True, slots=True)
class Input:
    """Something to read from its beginning as often as needed.

    A regular file is opened each time. `kept` holds all of anything else, such as `/dev/stdin`
    or `<(seq 100)`: what was once read of a pipe cannot be read again.
    """

    path: Path
    kept: bytes | None = None

    @classmethod
    def at(cls, path: Path) -> Input:
        """The input at `path`, read where it can be read only once."""
        try:
            regular = stat.S_ISREG(path.stat().st_mode)
            return cls(path, None if regular else path.read_bytes())
        except OSError as error:
            raise FileError(
                f"{path} cannot be read ({error.strerror or error}), so there is nothing to plan. "
                f"Check the path."
            ) from None

    def open(self) -> BinaryIO:
        """Its bytes, from the first one on."""
        return self.path.open("rb") if self.kept is None else io.BytesIO(self.kept)

    def text(self) -> TextIO:
        """Its text, without a byte order mark; lines end as they were written."""
        return io.TextIOWrapper(self.open(), encoding="utf-8-sig", newline="")
