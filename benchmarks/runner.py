"""Run sections of a benchmark, show them, and write the results of a full run."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from benchmarks import lengths, machine, tables
from benchmarks.bench import Bench
from benchmarks.tables import Section

ROOT = Path(__file__).resolve().parents[1]


def run(
    name: str,
    title: str,
    sections: Mapping[str, Callable[[Bench], Section]],
    arguments: list[str] | None = None,
) -> int:
    """Run the chosen sections; a full run is written to NAME.json and NAME.md."""
    options = _options(title, sections, arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    folder: Path | None = options.lengths
    corpora = lengths.load(folder) if folder else lengths.generate()
    if not corpora:
        console.print(f"{folder} holds no .npy files. Choose another folder with --lengths.")
        return 2

    def say(line: str) -> None:
        if console.is_terminal:
            sys.stdout.write(f"\r\x1b[2K{line}")
            sys.stdout.flush()

    bench = Bench(corpora=corpora, quick=options.quick, say=say)
    names = options.only or list(sections)
    found: dict[str, Section] = {}
    for number, part in enumerate(names, 1):
        console.print(f"[bold]({number}/{len(names)}) {part}[/bold]")
        start = time.perf_counter()
        found[part] = sections[part](bench)
        say("")
        tables.show(found[part], console)
        console.print(f"[dim]{part}: {time.perf_counter() - start:.0f} s[/dim]\n")
    targets = [target for section in found.values() for target in section.targets]
    tables.show(Section("All targets", targets=targets), console)
    if options.out:
        _file(options.out, name, title, found, list(corpora))
        console.print(f"Wrote {name}.json and {name}.md.")
    return 0


def _options(
    title: str, sections: Mapping[str, object], arguments: list[str] | None
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--lengths", type=Path, help="folder of .npy files with lengths")
    parser.add_argument("--quick", action="store_true", help="small version, results not written")
    parser.add_argument(
        "--only", action="append", choices=list(sections), help="run only this section; repeatable"
    )
    parser.add_argument(
        "--out", type=Path, help="folder for results (default of a full run: benchmarks/results)"
    )
    options = parser.parse_args(arguments)
    if options.lengths is None:
        default = ROOT.parent / "shared" / "data" / "lengths"
        named = os.environ.get("EVENSTEP_LENGTHS")
        options.lengths = Path(named) if named else default if default.is_dir() else None
    if options.lengths is not None and not options.lengths.is_dir():
        parser.error(f"--lengths must be a folder, got {options.lengths}")
    if options.out is None and not options.quick and not options.only:
        options.out = ROOT / "benchmarks" / "results"
    return options


def _file(
    folder: Path, name: str, title: str, found: dict[str, Section], corpora: list[str]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    facts = machine.facts()
    data = {
        "machine": facts,
        "lengths": corpora,
        "sections": {part: section.to_dict() for part, section in found.items()},
    }
    text = json.dumps(data, indent=1, ensure_ascii=False)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    about = tables.Table("Machine", {"": "", " ": ""}, [*facts.items()])
    targets = [target for section in found.values() for target in section.targets]
    parts = [
        f"# {title}",
        "Written by `make bench`. Times are the best of several calls; calls take turns in one "
        f"process. Lengths: {', '.join(corpora)}.",
        tables.markdown_table(about),
        f"## All targets\n\n{tables.markdown_table(tables.target_table(targets))}",
        *(tables.markdown(section) for section in found.values()),
    ]
    (folder / f"{name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
