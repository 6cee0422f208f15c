"""Pack the same lengths with two checkouts and compare the CPU time.

`python benchmarks/house_packing.py BASE NOW --lengths FOLDER [--out FILE]`

BASE and NOW are checkouts; each runs in its own process, and both pack the same lengths in turn.
FOLDER has `.npy` files of lengths, from which the items are drawn. Times are the best of several
calls, in CPU milliseconds, so neighbours on the machine count little.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
CAPACITY = 8192
PACKERS = ("best_fit_decreasing", "optimal")
COUNTS = (1_000, 10_000, 100_000, 1_000_000)
TURNS = 5
ITEMS = 20_000  # packed at least, in calls of fewer, for one measurement


class Checkout:
    """A process that packs with the code of one checkout."""

    def __init__(self, source: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            env={**os.environ, "PYTHONPATH": str(Path(source).resolve() / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, *case: Any) -> tuple[float, int]:
        """(CPU milliseconds of a call, bins)."""
        questions, answers = self._process.stdin, self._process.stdout
        assert questions is not None
        assert answers is not None
        questions.write(json.dumps(case) + "\n")
        questions.flush()
        milliseconds, bins = json.loads(answers.readline())
        return milliseconds, bins

    def close(self) -> None:
        """End the process."""
        self._process.kill()


def work() -> None:
    """Measure one case per line of standard input."""
    from evenstep import pack

    gc.disable()
    for line in sys.stdin:
        file, count, packer = json.loads(line)
        drawn = np.random.default_rng(0).choice(np.load(file), count)
        lengths = np.clip(drawn, 1, CAPACITY).astype(np.int64)
        bins, calls, best = len(pack(lengths, CAPACITY, packer)), max(1, ITEMS // count), np.inf
        for _ in range(3):
            start = time.process_time()
            for _ in range(calls):
                pack(lengths, CAPACITY, packer)
            best = min(best, (time.process_time() - start) / calls)
        print(json.dumps((best * 1e3, bins)), flush=True)


def compare(base: Checkout, now: Checkout, folder: Path) -> list[str]:
    """The rows of a table, one for each packer, count and file of lengths."""
    rows = ["| packer | n | lengths | before, ms | now, ms | ratio |", "| --- " * 6 + "|"]
    for packer in PACKERS:
        for count in COUNTS:
            ratios = []
            for file in sorted(folder.glob("*.npy")):
                case = (str(file), count, packer)
                turns = [(base.measure(*case), now.measure(*case)) for _ in range(TURNS)]
                (before, bins), (after, now_bins) = (
                    min(column) for column in zip(*turns, strict=True)
                )
                assert bins == now_bins, f"{case}: {bins} bins before, {now_bins} now"
                ratios.append(after / before)
                rows.append(
                    f"| {packer} | {count:,} | {file.stem} | {before:.4f} | {after:.4f} "
                    f"| {after / before:.3f} |"
                )
                print(rows[-1], file=sys.stderr, flush=True)
            mean = float(np.exp(np.log(ratios).mean()))
            rows.append(f"| {packer} | {count:,} | geomean | | | {mean:.3f} |")
    return rows


def main() -> None:
    """Compare two checkouts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base")
    parser.add_argument("now", nargs="?", default=str(ROOT))
    parser.add_argument("--lengths", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    checkouts = Checkout(options.base), Checkout(options.now)
    text = "\n".join(compare(*checkouts, options.lengths)) + "\n"
    for checkout in checkouts:
        checkout.close()
    if options.out:
        head = f"# Packing, two revisions\n\nCapacity {CAPACITY:,}, best of {3 * TURNS} calls.\n\n"
        options.out.write_text(head + text)
    print(text)


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        work()
    else:
        main()
