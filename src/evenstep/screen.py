"""Terminal output: a console for results and a progress bar on standard error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from evenstep.core.text import printable

_PIPED_WIDTH = 130  # a pipe has no width; wide enough that tables do not wrap


def console() -> Console:
    """A console on standard output, wide enough for our tables."""
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = _PIPED_WIDTH
    return screen


def print_grid(screen: Console, header: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
    """Print a table of figures, none of them cut or wrapped.

    Columns that do not fit are printed below, each time next to the first column, which wraps if
    it is wide.
    """
    left = list(range(1, len(header)))
    while left:
        fits = 1
        while fits < len(left) and _width(screen, header, rows, left[: fits + 1]) <= screen.width:
            fits += 1
        screen.print(_grid(screen, header, rows, left[:fits]))
        left = left[fits:]


def _width(
    screen: Console, header: Sequence[str], rows: Sequence[Sequence[Text]], columns: Sequence[int]
) -> int:
    table = _grid(screen, header, rows, columns)
    return screen.measure(table, options=screen.options.update(width=10_000)).maximum


def _grid(
    screen: Console, header: Sequence[str], rows: Sequence[Sequence[Text]], columns: Sequence[int]
) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold cyan"
    )
    table.add_column(header[0], max_width=max(20, screen.width // 3), overflow="fold")
    for column in columns:
        words = header[column].replace("micro-", "micro- ").split()
        table.add_column("\n".join(words), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row[0], *(row[column] for column in columns if column < len(row)))
    return table


@contextmanager
def progress(what: str, unit: str = "step") -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar if standard error is a terminal; yields `advance(done, total)`.

    The bar pulses until the first call of `advance`. What Evenstep logs appears above it, such as
    that kernels are compiled.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[steps]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(printable(what), total=None, steps="")

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, steps=f"{unit} {done:,} of {total:,}")

        with _logged(bar.console):
            yield advance


@contextmanager
def _logged(console: Console) -> Iterator[None]:
    """Print what Evenstep logs, from INFO on."""
    logger, handler = logging.getLogger("evenstep"), _Printer(console)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


class _Printer(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message of a record."""
        self._console.print(printable(record.getMessage()), markup=False, highlight=False)
