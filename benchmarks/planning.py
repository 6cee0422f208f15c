"""Measure what planning promises, beside peers, and file the results.

    python benchmarks/planning.py                    all of it, filed under benchmarks/results
    python benchmarks/planning.py --quick            a small version in half a minute, not filed
    python benchmarks/planning.py --only joint       one section, not filed

Lengths come from a folder of `.npy` files (`--lengths` or EVENSTEP_LENGTHS), else are generated.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import lengths, machine, tables
from benchmarks.balance import balance
from benchmarks.bench import Bench
from benchmarks.joint import joint
from benchmarks.packing import growth, optimal, speed
from benchmarks.plans import plans, starts
from benchmarks.tables import Section

ROOT = Path(__file__).resolve().parents[1]

SECTIONS: dict[str, Callable[[Bench], Section]] = {
    "packing": speed,
    "growth": growth,
    "optimal": optimal,
    "balance": balance,
    "joint": joint,
    "plans": plans,
    "starts": starts,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the sections, show them, and file a full run."""
    options = _options(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    folder: Path | None = options.lengths
    corpora = lengths.load(folder) if folder else lengths.generate()
    if not corpora:
        console.print(f"{folder} holds no .npy files, so there is nothing to measure on.")
        return 2

    def say(line: str) -> None:
        if console.is_terminal:
            sys.stdout.write(f"\r\x1b[2K{line}")
            sys.stdout.flush()

    bench = Bench(corpora=corpora, quick=options.quick, say=say)
    names = options.only or list(SECTIONS)
    found: dict[str, Section] = {}
    for number, name in enumerate(names, 1):
        console.print(f"[bold]({number}/{len(names)}) {name}[/bold]")
        start = time.perf_counter()
        found[name] = SECTIONS[name](bench)
        say("")
        tables.show(found[name], console)
        console.print(f"[dim]{name}: {time.perf_counter() - start:.0f} s[/dim]\n")
    targets = [target for section in found.values() for target in section.targets]
    tables.show(Section("All targets", targets=targets), console)
    if options.out:
        _file(options.out, found, list(corpora))
        console.print("Filed as planning.json and planning.md.")
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure planning beside its peers.")
    parser.add_argument("--lengths", type=Path, help="folder of .npy files with lengths")
    parser.add_argument("--quick", action="store_true", help="a small version, not filed")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="this section only")
    parser.add_argument("--out", type=Path, help="where to file (benchmarks/results)")
    options = parser.parse_args(arguments)
    if options.lengths is None:
        default = ROOT.parent / "shared" / "data" / "lengths"
        named = os.environ.get("EVENSTEP_LENGTHS")
        options.lengths = Path(named) if named else default if default.is_dir() else None
    if options.lengths is not None and not options.lengths.is_dir():
        parser.error(f"{options.lengths} is not a folder, so there are no lengths to read")
    if options.out is None and not options.quick and not options.only:
        options.out = ROOT / "benchmarks" / "results"
    return options


def _file(folder: Path, found: dict[str, Section], corpora: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    facts = machine.facts()
    data = {
        "machine": facts,
        "lengths": corpora,
        "sections": {name: section.to_dict() for name, section in found.items()},
    }
    text = json.dumps(data, indent=1, ensure_ascii=False)
    (folder / "planning.json").write_text(text + "\n", encoding="utf-8")
    about = tables.Table("Machine", {"": "", " ": ""}, [*facts.items()])
    targets = [target for section in found.values() for target in section.targets]
    parts = [
        "# Planning, measured",
        "Written by `make bench`. Times are the best of several runs, all packers in turn in one "
        f"run. Lengths: {', '.join(corpora)}.",
        tables.markdown_table(about),
        f"## All targets\n\n{tables.markdown_table(tables.target_table(targets))}",
        *(tables.markdown(section) for section in found.values()),
    ]
    (folder / "planning.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
