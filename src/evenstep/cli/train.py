"""`evenstep train`: train a model as a configuration says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from evenstep.cli import options, terminal

File: TypeAlias = Annotated[
    Path,
    typer.Argument(
        help="A configuration file, YAML or TOML.", metavar="CONFIG", show_default=False
    ),
]
Steps: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="Steps of the whole run: --set stream.max_num_steps=N.",
        metavar="N",
        min=1,
        show_default=False,
    ),
]


DryRun: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Tokenize, plan and estimate the memory for --set topology.dp=N ranks, then stop.",
    ),
]


def train(
    config: File,
    set_: options.Set = None,
    steps: Steps = None,
    dry_run: DryRun = False,
    json: options.Json = False,
) -> int:
    """Train a model; continue if the folder has a checkpoint.

    In several processes: torchrun --nproc-per-node N -m evenstep train CONFIG. SIGINT and SIGTERM
    save a checkpoint and end the run with exit code 0.
    """
    from dataclasses import asdict

    from evenstep.cli import output
    from evenstep.cli.overrides import overrides_of
    from evenstep.config import load_settings
    from evenstep.core.recipe import World
    from evenstep.lazy import need

    need("torch", extra="cli,torch", package="evenstep train")
    given = [] if steps is None else [f"stream.max_num_steps={steps}"]
    overrides = [*overrides_of(set_), *given]
    settings = load_settings(config, overrides)
    from evenstep.trainer.job import job_of

    # All that is missing, before anything is imported or read.
    job = job_of(settings, str(config), settings.recipe.topology.dp if dry_run else None)
    if dry_run:
        from evenstep.cli.dry_run import preview

        figures = preview(job)
        with terminal.printing():
            if json:
                output.print_json(figures)
            else:
                output.print_figures(figures, f"{config}, not trained")
        return 0
    from evenstep.trainer.run import train as run

    ended = run(settings)
    if World.detect().rank:
        return 0
    with terminal.printing():
        if json:
            output.print_json(asdict(ended))
        else:
            output.print_outcome(ended, settings.trainer.out or "")
    return 0
