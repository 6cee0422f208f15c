"""`evenstep plan`: plan lengths with a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenstep.cli import files, options, terminal

if TYPE_CHECKING:
    from evenstep.core.plan import Plan


def plan(
    lengths: options.Lengths,
    config: options.Config = None,
    from_: options.From = None,
    set_: options.Set = None,
    max_tokens: options.MaxTokens = None,
    ranks: options.Ranks = None,
    samples_per_step: options.SamplesPerStep = None,
    model: options.Model = None,
    column: options.Column = None,
    groups: options.Groups = None,
    prompts: options.Prompts = None,
    seed: options.Seed = None,
    epoch: options.Epoch = None,
    out: options.Out = None,
    picture: options.Picture = None,
    json: options.Json = False,
) -> None:
    """Plan training steps for these lengths; show padding and balance."""
    from evenstep.cli import output
    from evenstep.cli.input import called
    from evenstep.cli.job import load_job
    from evenstep.cli.overrides import overrides_of
    from evenstep.core.checks import assert_valid
    from evenstep.core.plan_file import replace_files
    from evenstep.report import plan_page, plan_picture
    from evenstep.screen import progress

    in_order = seed is not None or epoch is not None
    files.refuse_unknown_picture(picture)
    files.refuse_unwritable([lengths, config, *files.of_model(model)], out, picture)
    overrides = overrides_of(
        set_, max_tokens=max_tokens, ranks=ranks, samples_per_step=samples_per_step
    )
    with progress(f"Reading {called(lengths)}"):
        job = load_job(lengths, config, overrides, column, groups, model, from_, prompts)
    with progress("Planning") as advance:
        if in_order:
            made = job.plan_epoch(seed or 0, epoch or 0, advance)
        else:
            made = job.plan(job.recipe, advance, share=True)
        assert_valid(made)
    with progress("Measuring") as advance:
        stats = made.stats(progress=advance)
    order = f", seed {seed or 0}, epoch {epoch or 0}" if in_order else ""
    title = f"Plan of {called(lengths)}{order}"
    contents: dict[Path, bytes] = {}
    if out is not None:
        contents[out] = made.to_bytes()
    if picture is not None:
        contents[picture] = files.picture(
            picture, lambda: plan_picture(made, title), lambda: plan_page(made, title)
        )
    replace_files(contents)
    with terminal.printing(contents):
        if json:
            output.print_json(summary(made, stats))
        else:
            output.print_stats(made, stats, title)
    for path in contents:
        output.remark(f"wrote {path}")


def summary(made: Plan, stats: dict[str, Any]) -> dict[str, Any]:
    """The fields of a plan that `--json` prints."""
    return {"fingerprint": made.fingerprint, "recipe": made.recipe.to_dict(), "stats": stats}
