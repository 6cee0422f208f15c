"""What standard output takes: any text, in any encoding, until it is full."""

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
    """Print what the encoding of a stream lacks as `?`, and as `\\xd7` among errors."""
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
    """Print the result inside; where that fails, say so and which files were written before."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        silence()
        names = " and ".join(map(str, written))
        raise FileError(
            f"standard output cannot be written ({error.strerror or error}), so what it was to "
            f"show is lost{f'; {names} was written and is whole' if names else ''}. "
            f"Free some space or send it elsewhere."
        ) from None


def silence() -> None:
    """Send what is left in standard output nowhere, so that Python's end does not fail on it."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (AttributeError, OSError):  # closed, or no file: nothing is left in it
        pass
