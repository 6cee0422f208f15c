"""What a command is asked to write: refused early where it cannot be, written late and whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from evenstep.errors import FileError

PICTURES = (".svg", ".html")


def refuse_unwritable(source: Path, *targets: Path | None) -> None:
    """Say before the work, not after it, that a file cannot be written or would be lost."""
    seen: set[Path] = {source.resolve()}
    for target in targets:
        if target is None:
            continue
        if target.resolve() in seen:
            raise FileError(
                f"{target} is named twice, so one file would overwrite another. "
                f"Give every output a name of its own."
            )
        seen.add(target.resolve())
        if target.is_dir():
            raise FileError(
                f"{target} is a folder, so nothing can be saved under that name. Name a file in it."
            )
        if not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
            raise FileError(
                f"{target} cannot be written because {target.parent} is no writable folder, so "
                f"nothing was done. Create it or choose another."
            )


def refuse_unknown_picture(path: Path | None) -> None:
    """A picture is an SVG or a page; the suffix says which."""
    if path is not None and path.suffix.lower() not in PICTURES:
        raise FileError(
            f"{path} ends in {path.suffix or 'nothing'!r}, which is no kind of picture here, so "
            f"nothing was drawn. End it in .svg or .html."
        )


def write_picture(path: Path, svg: Callable[[], str], html: Callable[[], str]) -> None:
    """Draw in the format that the suffix asks for, and put the file there in one move."""
    from evenstep.core.archive import replace_file

    text = svg() if path.suffix.lower() == ".svg" else html()
    replace_file(path, text.encode())
