"""`evenstep report`: the stats of a saved plan, or a page about a plan or a training run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from evenstep.cli import files, options, terminal

if TYPE_CHECKING:
    from evenstep.report import Report

RunOrPlan: TypeAlias = Annotated[
    Path,
    typer.Argument(
        help="A saved plan, or the folder of a training run.",
        metavar="PLAN_OR_RUN",
        show_default=False,
    ),
]
Page: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Write a page with everything: lengths, plan, strategies, times, advice (.html).",
        metavar="FILE",
        show_default=False,
    ),
]


def report(
    plan: RunOrPlan,
    out: Page = None,
    picture: options.Picture = None,
    json: options.Json = False,
) -> None:
    """Show padding and balance of a saved plan, in total and per step; --out writes a page about a
    plan or a training run."""
    from evenstep.errors import FileError

    files.refuse_unknown_picture(picture)
    if out is not None and out.suffix.lower() != ".html":
        raise FileError(f"{out} has the suffix {out.suffix!r}, expected .html. Rename the page.")
    files.refuse_unwritable([plan], out, picture)
    folder = plan.is_dir()
    if folder and picture is not None:
        raise FileError(f"{plan} is a folder, and --picture draws a saved plan. Use --out.")
    if folder and out is None and not json:
        raise FileError(f"{plan} is a folder. Name the page to write: --out report.html.")
    if out is None and not folder:
        _tables(plan, picture, json)
        return
    _page(plan, out, picture, json)


def _page(path: Path, out: Path | None, picture: Path | None, json: bool) -> None:
    from evenstep.cli import output
    from evenstep.cli.whole_report import of_plan, of_run
    from evenstep.core.plan_file import replace_files
    from evenstep.report import plan_picture, report_page

    made: Report = of_run(path) if path.is_dir() else of_plan(path)
    contents: dict[Path, bytes] = {}
    if out is not None:
        contents[out] = report_page(made).encode()
    if picture is not None:
        contents[picture] = files.picture(
            picture,
            lambda: plan_picture(made.plan, made.title),
            lambda: report_page(made),
        )
    replace_files(contents)
    with terminal.printing(contents):
        if json:
            output.print_json(made.numbers())
        else:
            output.print_advice(made)
    for each in contents:
        output.remark(f"wrote {each}")


def _tables(path: Path, picture: Path | None, json: bool) -> None:
    from evenstep.cli import output
    from evenstep.cli.plan import summary
    from evenstep.core.checks import assert_valid
    from evenstep.core.plan import Plan
    from evenstep.core.plan_file import replace_file
    from evenstep.report import plan_page, plan_picture
    from evenstep.screen import progress

    with progress(f"Reading {path.name}"):
        made = Plan.load(path)
        assert_valid(made)
    with progress(f"Measuring {path.name}") as advance:
        stats, steps = made.stats(progress=advance), made.step_stats()
    title = f"Report on {path.name}"
    if picture is not None:
        drawn = files.picture(
            picture, lambda: plan_picture(made, title), lambda: plan_page(made, title)
        )
        replace_file(picture, drawn)
    with terminal.printing([picture] if picture else []):
        if json:
            output.print_json({**summary(made, stats), "steps": steps})
        else:
            output.print_stats(made, stats, title)
            output.print_steps(steps)
    if picture is not None:
        output.remark(f"wrote {picture}")
