"""The arguments and options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Lengths: TypeAlias = Annotated[
    Path,
    typer.Argument(
        help="Lengths as .npy, .csv, .jsonl, .parquet or text, or a saved plan.",
        metavar="LENGTHS",
        show_default=False,
    ),
]
SavedPlan: TypeAlias = Annotated[
    Path, typer.Argument(help="A saved plan.", metavar="PLAN", show_default=False)
]
Config: TypeAlias = Annotated[
    Path | None, typer.Option(help="A recipe in YAML.", metavar="FILE", show_default=False)
]
Set: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Set one key of the recipe, such as layout.max_tokens=8192. Repeatable.",
        metavar="KEY=VALUE",
        show_default=False,
    ),
]
Column: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="The column that holds the lengths. Without it: length.",
        metavar="NAME",
        show_default=False,
    ),
]
Groups: TypeAlias = Annotated[
    str | None,
    typer.Option(help="The column that holds group ids.", metavar="NAME", show_default=False),
]
Out: TypeAlias = Annotated[
    Path | None, typer.Option(help="Save the plan here.", metavar="FILE", show_default=False)
]
Picture: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="Draw it here, as .svg or .html.", metavar="FILE", show_default=False),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
