"""Files of a source: paths and patterns -> a list of files, and a digest of what they hold."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from evenstep.errors import ConfigError, FileError, InputError

PathLike: TypeAlias = str | os.PathLike[str]
Paths: TypeAlias = PathLike | Sequence[PathLike]
"""A path, a pattern such as `"data/*.jsonl"` (`**` matches folders), or a list of either."""

_BLOCK, _BLOCKS = 1 << 16, 64
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_COMPRESSED = (".bz2", ".gz", ".lz4", ".xz", ".zip", ".zst")


def files_of(paths: Paths) -> list[Path]:
    """The files that `paths` name: a list in its own order, the matches of a pattern sorted.

    A path that exists is taken as it is, even if it looks like a pattern.
    """
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not several:
        raise ConfigError("expected at least one file, got an empty list. Pass paths or a pattern.")
    found: list[Path] = []
    for given in several:
        matched = matches(given)
        if not matched:
            raise ConfigError(
                f"no file matches {os.fspath(given)!r}. Check the pattern and the current folder."
            )
        found += matched
    for path in found:
        refuse_compressed(path)
    return found


def refuse_empty(source: Any) -> None:
    """Raise if a source of files, or a wrapper of one, has no samples: a stream of it would end
    without a step. No samples in memory are no steps."""
    files = source
    while not hasattr(files, "paths"):  # Mapped has a dataset, MeasuredMapped a Mapped
        inner = vars(files) if hasattr(files, "__dict__") else {}
        files = inner.get("dataset", inner.get("_source"))
        if files is None:
            return
    paths = files.paths
    if not paths or len(source):
        return
    count = len(paths) - 1
    more = f" and {count} more {'file' if count == 1 else 'files'}" if count else ""
    raise InputError(f"no samples in {paths[0]}{more}. Check the files.")


def refuse_compressed(path: Path) -> None:
    """Raise if a file is compressed."""
    if path.suffix.lower() in _COMPRESSED:
        raise FileError(
            f"{path}: {path.suffix} files are not supported yet. Decompress it, and name the "
            f"result."
        )


def matches(given: PathLike) -> list[Path]:
    """The matches of a pattern, sorted; a path that exists or is no pattern as it is."""
    path, text = Path(given), os.fspath(given)
    if _URL.match(text):
        raise ConfigError(
            f"{text}: {text.partition(':')[0]}:// paths are not supported yet. Download the files, "
            f"and name the local ones."
        )
    if not glob.has_magic(text) or path.exists():
        return [path]
    # Path.glob takes no absolute patterns.
    return [Path(each) for each in sorted(glob.glob(text, recursive=True))]  # noqa: PTH207


def files_digest(paths: Sequence[Path]) -> bytes:
    """A digest of sizes and contents in order; names and dates do not matter.

    Reads 64 blocks of 64 KiB, evenly spread over all files, and at least the first and the last
    block of each. So files of 4 MiB together are covered completely, and an edit inside a larger
    one may go unnoticed unless it changes the size.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(b" %d " % size)
                for start in _starts(size, max(2, _BLOCKS // len(paths))):
                    file.seek(start)
                    digest.update(file.read(_BLOCK))
        except OSError as error:
            raise FileError(
                f"{path} cannot be read ({error.strerror or error}). Check the path."
            ) from None
    return digest.digest()


def _starts(size: int, blocks: int) -> list[int]:
    """Where so many blocks of a file start; those of the whole file if it is small.

    >>> _starts(3 * 65536 + 1, 8), _starts(1 << 20, 3)
    ([0, 65536, 131072, 196608], [0, 491520, 983040])
    """
    if size <= blocks * _BLOCK:
        return list(range(0, size, _BLOCK))
    found: list[int] = np.linspace(0, size - _BLOCK, blocks).astype(np.int64).tolist()
    return found
