"""`evenstep report`: show the stats of a saved plan."""

from __future__ import annotations

from evenstep.cli import files, options, terminal


def report(
    plan: options.SavedPlan,
    picture: options.Picture = None,
    json: options.Json = False,
) -> None:
    """Show padding and balance of a saved plan, in total and per step."""
    from evenstep.cli import output
    from evenstep.cli.plan import summary
    from evenstep.core.archive import replace_file
    from evenstep.core.checks import assert_valid
    from evenstep.core.plan import Plan
    from evenstep.report import plan_page, plan_picture
    from evenstep.screen import progress

    files.refuse_unknown_picture(picture)
    files.refuse_unwritable([plan], picture)
    with progress(f"Reading {plan.name}"):
        made = Plan.load(plan)
        assert_valid(made)
    with progress(f"Measuring {plan.name}") as advance:
        stats, steps = made.stats(progress=advance), made.step_stats()
    title = f"Report on {plan.name}"
    if picture is not None:
        drawn = files.picture(
            picture, lambda: plan_picture(made, title), lambda: plan_page(made, title)
        )
        replace_file(picture, drawn)
    with terminal.printing([picture] if picture else []):
        if json:
            output.print_json({**summary(made, stats), "steps": steps})
        else:
            output.print_stats(stats, title)
            output.print_steps(steps)
    if picture is not None:
        output.remark(f"wrote {picture}")
