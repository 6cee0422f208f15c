"""Standard output and error: any text in any encoding, and errors when it cannot be written."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import typer

from evenstep.errors import FileError

_CLOSED_PIPE = 141  # what shells report for SIGPIPE


@contextmanager
def any_text() -> Iterator[None]:
    """Replace characters that an encoding lacks by `?`, on standard error by `\\xd7`. A stream that
    is closed, or whose reader has ended, takes nothing."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # `print(file=None)` would write to the other one
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123
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
            try:
                changed.reconfigure(errors=errors_before)  # flushes
            except OSError:
                silence(changed)


@contextmanager
def printing(written: Iterable[Path] = ()) -> Iterator[None]:
    """Print the result in this context; a failure names the files already written. If the reader
    has ended, as in `evenstep ... | head`, the command ends quietly."""
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # which rich makes of it
        silence(sys.stdout)
        raise typer.Exit(_CLOSED_PIPE) from None
    except OSError as error:
        silence(sys.stdout)
        names = " and ".join(map(str, written))
        raise FileError(
            f"standard output cannot be written ({error.strerror or error})"
            f"{f'; {names} was written completely' if names else ''}. "
            f"Free disk space or redirect the output."
        ) from None


def say(text: str) -> None:
    """Print a line on standard error, if it can be written."""
    with suppress(OSError):
        print(text, file=sys.stderr)


def silence(stream: TextIO) -> None:
    """Discard the rest of a stream, so that the interpreter does not fail at exit."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except OSError:  # not a file: nothing to discard
        pass
