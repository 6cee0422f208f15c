"""Folders of a run: what they hold, so that damage is noticed, and who uses them."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import warnings
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TypeAlias

from evenstep.core.plan_file import replace_file
from evenstep.errors import FileError

Checksum: TypeAlias = tuple[int, int]
"""The size and the CRC-32 of a file."""

_CHUNK = 2**24  # bytes read at a time


class DamagedError(FileError):
    """A folder is not what was written."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What belongs to a folder, and its files; a JSON file of it has a checksum of its own."""

    values: dict[str, Any]
    files: dict[str, Checksum]

    def save(self, path: Path) -> None:
        """Write it into the folder."""
        values = {**self.values, "files": dict(sorted(self.files.items()))}
        text = json.dumps({**values, "checksum": _digest(values)})
        replace_file(path, text.encode())

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Read it; a `DamagedError` unless it is what was written."""
        try:
            values = json.loads(path.read_bytes())
            if isinstance(values, dict) and not {"checksum", "files"} & values.keys():
                raise FileError(
                    f"{path.parent} is of an earlier version, whose checkpoints have no checksums. "
                    f"Continue with that version, or set trainer.out to another folder."
                )
            if values.pop("checksum") != _digest(values):
                raise ValueError("its checksum differs")
            files = {name: (int(size), int(crc)) for name, (size, crc) in values["files"].items()}
        except OSError as error:
            raise damaged(path.parent, f"{path.name}: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise damaged(path.parent, f"{path.name} is not what was written") from None
        del values["files"]
        return cls(values, files)

    def check(self, folder: Path, names: Iterable[str]) -> None:
        """Compare these files with what was written; a `DamagedError` if they differ."""
        for name in names:
            size, path = self.files[name][0], folder / name
            if not path.is_file():
                raise damaged(folder, f"{name} is missing")
            if path.stat().st_size != size:
                raise damaged(
                    folder, f"{name} has {path.stat().st_size:,} bytes, expected {size:,}"
                )
            if checksum(path) != self.files[name]:
                raise damaged(folder, f"{name} does not match its checksum")


def checksum(path: Path) -> Checksum:
    """The size and the CRC-32 of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def damaged(folder: Path, why: str) -> DamagedError:
    """The error of a folder that is damaged."""
    return DamagedError(f"{folder} is damaged ({why})")


def _digest(values: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


# Folders in use -----------------------------------------------------------------------------------


def lock_file(path: Path) -> IO[str]:
    """The file, locked until it is closed or the process ends; it says who holds it."""
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise FileError(
            f"{path.parent} is in use by {holder}. Stop that run, or set trainer.out to another "
            f"folder."
        ) from None
    except OSError as error:  # a file system without locks
        warnings.warn(
            f"{path.parent} cannot be locked ({error.strerror or error}): make sure that no other "
            f"run uses it",
            stacklevel=2,
        )
    file.truncate(0)
    since = datetime.now(UTC).isoformat(" ", "seconds")
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
    file.flush()
    return file
