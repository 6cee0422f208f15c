"""Read the configuration files of other systems, and compare with what the systems compute.

python benchmarks/configs.py FOLDER         FOLDER/nemo-rl, roll, cosmos-rl, veomni, fast-llm, verl
python benchmarks/configs.py FOLDER --list  also name every file that does not simply load

Each folder is a checkout of that system, at the commit that the table names. Needs omegaconf and
hydra-core. Written to benchmarks/results/configs.md and .json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from benchmarks import config_rules, tables
from benchmarks.config_rules import Get, OtherFileError, RefusedError, Sizes
from benchmarks.tables import Section, Table, Target
from evenstep.config import load_file
from evenstep.config.nested import leaves
from evenstep.errors import EvenstepError

RESULTS = Path(__file__).resolve().parent / "results"
COLUMNS = {
    "loads": "loads with the system's sizes",
    "refused": "refused, as the system does",
    "other": "refused, not a training run, or one whose ranks another library counts",
    "too strict": "refused, but the system runs it",
    "too lax": "loads, but the system refuses it",
    "misread": "loads with other sizes",
    "raw": "any other exception",
}


@dataclass(frozen=True, slots=True)
class System:
    """Where the files of a system are, and how its sizes are computed a second time."""

    name: str
    commit: str
    patterns: tuple[str, ...]
    read: Callable[[Path, Sequence[str]], Get]
    sizes: Callable[[Get], Sizes]


SYSTEMS = [
    System(
        "nemo-rl",
        "7ea279ab",
        ("examples/**/*.yaml", "research/**/*.yaml", "tests/unit/reference_configs/*.yaml"),
        config_rules.merged_file,
        config_rules.nemo_rl,
    ),
    System(
        "roll",
        "8eb27cc2",
        ("examples/**/*.yaml", "tests/**/*.yaml"),
        config_rules.composed_file,
        config_rules.roll,
    ),
    System(
        "cosmos-rl",
        "89f2e5b5",
        ("configs/**/*.toml", "tests/configs/*.toml", "cosmos_rl/tools/**/*.toml"),
        config_rules.plain_file,
        config_rules.cosmos_rl,
    ),
    System(
        "veomni",
        "d9774494",
        ("configs/**/*.yaml", "tests/**/*.yaml"),
        config_rules.plain_file,
        config_rules.veomni,
    ),
    System(
        "fast-llm",
        "7d61a1ba",
        ("examples/*.yaml", "fast_llm_external_models/**/*.yaml"),
        config_rules.plain_file,
        config_rules.fast_llm,
    ),
    System(
        "verl",
        "1dda039b",
        ("verl/**/config/*.yaml",),
        config_rules.composed_file,
        config_rules.verl,
    ),
]
MAIN_PPO = "verl/trainer/config/ppo_trainer.yaml"


@dataclass(slots=True)
class Outcome:
    """What became of one file, with the overrides of one run."""

    file: str
    kind: str
    says: str = ""


@dataclass(slots=True)
class Outcomes:
    """The outcomes of one system's files."""

    rows: list[Outcome] = field(default_factory=list)

    def count(self, kind: str) -> int:
        """How many had this outcome."""
        return sum(row.kind == kind for row in self.rows)


def outcome(system: System, path: Path, name: str, overrides: Sequence[str] = ()) -> Outcome:
    """Load a file, compute its sizes a second time, and compare."""
    wanted, reason = _computed(system, path, overrides)
    try:
        loaded = load_file(path, overrides, dialect=system.name)
    except EvenstepError as error:
        faults = "; ".join(getattr(error, "faults", (str(error),)))
        faults = faults.replace(f"{path.parent}", "its folder")
        kinds = {"refuses": "refused", "other": "other"}
        return Outcome(name, kinds.get(reason.partition(":")[0], "too strict"), faults)
    except Exception as error:
        return Outcome(name, "raw", repr(error))
    if wanted is None:
        return Outcome(name, "too lax", reason)
    ours = leaves(loaded.settings.to_dict())
    wrong = [
        f"{key} is {ours.get(key)}, the system has {value}"
        for key, value in wanted.items()
        if ours.get(key) != value
    ]
    return Outcome(name, "misread" if wrong else "loads", "; ".join(wrong))


def _computed(system: System, path: Path, overrides: Sequence[str]) -> tuple[Sizes | None, str]:
    """The sizes as the system computes them; else None and why it does not run the file."""
    try:
        return system.sizes(system.read(path, overrides)), ""
    except RefusedError as error:
        return None, f"refuses: {error}"
    except OtherFileError as error:
        return None, f"other: {error}"


def files_of(system: System, checkout: Path) -> list[Path]:
    """The configuration files of a checkout."""
    return sorted({path for pattern in system.patterns for path in checkout.glob(pattern)})


