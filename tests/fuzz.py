"""Search for a recipe and lengths whose plan is invalid: `make fuzz`."""

import argparse
import sys
import time
from collections import Counter

from hypothesis import HealthCheck, given, settings

from evenstep.errors import EvenstepError
from evenstep.testing import Case, assert_valid_plan, cases


def main() -> None:
    """Make and check many plans. Hypothesis prints the smallest failing case."""
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
