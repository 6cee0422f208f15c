"""Standard output: any text in any encoding, and errors when it cannot be written."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from evenstep.errors import FileError


@contextmanager
def any_text() -> Iterator[None]:
    """Replace characters that an encoding lacks by `?`, on standard error by `\\xd7`."""
    streams = ((sys.stdout, "replace"), (sys.stderr, "backslashreplace"))
    before: list[tuple[io.TextIOWrapper, str | None]] = []
    for stream, errors in streams:
        if isinstance(stream, io.TextIOWrapper):
            before.append((stream, stream.errors))
            stream.reconfigure(errors=errors)
    try:
        yield
    finally:
        for changed, errors_before in before:
            changed.reconfigure(errors=errors_before)


@contextmanager
def printing(written: Iterable[Path] = ()) -> Iterator[None]:
    """Print the result in this context; a failure names the files already written."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        silence()
        names = " and ".join(map(str, written))
        raise FileError(
            f"standard output cannot be written ({error.strerror or error})"
            f"{f'; {names} was written completely' if names else ''}. "
            f"Free disk space or redirect the output."
        ) from None


def silence() -> None:
    """Discard the rest of standard output, so that the interpreter does not fail at exit."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (AttributeError, OSError):  # closed, or not a file: nothing to discard
        pass
