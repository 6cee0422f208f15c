"""Measure rollout batches: planning, and selecting the rows of a rank.

python benchmarks/rollouts.py            everything, written to benchmarks/results
python benchmarks/rollouts.py --quick    a small version
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import Bench
from benchmarks.rollout_plans import planning
from benchmarks.rollout_rows import selecting
from benchmarks.runner import run
from benchmarks.tables import Section

SECTIONS: dict[str, Callable[[Bench], Section]] = {"plan": planning, "rows": selecting}


def main(arguments: list[str] | None = None) -> int:
    """Measure planning and selecting rollouts."""
    return run("rollouts", "Rollout benchmark", SECTIONS, arguments)


if __name__ == "__main__":
    sys.exit(main())
