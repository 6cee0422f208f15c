"""Measure planning, compared with peers.

    python benchmarks/planning.py                    everything, written to benchmarks/results
    python benchmarks/planning.py --quick            a small version in about a minute
    python benchmarks/planning.py --only joint       one section

Lengths come from a folder of `.npy` files (`--lengths` or EVENSTEP_LENGTHS), or are generated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.balance import balance
from benchmarks.bench import Bench
from benchmarks.exact import exact
from benchmarks.joint import joint
from benchmarks.limits import limits
from benchmarks.packing import growth, optimal, speed
from benchmarks.padded import padded
from benchmarks.pipelines import pipelines
from benchmarks.plans import plans, starts
from benchmarks.quality import quality
from benchmarks.runner import run
from benchmarks.scaling import scaling
from benchmarks.systems import systems
from benchmarks.tables import Section

SECTIONS: dict[str, Callable[[Bench], Section]] = {
    "growth": growth,  # first, so that it cannot reuse memory of other sections
    "packing": speed,
    "optimal": optimal,
    "balance": balance,
    "joint": joint,
    "quality": quality,
    "exact": exact,
    "padded": padded,
    "pipelines": pipelines,
    "limits": limits,
    "peers": systems,
    "plans": plans,
    "scaling": scaling,
    "starts": starts,
}


def main(arguments: list[str] | None = None) -> int:
    """Measure planning."""
    return run("planning", "Planning benchmark", SECTIONS, arguments)


if __name__ == "__main__":
    sys.exit(main())
