"""Search for a recipe and lengths whose plan is invalid: `make fuzz`."""

import argparse
import sys
import time
from collections import Counter

from hypothesis import HealthCheck, given, settings

from evenstep import violations
from evenstep.errors import EvenstepError
from evenstep.testing import Case, assert_valid_plan, cases
from tests.tree_cases import faults_of, random_case


def search_trees(first: int, count: int) -> None:
    """Plan random forests; check them with the project's checks and from token ids alone."""
    planned, shared, deepest = 0, 0, 0
    for seed in range(first, first + count):
        case = random_case(seed)
        try:
            plan = case.plan()
        except EvenstepError:
            continue
        faults = [*violations(plan), *faults_of(case, plan)]
        if faults:
            raise SystemExit(f"forest {seed}: {faults}")
        planned, shared = planned + 1, shared + (plan.parents is not None)
        depth, level = 0, plan.parents
        while plan.parents is not None and level is not None and (level >= 0).any():
            depth, level = depth + 1, plan.parents[level[level >= 0]]
        deepest = max(deepest, depth)
        if (seed + 1) % 1000 == 0:
            print(f"{seed + 1:,} forests", file=sys.stderr, flush=True)
    print(
        f"{planned:,} plans of {count:,} forests are valid, {shared:,} share prefixes up to "
        f"{deepest} deep; {count - planned:,} were refused with an error"
    )


def main() -> None:
    """Make and check many plans. Hypothesis prints the smallest failing case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=40, help="samples in the largest plan")
    parser.add_argument("--trees", type=int, help="forests to plan and check instead, twice")
    parser.add_argument("--seed", type=int, default=0, help="of the first forest")
    arguments = parser.parse_args()
    if arguments.trees:
        search_trees(arguments.seed, arguments.trees)
        return
    seen: Counter[str] = Counter()
    start = time.monotonic()

    @settings(
        max_examples=arguments.plans,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(arguments.samples))
    def search(case: Case) -> None:
        seen["cases"] += 1
        try:
            assert_valid_plan(case.plan())
        except EvenstepError as error:
            if "the plan is invalid" in str(error):
                raise
            seen["refused"] += 1
        if seen["cases"] % 1000 == 0:
            rate = seen["cases"] / (time.monotonic() - start)
            valid = seen["cases"] - seen["refused"]
            line = f"{seen['cases']:,} cases, {valid:,} valid plans, {rate:.0f} cases per second"
            print(line, file=sys.stderr, flush=True)

    search()
    planned = seen["cases"] - seen["refused"]
    print(f"{planned:,} plans are valid; {seen['refused']:,} cases were refused with an error")


if __name__ == "__main__":
    main()
