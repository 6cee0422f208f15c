"""Measure collating, compared with plain copies.

python benchmarks/tensors.py            everything, written to benchmarks/results
python benchmarks/tensors.py --quick    a small version
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
    """Measure collating."""
    return run("tensors", "Tensor benchmark", SECTIONS, arguments)


if __name__ == "__main__":
    sys.exit(main())
