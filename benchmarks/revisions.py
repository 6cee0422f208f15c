"""Compare an earlier revision with this one in a single run: `python benchmarks/revisions.py`.

Each revision runs in its own process, and both measure the same cases in turn. Recipes use the
names of version 0.1.0, which both revisions can read.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from rich.console import Console

from benchmarks import tables
from benchmarks.revision_cases import CASES
from benchmarks.tables import Section, Table, Target

ROOT = Path(__file__).resolve().parents[1]
BASE = "bc20661"  # the last revision with four layouts
ROUNDS = 7
MOST = 1.05  # times the earlier revision (geomean)


class Revision:
    """A process that measures with the code of one revision."""

    def __init__(self, source: Path) -> None:
        paths = os.pathsep.join((str(source / "src"), str(ROOT)))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.revision_worker"],
            env={**os.environ, "PYTHONPATH": paths},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, case: str) -> float:
        """The time of one call, in seconds."""
        given, taken = self._process.stdin, self._process.stdout
        assert given is not None
        assert taken is not None
        given.write(json.dumps(case) + "\n")
        given.flush()
        return float(json.loads(taken.readline()))

    def close(self) -> None:
        """End the process."""
        self._process.kill()


def main() -> int:
    """Measure and show; write the results if `--out` is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default=BASE, help=f"earlier revision (default: {BASE})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed calls per case")
    parser.add_argument("--out", type=Path, help="folder for revisions.md and revisions.json")
    options = parser.parse_args()
    console = Console()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "base"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "-q", str(folder), options.base], check=True)
        stack.callback(subprocess.run, [*git, "remove", "--force", str(folder)], check=True)
        revisions = {"before": Revision(folder), "now": Revision(ROOT)}
        for revision in revisions.values():
            stack.callback(revision.close)
        section = compare(revisions, options.rounds, options.base, console)
    tables.show(section, console)
    if options.out is not None:
        (options.out / "revisions.md").write_text(tables.markdown(section) + "\n")
        text = json.dumps(section.to_dict(), indent=1)
        (options.out / "revisions.json").write_text(text + "\n")
    return 0


def compare(revisions: dict[str, Revision], rounds: int, base: str, console: Console) -> Section:
    """Compare the best time of each case in both revisions."""
    table = Table(
        "Time of one call",
        {"case": "", "before, ms": ".2f", "now, ms": ".2f", "now / before": ".3f"},
    )
    ratios: dict[str, float] = {}
    for name in CASES:
        console.print(f"[dim]{name}[/dim]")
        times: dict[str, list[float]] = {which: [] for which in revisions}
        for revision in revisions.values():
            revision.measure(name)  # loads compiled kernels
        for turn in range(rounds):
            order = list(revisions)[:: 1 if turn % 2 else -1]
            for which in order:
                times[which].append(revisions[which].measure(name))
        before, now = min(times["before"]), min(times["now"])
        ratios[name] = now / before
        table.add(name, before * 1e3, now * 1e3, now / before)
    sized = {name for name, case in CASES.items() if "micro_batches" in case["recipe"]["steps"]}
    everything = geometric_mean(ratios.values())
    others = geometric_mean(ratio for name, ratio in ratios.items() if name not in sized)
    return Section(
        f"This revision and {base}",
        notes=[f"Best of {rounds} calls; revisions take turns."],
        tables=[table],
        targets=[
            Target(f"all cases: ≤ {MOST}× (geomean)", f"{everything:.3f}×", everything <= MOST),
            Target(
                f"without steps.micro_batches: ≤ {MOST}× (geomean)",
                f"{others:.3f}×",
                others <= MOST,
            ),
        ],
    )


def geometric_mean(ratios: Iterable[float]) -> float:
    """The geometric mean of ratios."""
    return float(np.exp(np.mean(np.log(list(ratios)))))


if __name__ == "__main__":
    sys.exit(main())
