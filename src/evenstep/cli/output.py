"""Print results as tables or JSON on standard output, and remarks on standard error."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from evenstep.cli.terminal import say
from evenstep.core.text import printable
from evenstep.report.comparison import HEADER, LEGEND, MUCH, Entry, cells, closing
from evenstep.report.numbers import times
from evenstep.report.tables import cost_line, sections, step_table
from evenstep.screen import console, print_grid

if TYPE_CHECKING:
    from evenstep.core.plan import Plan
    from evenstep.report import Report
    from evenstep.trainer.run import Outcome

_MOST_STEPS = 50


def remark(text: str) -> None:
    """Print a remark on standard error, such as the name of a written file."""
    say(printable(text))


def print_json(data: Any) -> None:
    """Print JSON; numbers keep all their digits."""
    print(json.dumps(data, indent=2, allow_nan=False))


def print_stats(plan: Plan, stats: Mapping[str, Any], title: str) -> None:
    """Print the stats of one plan and its bottleneck."""
    table = Table(title=_title(title), title_justify="left", box=None, pad_edge=False)
    for name, style in (("label", ""), ("value", "bold"), ("note", "dim")):
        table.add_column(
            name,
            style=style,
            justify="right" if name == "value" else "left",
            no_wrap=name == "value",
            overflow="fold",
        )
    table.show_header = False
    for section in sections(stats, plan.recipe):
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
    """Print one row per strategy and what they show; the best of a column is highlighted."""
    screen = console()
    screen.print(_title(title))
    rows, faults = [], []
    for entry, row in zip(entries, cells(entries), strict=True):
        figures = [Text(cell.text, "bold green" if cell.best else "") for cell in row]
        rows.append([Text(entry.name), *(figures or [Text("no plan", "red")])])
        faults += [] if row else [entry]
    print_grid(screen, ["strategy", *HEADER], rows)
    plans = [entry.plan for entry in entries if entry.plan is not None]
    screen.print(Text(cost_line(plans), "dim"))
    screen.print(Text(LEGEND, "dim"))
    for entry in faults:
        screen.print(Text.assemble((f"{entry.name}: ", "bold red"), entry.fault))
    said = closing({entry.name: entry.parts for entry in entries if entry.plan is not None})
    if said:
        screen.print()
        screen.print(Text(said, "bold"))


def print_steps(steps: Sequence[Mapping[str, Any]]) -> None:
    """Print one line per step, at most the first fifty."""
    header, rows = step_table(steps[:_MOST_STEPS])
    screen = console()
    print_grid(screen, header, [[Text(cell) for cell in row] for row in rows])
    if len(steps) > _MOST_STEPS:
        screen.print(
            f"Shows the first {_MOST_STEPS} of {len(steps):,} steps; --json prints all of them."
        )


def print_advice(report: Report) -> None:
    """Print what a report says in words."""
    screen = console()
    screen.print(_title(report.title))
    saving = report.saving
    if saving is not None and saving.times_less_time > MUCH:
        screen.print(f"{saving.times_less_time:.2f}× less time than {saving.than}.")
    for each in report.advice:
        screen.print(Text(f"- {each.text}"))


def print_outcome(ended: Outcome, out: str) -> None:
    """Print how a training run ended."""
    if ended.loss is None and not ended.stopped:
        print(f"nothing to do: {times(ended.steps, 'step')} were done before: {out}")
        return
    state = "stopped" if ended.stopped else "done"
    loss = "" if ended.loss is None else f", loss {ended.loss:.4f}"
    overhead = "" if ended.overhead is None else f", overhead {ended.overhead:.1%}"
    skipped = f", {ended.skipped} skipped" if ended.skipped else ""
    if ended.validation is not None and ended.best is not None:
        step, best = ended.best
        loss += f", validation {ended.validation:.4f} (best {best:.4f} after step {step})"
    steps = times(ended.steps, "step") + skipped
    print(f"{state} after {steps}{loss}, {ended.seconds:.0f} s{overhead}: {out}")


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
