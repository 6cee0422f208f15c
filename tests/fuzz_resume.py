"""Search for a stream that loses or repeats samples when it resumes: `make fuzz-resume`."""

import argparse
import sys
import time
from collections import Counter

from hypothesis import HealthCheck, given, settings

from tests.resume_cases import KINDS, ResumeCase


def main() -> None:
    """Run many cases of every kind of stream. Hypothesis prints the smallest failing case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000, help="cases of each kind")
    parser.add_argument("--samples", type=int, default=24, help="samples in the largest case")
    parser.add_argument("--kind", choices=sorted(KINDS), help="only this kind of stream")
    arguments = parser.parse_args()
    for kind in [arguments.kind] if arguments.kind else KINDS:
        _search(kind, arguments.cases, arguments.samples)


def _search(kind: str, cases: int, samples: int) -> None:
    seen: Counter[str] = Counter()
    start = time.monotonic()

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(KINDS[kind](samples))
    def search(case: ResumeCase) -> None:
        seen["cases"] += 1
        seen["resumed"] += case.check()
        if seen["cases"] % 1000 == 0:
            rate = seen["cases"] / (time.monotonic() - start)
            print(f"{seen['cases']:,} cases, {rate:.0f} per second", file=sys.stderr, flush=True)

    search()
    refused = seen["cases"] - seen["resumed"]
    print(
        f"{kind}: {seen['resumed']:,} runs resumed with every sample once; {refused:,} cases were "
        f"refused with an error"
    )


if __name__ == "__main__":
    main()
