"""`evenstep check`: does a saved plan keep its promises?"""

from __future__ import annotations

from evenstep.cli import options, terminal


def check(plan: options.SavedPlan, json: options.Json = False) -> int:
    """Check every promise of a saved plan; exit code 1 when one is broken."""
    from evenstep.cli import screen
    from evenstep.core.checks import CHECKS, violations_by_check
    from evenstep.core.plan import Plan
    from evenstep.screen import progress

    with progress(f"Checking {plan.name}"):
        found = violations_by_check(Plan.load(plan))
    broken = any(found.values())
    promises = {name: (promise.__doc__ or name).strip() for name, promise in CHECKS.items()}
    with terminal.printing():
        if json:
            screen.print_json({"valid": not broken, "checks": found})
        else:
            screen.print_checks(found, promises)
    return int(broken)
