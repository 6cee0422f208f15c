"""Measure what tensors promise, and file the results.

python benchmarks/tensors.py            all of it, filed under benchmarks/results
python benchmarks/tensors.py --quick    a small version, not filed
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import Bench
from benchmarks.collate import collating
from benchmarks.runner import run
from benchmarks.tables import Section

SECTIONS: dict[str, Callable[[Bench], Section]] = {"collate": collating}


def main(arguments: list[str] | None = None) -> int:
    """Tensors beside torch's own copies."""
    return run("tensors", "Tensors, measured", SECTIONS, arguments)


if __name__ == "__main__":
    sys.exit(main())
