"""Measure what planning promises, beside peers, and file the results.

    python benchmarks/planning.py                    all of it, filed under benchmarks/results
    python benchmarks/planning.py --quick            a small version in half a minute, not filed
    python benchmarks/planning.py --only joint       one section, not filed

Lengths come from a folder of `.npy` files (`--lengths` or EVENSTEP_LENGTHS), else are generated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.balance import balance
from benchmarks.bench import Bench
from benchmarks.joint import joint
from benchmarks.packing import growth, optimal, speed
from benchmarks.plans import plans, starts
from benchmarks.runner import run
from benchmarks.tables import Section

SECTIONS: dict[str, Callable[[Bench], Section]] = {
    "growth": growth,  # first, before others leave memory behind that could be used again
    "packing": speed,
    "optimal": optimal,
    "balance": balance,
    "joint": joint,
    "plans": plans,
    "starts": starts,
}


def main(arguments: list[str] | None = None) -> int:
    """Planning beside its peers."""
    return run("planning", "Planning, measured", SECTIONS, arguments)


if __name__ == "__main__":
    sys.exit(main())
