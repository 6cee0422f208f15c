"""`evenstep compare`: compare strategies on the same lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from evenstep.cli import files, options, terminal

if TYPE_CHECKING:
    from evenstep.report import Entry

StrategyOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        help='Add a strategy to the built-in ones, such as "lpt: balance=lpt, layout.round_to=64". '
        "Repeatable.",
        metavar="NAME: KEY=VALUE, ...",
        show_default=False,
    ),
]


def compare(
    lengths: options.Lengths,
    config: options.Config = None,
    from_: options.From = None,
    set_: options.Set = None,
    max_tokens: options.MaxTokens = None,
    ranks: options.Ranks = None,
    samples_per_step: options.SamplesPerStep = None,
    model: options.Model = None,
    strategy: StrategyOption = None,
    column: options.Column = None,
    groups: options.Groups = None,
    prompts: options.Prompts = None,
    picture: options.Picture = None,
    json: options.Json = False,
) -> None:
    """Plan the same lengths with several strategies and compare the results."""
    from evenstep.cli import output
    from evenstep.cli.input import called
    from evenstep.cli.job import load_job
    from evenstep.cli.overrides import overrides_of
    from evenstep.cli.strategies import (
        TODAY,
        built_in_strategies,
        own_strategy,
        refuse_duplicates,
        refuse_too_long,
        run,
    )
    from evenstep.core.plan_file import replace_file
    from evenstep.errors import PlanError
    from evenstep.report import comparison_page, comparison_picture
    from evenstep.report.comparison import one_step_warning
    from evenstep.screen import progress

    files.refuse_unknown_picture(picture)
    files.refuse_unwritable([lengths, config, *files.of_model(model)], picture)
    overrides = overrides_of(
        set_, max_tokens=max_tokens, ranks=ranks, samples_per_step=samples_per_step
    )
    with progress(f"Reading {called(lengths)}"):
        job = load_job(lengths, config, overrides, column, groups, model, from_, prompts)
    own = [own_strategy(text, job) for text in strategy or []]
    strategies = refuse_duplicates([*built_in_strategies(job), *own])
    refuse_too_long(job, strategies)
    entries: list[Entry] = []
    for each in strategies:
        with progress(f"Planning: {each.name}") as advance:
            entries.append(run(job, each, advance))
    plans = {entry.name: entry.plan for entry in entries if entry.plan is not None}
    if not plans.keys() - {TODAY}:
        raise PlanError(f"no strategy can plan these lengths: {entries[1].fault}")
    title = f"Strategies for {called(lengths)}"
    if picture is not None:
        drawn = files.picture(
            picture,
            lambda: comparison_picture(plans, title),
            lambda: comparison_page(entries, title),
        )
        replace_file(picture, drawn)
    with terminal.printing([picture] if picture else []):
        if json:
            output.print_json([_summary(entry, entries[0]) for entry in entries])
        else:
            output.print_comparison(entries, title)
    warning = one_step_warning(next(iter(plans.values())))
    if warning:
        output.remark(f"warning: {warning}")
    if picture is not None:
        output.remark(f"wrote {picture}")


def _summary(entry: Entry, first: Entry) -> dict[str, Any]:
    from evenstep.report.comparison import padding_removed, time_saved

    if entry.plan is None:
        return {"strategy": entry.name, "fault": entry.fault}
    return {
        "strategy": entry.name,
        "seconds": entry.seconds,
        "modelled_time": entry.modelled_time,
        "parts": entry.parts._asdict(),
        "times_less_time_than_first": time_saved(entry, first),
        "padding_removed": padding_removed(entry, first),
        "fingerprint": entry.plan.fingerprint,
        "recipe": entry.plan.recipe.to_dict(),
        "stats": entry.stats,
    }
