"""`evenstep simulate`: the step time of strategies on a cluster."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from evenstep.cli import options, terminal
from evenstep.cli.compare import StrategyOption

Gpu: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Devices by name: b200, h200, h100, a100, l40s or a10g. Needs --model.",
        metavar="NAME",
        show_default=False,
    ),
]
Flops: TypeAlias = Annotated[
    float | None,
    typer.Option(
        help="FLOPs per second of a device, instead of --gpu; 1 if the cost is in seconds.",
        metavar="NUMBER",
        show_default=False,
    ),
]
Share: TypeAlias = Annotated[
    float | None,
    typer.Option(
        help="The share of --flops that training reaches. Default: 0.4; 1 with --flops 1.",
        metavar="NUMBER",
        show_default=False,
    ),
]
Link: TypeAlias = Annotated[
    float | None,
    typer.Option(
        help="Bytes per second from a device to another node. Default: that of the GPU, or 50e9.",
        metavar="NUMBER",
        show_default=False,
    ),
]
Overlap: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--overlap/--no-overlap", help="Exchange parameters and gradients while computing."
    ),
]
Only: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help='Simulate only this strategy, such as "packed, even". Repeatable.',
        metavar="NAME",
        show_default=False,
    ),
]


def simulate(
    lengths: options.Lengths,
    config: options.Config = None,
    from_: options.From = None,
    set_: options.Set = None,
    max_tokens: options.MaxTokens = None,
    ranks: options.Ranks = None,
    samples_per_step: options.SamplesPerStep = None,
    model: options.Model = None,
    gpu: Gpu = None,
    flops: Flops = None,
    share: Share = None,
    link: Link = None,
    overlap: Overlap = True,
    strategy: StrategyOption = None,
    only: Only = None,
    column: options.Column = None,
    groups: options.Groups = None,
    json: options.Json = False,
) -> None:
    """Estimate the step time of several strategies on a cluster.

    --set topology.dp, cp, tp, pp and vpp describe the cluster.

    With --gpu, the time of a micro-batch comes from the model's shape and the GPU; with --flops,
    it is the cost divided by FLOPs per second.
    """
    from evenstep.cli import output
    from evenstep.cli.cluster import Speed
    from evenstep.cli.input import called
    from evenstep.cli.job import load_job
    from evenstep.cli.overrides import overrides_of
    from evenstep.cli.simulation_output import print_simulations
    from evenstep.cli.strategies import (
        TODAY,
        built_in_strategies,
        own_strategy,
        refuse_duplicates,
        refuse_too_long,
    )
    from evenstep.errors import ConfigError, PlanError
    from evenstep.report.simulation.simulate import Simulation
    from evenstep.screen import progress

    speed = Speed.of(gpu, flops, share, link, overlap, model)
    overrides = overrides_of(
        set_, max_tokens=max_tokens, ranks=ranks, samples_per_step=samples_per_step
    )
    with progress(f"Reading {called(lengths)}"):
        job = load_job(lengths, config, overrides, column, groups, model, from_)
    speed.check(job.recipe)
    own = [own_strategy(text, job) for text in strategy or []]
    every = refuse_duplicates([*built_in_strategies(job), *own])
    chosen = [each for each in every if only is None or each.name in only]
    missing = set(only or ()) - {each.name for each in every}
    if missing:
        names = ", ".join(each.name for each in every)
        raise ConfigError(f"unknown strategy {min(missing)!r}; expected one of: {names}.")
    refuse_too_long(job, chosen)
    found: dict[str, Simulation] = {}
    faults: dict[str, str] = {}
    for each in chosen:
        with progress(f"Simulating: {each.name}") as advance:
            try:
                found[each.name] = speed.simulated(each.job(job), each.overrides, advance)
            except (ConfigError, PlanError) as error:
                faults[each.name] = str(error)
    if faults and not found.keys() - {TODAY}:
        raise PlanError(f"no strategy can be simulated: {next(iter(faults.values()))}")
    with terminal.printing():
        if json:
            rows = [{"strategy": name, **each.to_dict()} for name, each in found.items()]
            broken = [{"strategy": name, "fault": fault} for name, fault in faults.items()]
            output.print_json([*rows, *broken])
        else:
            print_simulations(
                found, faults, f"Simulated steps of {called(lengths)}", speed.about(job)
            )
