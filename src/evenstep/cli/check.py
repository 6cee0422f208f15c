"""`evenstep check`: check the invariants of a saved plan."""

from __future__ import annotations

from evenstep.cli import options, terminal


def check(plan: options.CheckedPlan, json: options.Json = False) -> int:
    """Check all invariants of a saved plan. Exits with code 1 if any is violated."""
    from evenstep.cli import output
    from evenstep.cli.input import Input, called
    from evenstep.cli.samples import load_plan
    from evenstep.core.checks import CHECKS, violations_by_check
    from evenstep.screen import progress

    with progress(f"Checking {called(plan)}"):
        found = violations_by_check(load_plan(Input.at(plan)))
    invalid = any(found.values())
    invariants = {name: (check.__doc__ or name).strip() for name, check in CHECKS.items()}
    with terminal.printing():
        if json:
            output.print_json({"valid": not invalid, "checks": found})
        else:
            output.print_checks(found, invariants)
    return int(invalid)
