"""Results of a benchmark: tables and targets for a terminal, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

Cell: TypeAlias = str | int | float | None

MET, MISSED = "met", "missed"
_COLOURS = {MET: "green", MISSED: "bold red"}  # by the last word of a cell


def verdict(met: bool) -> str:
    """The word for a target: met or missed."""
    return MET if met else MISSED


@dataclass(frozen=True, slots=True)
class Target:
    """A target, the measured figure, and whether the target is met."""

    promise: str
    figure: str
    met: bool


@dataclass(slots=True)
class Table:
    """Rows under named columns; `columns` gives each its number format, "" for text."""

    title: str
    columns: dict[str, str]
    rows: list[tuple[Cell, ...]] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        """Append a row."""
        assert len(cells) == len(self.columns), f"{len(cells)} cells for {list(self.columns)}"
        self.rows.append(cells)

    def text(self) -> list[list[str]]:
        """The rows as formatted text."""
        return [
            [
                "" if cell is None else cell if isinstance(cell, str) else format(cell, spec)
                for cell, spec in zip(row, self.columns.values(), strict=True)
            ]
            for row in self.rows
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, numbers unrounded."""
        return {
            "title": self.title,
            "rows": [dict(zip(self.columns, row, strict=True)) for row in self.rows],
        }


@dataclass(slots=True)
class Section:
    """One part of a benchmark."""

    title: str
    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "title": self.title,
            "notes": self.notes,
            "targets": [
                {"promise": t.promise, "figure": t.figure, "met": t.met} for t in self.targets
            ],
            "tables": [table.to_dict() for table in self.tables],
        }


def target_table(targets: Sequence[Target], title: str = "Targets") -> Table:
    """The targets as a table."""
    table = Table(title, {"target": "", "measured": "", "": ""})
    for target in targets:
        table.add(target.promise, target.figure, verdict(target.met))
    return table


def show(section: Section, console: Console) -> None:
    """Print a section."""
    for table in [*section.tables, target_table(section.targets)]:
        if table.rows:
            console.print(_rich(table))
    for note in section.notes:
        console.print(f"[dim]{escape(note)}[/dim]", highlight=False)
    console.print()


def markdown(section: Section) -> str:
    """A section as Markdown."""
    parts = [f"## {section.title}", *section.notes]
    if section.targets:
        parts.append(markdown_table(target_table(section.targets)))
    for table in section.tables:
        parts.append(f"### {table.title}\n\n{markdown_table(table)}")
    return "\n\n".join(parts)


def markdown_table(table: Table) -> str:
    """A table as Markdown."""
    numeric = [bool(spec) for spec in table.columns.values()]
    lines = [
        list(table.columns),
        ["---:" if right else "---" for right in numeric],
        *([_emphasised(cell) for cell in row] for row in table.text()),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _emphasised(cell: str) -> str:
    return f"**{cell}**" if cell.endswith(MISSED) else cell.replace("|", "\\|")


def _rich(table: Table) -> RichTable:
    rendered = RichTable(title=table.title, title_justify="left", title_style="bold")
    for name, spec in table.columns.items():
        rendered.add_column(name, justify="right" if spec else "left")
    for row in table.text():
        rendered.add_row(*map(_coloured, row))
    return rendered


def _coloured(cell: str) -> str:
    colour = _COLOURS.get(cell.rpartition(" ")[2])
    return f"[{colour}]{escape(cell)}[/]" if colour else escape(cell)