def runs_of_scripts(checkout: Path) -> Iterator[tuple[Path, Path, list[str]]]:
    """The runs of verl's example scripts: script, file and overrides.

    Scripts run in bash's restricted mode, where programs are replaced by one that only writes its
    arguments down; one that needs more is left out.
    """
    for script in sorted((checkout / "examples").glob("**/*.sh")):
        for words in _launches(script):
            if "verl.trainer.main_ppo" not in words:
                continue
            rest = words[words.index("verl.trainer.main_ppo") + 1 :]
            name = next((word for word in rest if word.startswith("--config-name")), "")
            file = Path(MAIN_PPO)
            if name:
                file = file.with_name(Path(name.partition("=")[2]).stem + ".yaml")
            overrides = [
                word for word in rest if re.match(r"[+\w][\w.@+]*=", word) and "$" not in word
            ]
            yield script, checkout / file, overrides


def _launches(script: Path) -> list[list[str]]:
    """The commands that a script would run."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        stub = Path(folder) / "stub"
        stub.write_text(f"#!/bin/bash\nprintf '%s\\0' \"$@\" >> {log}\nprintf '\\n\\0' >> {log}\n")
        stub.chmod(0o755)
        programs = Path(folder) / "bin"
        programs.mkdir()
        for name in ("python3", "python", "uv", "torchrun", "ray", "pip", "mkdir", "date", "which"):
            (programs / name).symlink_to(stub)
        subprocess.run(
            ["/bin/bash", "-r", str(script)],
            env={"PATH": str(programs), "HOME": folder},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
        )
        text = log.read_text("utf-8") if log.exists() else ""
    return [command.split("\0") for command in text.split("\0\n\0") if command]


def survey(folder: Path, names: Sequence[str], say: Callable[[str], None]) -> dict[str, Outcomes]:
    """The outcomes of all files of these systems, and of verl's example scripts."""
    found: dict[str, Outcomes] = {}
    for system in (system for system in SYSTEMS if system.name in names):
        checkout = (folder / system.name).resolve()
        say(f"reading the files of {system.name}")
        os.chdir(checkout)  # Hydra looks for `file://` folders here
        rows = []
        for path in files_of(system, checkout):
            rows.append(outcome(system, path, str(path.relative_to(checkout))))
        found[f"{system.name} {system.commit}"] = Outcomes(rows)
        if system.name == "verl":
            runs = list(runs_of_scripts(checkout))
            found["verl, example scripts"] = Outcomes(
                [
                    outcome(system, path, f"{script.relative_to(checkout)} {path.name}", overrides)
                    for script, path, overrides in runs
                ]
            )
    return found


def section(found: dict[str, Outcomes]) -> Section:
    """The table, and what must be 0."""
    table = Table("Files", {"system": "", "files": "d", **dict.fromkeys(COLUMNS, "d")})
    for name, outcomes in found.items():
        counts = [outcomes.count(kind) for kind in COLUMNS]
        table.add(name, len(outcomes.rows), *counts)
    totals = [sum(outcomes.count(kind) for outcomes in found.values()) for kind in COLUMNS]
    table.add("all", sum(len(outcomes.rows) for outcomes in found.values()), *totals)
    targets = [
        Target(f"files: {COLUMNS[kind]}", str(total), total == 0)
        for kind, total in zip(COLUMNS, totals, strict=True)
        if kind in ("misread", "raw", "too strict")
    ]
    notes = [
        "Every configuration file of a checkout is loaded with `--from SYSTEM`. Its sizes (ranks, "
        "budgets, samples per step) are computed a second time, by rules written from the system's "
        "code on values that OmegaConf or Hydra resolves.",
        *(f"*{kind}*: {meaning}." for kind, meaning in COLUMNS.items()),
    ]
    return Section("Files of other systems", notes, [table], targets)


def reasons(found: dict[str, Outcomes]) -> Table:
    """Every file that neither loads nor is another kind of file."""
    table = Table("Refused files", {"system": "", "file": "", "outcome": "", "reason": ""})
    for name, outcomes in found.items():
        for row in outcomes.rows:
            if row.kind not in ("loads", "other"):
                table.add(
                    name, row.file, row.kind, re.sub(r" \([^()]*\.yaml:[^()]*\)", "", row.says)
                )
    return table


def main(arguments: list[str] | None = None) -> int:
    """Survey the checkouts and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="folder with a checkout of each system")
    parser.add_argument("--list", action="store_true", help="name every file that is not loaded")
    parser.add_argument("--only", nargs="+", choices=[one.name for one in SYSTEMS])
    parser.add_argument("--out", type=Path, help="folder of results (default: benchmarks/results)")
    options = parser.parse_args(arguments)
    out: Path = (options.out or RESULTS).resolve()
    console = Console(width=None if sys.stdout.isatty() else 160)
    names = options.only or [system.name for system in SYSTEMS]
    found = survey(options.folder.resolve(), names, console.print)
    whole = section(found)
    whole.tables.append(reasons(found))
    if options.list:
        tables.show(whole, console)
    else:
        tables.show(Section(whole.title, whole.notes, whole.tables[:1], whole.targets), console)
    if options.only and options.out is None:
        return 0
    text = "\n\n".join(
        ["# Configuration files", "Written by `benchmarks/configs.py`.", tables.markdown(whole)]
    )
    (out / "configs.md").write_text(text + "\n", encoding="utf-8")
    data: dict[str, Any] = {"sections": {"files": whole.to_dict()}}
    (out / "configs.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    return 0 if all(target.met for target in whole.targets) else 1


if __name__ == "__main__":
    raise SystemExit(main())
