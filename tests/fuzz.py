"""A long search for a recipe and lengths whose plan breaks a promise: `make fuzz`."""

import argparse
import sys
import time
from collections import Counter

from hypothesis import HealthCheck, given, settings

from evenstep.errors import EvenstepError
from evenstep.testing import Case, assert_valid_plan, cases


def main() -> None:
    """Make and check so many plans; the smallest failing case is printed by Hypothesis."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=40, help="samples in the largest plan")
    arguments = parser.parse_args()
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
            if "breaks its promises" in str(error):
                raise
            seen["refused"] += 1
        if seen["cases"] % 1000 == 0:
            rate = seen["cases"] / (time.monotonic() - start)
            print(f"{seen['cases']:,} cases, {rate:.0f} a second", file=sys.stderr, flush=True)

    search()
    planned = seen["cases"] - seen["refused"]
    print(
        f"{planned:,} plans kept every promise; {seen['refused']:,} cases were refused with reason"
    )


if __name__ == "__main__":
    main()
