"""What a command is asked to write: refused early where it cannot be, written late and whole."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from evenstep.errors import FileError

PICTURES = (".svg", ".html")


def refuse_unwritable(inputs: Sequence[Path | None], *targets: Path | None) -> None:
    """Say before the work, not after it, that a file cannot be written or would be lost."""
    seen = [path for path in inputs if path is not None]
    for target in targets:
        if target is None:
            continue
        if any(_same(target, other) for other in seen):
            raise FileError(
                f"{target} is named twice, so one file would overwrite another. "
                f"Give every output a name of its own."
            )
        seen.append(target)
        _refuse_special(target)
        folder = Path(os.path.realpath(target)).parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise FileError(
                f"{target} cannot be written because {folder} is no writable folder, so "
                f"nothing was done. Create it or choose another."
            )


def _same(one: Path, other: Path) -> bool:
    """Whether both name one file, by a link or another spelling, there or yet to be written."""
    try:
        return os.path.samefile(one, other)  # noqa: PTH121 - also of names that are too long
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def _refuse_special(target: Path) -> None:
    """A file put in the place of a pipe or a device would end it; a folder cannot be replaced."""
    try:
        status = target.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise FileError(
            f"{target} cannot be written ({error.strerror or error}), so nothing was done. "
            f"Choose another name."
        ) from None
    if stat.S_ISDIR(status.st_mode):
        raise FileError(
            f"{target} is a folder, so nothing can be saved under that name. Name a file in it."
        )
    if not stat.S_ISREG(status.st_mode) or _is_standard_output(status):
        raise FileError(
            f"{target} is a pipe, a device or standard output, and a file in its place would end "
            f"it, so nothing was done. Name a regular file."
        )


def _is_standard_output(status: os.stat_result) -> bool:
    try:
        return os.path.samestat(status, os.fstat(1))
    except OSError:  # closed
        return False


def refuse_unknown_picture(path: Path | None) -> None:
    """A picture is an SVG or a page; the suffix says which."""
    if path is not None and path.suffix.lower() not in PICTURES:
        raise FileError(
            f"{path} ends in {path.suffix or 'nothing'!r}, which is no kind of picture here, so "
            f"nothing was drawn. End it in .svg or .html."
        )


def picture(path: Path, svg: Callable[[], str], html: Callable[[], str]) -> bytes:
    """A drawing in the format that the suffix asks for."""
    return (svg() if path.suffix.lower() == ".svg" else html()).encode()
