"""Print results as tables or JSON on standard output, and remarks on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenstep.core.glimpse import printable
from evenstep.report.comparison import HEADER, LEGEND, Entry, cells
from evenstep.report.tables import cost_line, sections, step_table
from evenstep.screen import console

if TYPE_CHECKING:
    from evenstep.trainer.outcome import Outcome

_MOST_STEPS = 50


def print_whole(screen: Console, table: Table) -> None:
    """Print a table without truncating figures; a narrow terminal wraps its lines."""
    roomy = screen.options.update(width=1000)
    if screen.measure(table, options=roomy).maximum > screen.width:
        table.padding = 0
    screen.width = max(screen.width, screen.measure(table, options=roomy).maximum)
    screen.print(table)


def remark(text: str) -> None:
    """Print a remark on standard error, such as the name of a written file."""
    print(printable(text), file=sys.stderr)


def print_json(data: Any) -> None:
    """Print JSON; numbers keep all their digits."""
    print(json.dumps(data, indent=2, allow_nan=False))


def print_stats(stats: Mapping[str, Any], title: str) -> None:
    """Print the stats of one plan and its bottleneck."""
    table = Table(title=_title(title), title_justify="left", box=None, pad_edge=False)
    for name, style in (("label", ""), ("value", "bold"), ("note", "dim")):
        table.add_column(name, style=style, justify="right" if name == "value" else "left")
    table.show_header = False
    for section in sections(stats):
        table.add_row()
        table.add_row(Text(section.title, style="bold cyan"))
        for row in section.rows:
            table.add_row(Text(f"  {row.label}"), Text(row.value), Text(row.note))
    screen = console()
    screen.print(table)
    if stats["bottleneck"]:
        screen.print()
        screen.print(Text.assemble(("bottleneck: ", "bold red"), str(stats["bottleneck"])))


def _title(text: str) -> Text:
    """A title without markup: a file may be named `[red].txt`."""
    return Text(printable(text), "bold")


def print_comparison(entries: Sequence[Entry], title: str) -> None:
    """Print one row per strategy; the best figure of a column is highlighted."""
    table = Table(
        title=_title(title),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        header_style="bold cyan",
    )
    plans = [entry.plan for entry in entries if entry.plan is not None]
    table.caption = f"{cost_line(plans)}\n{LEGEND}"
    table.add_column("strategy", no_wrap=True)
    for name in HEADER:
        words = name.replace("micro-", "micro- ").split()
        table.add_column("\n".join(words), justify="right")
    faults = []
    for entry, row in zip(entries, cells(entries), strict=True):
        if row:
            figures = [Text(cell.text, "bold green" if cell.best else "") for cell in row]
            table.add_row(Text(entry.name), *figures)
        else:
            table.add_row(Text(entry.name), Text("no plan", "red"))
            faults.append(entry)
    screen = console()
    print_whole(screen, table)
    for entry in faults:
        screen.print(Text.assemble((f"{entry.name}: ", "bold red"), entry.fault))


def print_steps(steps: Sequence[Mapping[str, Any]]) -> None:
    """Print one line per step, at most the first fifty."""
    header, rows = step_table(steps[:_MOST_STEPS])
    table = Table(box=None, pad_edge=False, header_style="bold cyan")
    for name in header:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    screen = console()
    screen.print()
    screen.print(table)
    if len(steps) > _MOST_STEPS:
        screen.print(
            f"Shows the first {_MOST_STEPS} of {len(steps):,} steps; --json prints all of them."
        )


def print_outcome(ended: Outcome, out: str) -> None:
    """Print how a training run ended."""
    state = "stopped" if ended.stopped else "done"
    loss = "" if ended.loss is None else f", loss {ended.loss:.4f}"
    overhead = "" if ended.overhead is None else f", overhead {ended.overhead:.1%}"
    print(f"{state} after {ended.steps:,} steps{loss}, {ended.seconds:.0f} s{overhead}: {out}")


def print_figures(figures: Mapping[str, int | float], title: str) -> None:
    """Print one figure per line."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("label")
    table.add_column("value", style="bold", justify="right")
    for name, figure in figures.items():
        value = f"{figure:,.1f}" if figure % 1 else f"{figure:,.0f}"
        table.add_row(Text(f"  {name.replace('_', ' ')}"), value)
    screen = console()
    screen.print(_title(title))
    screen.print(table)


def print_checks(found: Mapping[str, Sequence[str]], invariants: Mapping[str, str]) -> None:
    """Print one line per invariant: ok, broken with its violations, or skipped."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, invariant in invariants.items():
        if name not in found:
            table.add_row(
                Text("skipped", "yellow"), name, Text("because of the violation above", "dim")
            )
        elif found[name]:
            table.add_row(Text("broken", "bold red"), name, Text("; ".join(found[name])))
        else:
            table.add_row(Text("ok", "green"), name, Text(invariant, "dim"))
    console().print(table)
