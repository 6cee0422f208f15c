"""Output files of a command: checked before any work, written at the end."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from evenstep.errors import FileError

PICTURES = (".svg", ".html", ".png")


def refuse_unwritable(inputs: Sequence[Path | None], *targets: Path | None) -> None:
    """Refuse outputs that cannot be written, or that would overwrite an input or each other."""
    seen = [path for path in inputs if path is not None]
    for target in targets:
        if target is None:
            continue
        if any(_same(target, other) for other in seen):
            raise FileError(
                f"{target} is named twice. Use a different name for each output and input."
            )
        seen.append(target)
        _refuse_special(target)
        folder = Path(os.path.realpath(target)).parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise FileError(
                f"{target} cannot be written: {folder} is not a writable folder. "
                f"Create it or choose another."
            )


def of_model(model: str | None) -> list[Path]:
    """The files that `--model` may name."""
    return [] if model is None else [Path(model), Path(model, "config.json")]


def _same(one: Path, other: Path) -> bool:
    """Whether both paths name one file, existing or not, possibly through a link."""
    try:
        return os.path.samefile(one, other)  # noqa: PTH121 - also takes names that are too long
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def _refuse_special(target: Path) -> None:
    """Refuse pipes and devices, which a new file would replace, and folders."""
    if str(target) == "-":
        raise FileError("- cannot be written: expected a regular file. Choose another name.")
    try:
        status = target.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise FileError(
            f"{target} cannot be written ({error.strerror or error}). Choose another name."
        ) from None
    if stat.S_ISDIR(status.st_mode):
        raise FileError(f"{target} is a folder, expected a file. Name a file in it.")
    if not stat.S_ISREG(status.st_mode) or _is_standard_output(status):
        raise FileError(
            f"{target} is a pipe, a device or standard output, expected a regular file. "
            f"Choose another name."
        )


def _is_standard_output(status: os.stat_result) -> bool:
    try:
        return os.path.samestat(status, os.fstat(1))
    except OSError:  # closed
        return False


def refuse_unknown_picture(path: Path | None) -> None:
    """Refuse a picture whose suffix is not known, or that needs what is not installed."""
    if path is None:
        return
    if path.suffix.lower() not in PICTURES:
        raise FileError(
            f"{path} has the suffix {path.suffix!r}, expected .svg, .html or .png. Rename the "
            f"picture."
        )
    if path.suffix.lower() == ".png" and find_spec("PIL") is None:
        raise FileError(
            f"Writing {path} needs Pillow, which is not installed. Install it with: pip install "
            f"'evenstep[png]', or write .svg or .html."
        )


def picture(path: Path, svg: Callable[[], str], html: Callable[[], str]) -> bytes:
    """The picture in the format of the suffix."""
    suffix = path.suffix.lower()
    if suffix == ".png":
        from evenstep.report.png import png_of

        return png_of(svg())
    return (svg() if suffix == ".svg" else html()).encode()
