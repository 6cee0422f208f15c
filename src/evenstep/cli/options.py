"""Arguments and options that several commands use."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

Lengths: TypeAlias = Annotated[
    Path,
    typer.Argument(
        help="File with lengths (.npy, .csv, .tsv, .jsonl, .parquet or text), or a saved plan; "
        "- for standard input.",
        metavar="LENGTHS",
        show_default=False,
    ),
]
SavedPlan: TypeAlias = Annotated[
    Path, typer.Argument(help="A saved plan.", metavar="PLAN", show_default=False)
]
CheckedPlan: TypeAlias = Annotated[
    Path,
    typer.Argument(help="A saved plan; - for standard input.", metavar="PLAN", show_default=False),
]
Config: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Read the recipe from a YAML or TOML file.", metavar="FILE", show_default=False
    ),
]
From: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--from",
        help="The system whose file it is: nemo-rl, roll, cosmos-rl, veomni, fast-llm or verl.",
        metavar="SYSTEM",
        show_default=False,
    ),
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
MaxTokens: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Slots per micro-batch, such as 16384 or 16k: --set layout.max_tokens=N.",
        metavar="N",
        show_default=False,
    ),
]
Ranks: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Data-parallel ranks: --set topology.dp=N.", metavar="N", show_default=False),
]
SamplesPerStep: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Samples of a step, over all ranks: --set steps.samples=N.",
        metavar="N",
        show_default=False,
    ),
]
Model: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Cost of this model: a name such as llama-3-8b, or the path of a config.json or its "
        "folder. Default: tokens only.",
        metavar="NAME_OR_PATH",
        show_default=False,
    ),
]
Column: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Column with lengths or lists of token ids. Default: length.",
        metavar="NAME",
        show_default=False,
    ),
]
Groups: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Column of the group ids.", metavar="NAME", show_default=False),
]
Prompts: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Column of the prompt lengths: samples of one group share their prompt (--groups).",
        metavar="NAME",
        show_default=False,
    ),
]
Seed: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="Plan in the order of a stream with this seed. Default: as stored.",
        metavar="N",
        min=0,
        show_default=False,
    ),
]
Epoch: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="Plan in the order of a stream in this epoch, counted from 0. Default: as stored.",
        metavar="N",
        min=0,
        show_default=False,
    ),
]
Out: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="Save the plan to this file.", metavar="FILE", show_default=False),
]
Picture: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Write a picture to this file (.svg, .html or .png).",
        metavar="FILE",
        show_default=False,
    ),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def help_of(command: Callable[..., Any]) -> str:
    """The docstring of a command with each paragraph on one line; terminals wrap it."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
