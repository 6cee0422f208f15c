"""`evenstep tune`: which budget, step and rank split trains a corpus fastest on given GPUs."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from evenstep.cli import files, options, terminal

TunedModel: TypeAlias = Annotated[
    str,
    typer.Option(
        "--model",
        help="The model: a name such as llama-3-8b, or the path of a config.json or its folder.",
        metavar="NAME_OR_PATH",
        show_default=False,
    ),
]
Gpu: TypeAlias = Annotated[
    str,
    typer.Option(
        help="The GPU: b200, h200, h100, a100, l40s or a10g.", metavar="NAME", show_default=False
    ),
]
Ranks: TypeAlias = Annotated[
    int, typer.Option(help="The number of GPUs.", metavar="N", show_default=False)
]
Steps: TypeAlias = Annotated[
    int, typer.Option(help="Steps to plan for each of the best settings.", metavar="N")
]
Fixed: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Fix a key of the recipe, such as topology.cp=2 or overflow=split; it is not swept. "
        "Repeatable.",
        metavar="KEY=VALUE",
        show_default=False,
    ),
]
Measure: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="Also measure the budget of the model on the GPU of this machine, with random "
        "weights on one rank, and compare it with the prediction.",
    ),
]


def tune(
    lengths: options.Lengths,
    model: TunedModel,
    gpu: Gpu,
    ranks: Ranks,
    set_: Fixed = None,
    max_tokens: options.MaxTokens = None,
    samples_per_step: options.SamplesPerStep = None,
    column: options.Column = None,
    steps: Steps = 20,
    measure: Measure = False,
    picture: options.Picture = None,
    json: options.Json = False,
) -> None:
    """Find the budget, samples per step, layout and rank split with the fewest GPU-hours."""
    from evenstep.cli import output
    from evenstep.cli.input import Input, called
    from evenstep.cli.overrides import overrides_of
    from evenstep.cli.samples import read_samples
    from evenstep.cli.simulation_output import print_settings
    from evenstep.cli.sweep import Sweep
    from evenstep.core.cost import Gpu as Device
    from evenstep.core.models import ModelSize, named_config
    from evenstep.core.plan_file import replace_file
    from evenstep.planning.inputs import checked_lengths
    from evenstep.report.simulation.tuning import reason, recommended
    from evenstep.report.tradeoff import tradeoff_page, tradeoff_picture
    from evenstep.screen import progress

    files.refuse_unknown_picture(picture)
    files.refuse_unwritable([lengths, *files.of_model(model)], picture)
    config = named_config(model)
    device, size = Device.named(gpu), ModelSize.of(config)
    with progress(f"Reading {called(lengths)}"):
        samples = read_samples(Input.at(lengths), column, None, [])
    counted = checked_lengths(samples.lengths, None)
    fixed = overrides_of(set_, max_tokens=max_tokens, samples_per_step=samples_per_step)
    sweep = Sweep.of(counted, size, device, ranks, steps, fixed)
    with progress("Simulating settings") as advance:
        settings = sweep.settings(advance)
    chosen = recommended(settings)
    why = reason(chosen, settings, device.memory)
    if measure:
        from evenstep.cli.measure import described
        from evenstep.cli.measure import measure as measure_budget

        with progress("Measuring the budget"):
            measured = measure_budget(config, counted, chosen.checkpointing)
        why = f"{why} {described(measured, size, chosen.checkpointing)}"
    title = f"{model} on {ranks} × {device.name}, {called(lengths)}"
    if picture is not None:
        drawn = files.picture(
            picture,
            lambda: tradeoff_picture(settings, chosen, device.memory, title),
            lambda: tradeoff_page(settings, chosen, device.memory, title),
        )
        replace_file(picture, drawn)
    with terminal.printing([picture] if picture else []):
        if json:
            rows = [{**each.to_dict(), "recommended": each is chosen} for each in settings]
            output.print_json({"reason": why, "settings": rows})
        else:
            print_settings(settings, chosen, why, title)
    if picture is not None:
        output.remark(f"wrote {picture}")
