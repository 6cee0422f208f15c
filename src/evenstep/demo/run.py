"""`make demo`: train a small model on the Python standard library in three layouts, on two ranks.

`evenstep train` runs three times with the same samples in every step: padded to the maximum length,
in dynamic batches of similar length, and packed. The loss of every step is the same; the throughput
is not. The report shows the plans that ran, the losses and the times.
"""

from __future__ import annotations

import ast
import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from evenstep import screen
from evenstep.core.plan_file import replace_file
from evenstep.data.run_folder import RunFolder, read_run
from evenstep.data.token_file import write_token_file
from evenstep.planning.planner import make_plan
from evenstep.report import Entry, Report, advice, report_page

RANKS = 2
STEPS = 12
SAMPLES = 64  # per step
LONGEST = 2048  # tokens per sample; longer ones are truncated when they are stored
BUDGET = 8192  # slots per micro-batch
SHAPE: dict[str, Any] = {
    "vocab": 256,
    "hidden": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 192,
}
FOLDER = Path("build")

LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"kind": "padded", "max_tokens": BUDGET, "pad_to": LONGEST},
    "dynamic": {"kind": "padded", "max_tokens": BUDGET},
    "packed": {"kind": "packed", "max_tokens": BUDGET},
}


def main(steps: int = STEPS, each: int = SAMPLES) -> None:
    """Store the corpus, train in each layout, print a table and write a report.

    steps  number of steps
    each   samples per step
    """
    console = screen.console()
    FOLDER.mkdir(exist_ok=True)
    with screen.progress("Reading the standard library"):
        corpus = write_token_file(FOLDER / "demo.tokens", samples(steps * each), dtype=np.uint8)
    lengths = corpus.lengths_of(np.arange(len(corpus)))
    console.print(
        f"Functions and classes of the Python standard library, one token per byte: "
        f"{len(lengths):,} samples, {lengths.sum():,} tokens, median length "
        f"{int(np.median(lengths)):,}, maximum {lengths.max():,}.\n{RANKS} processes, "
        f"{each} samples per step, at most {BUDGET:,} slots per micro-batch.\n"
        f"padded: every sample to {LONGEST:,}; dynamic: batches of similar length; packed: end to "
        f"end.\n"
    )
    for name in LAYOUTS:
        console.print(f"evenstep train {FOLDER / f'demo-{name}.yaml'}")
        train(name, steps, each)
    runs = {name: read_run(FOLDER / f"demo-{name}") for name in LAYOUTS}
    records = {name: record_of(run) for name, run in runs.items()}
    entries = [
        Entry(name, run.plan, records[name]["planning"] * run.plan.num_steps)
        for name, run in runs.items()
    ]
    console.print()
    console.print(Text("The same steps in three layouts", "bold"))
    screen.print_grid(console, ["", *records], rows(records, entries))
    note = slower_note(records, entries)
    if note:
        console.print(f"\n{note}")
    losses = np.array([record["losses"] for record in records.values()])
    console.print(
        f"\nThe losses of a step differ by at most {np.ptp(losses, axis=0).max():.1e}: the same "
        f"samples give the same loss and gradient in every layout."
    )
    page = FOLDER / "demo.html"
    title = f"{steps} steps of the Python standard library on {RANKS} ranks"
    replace_file(page, report_page(report_of(title, runs, entries)).encode())
    console.print(
        f"The report with throughput, losses and plans is at {page.resolve().as_uri()}",
        soft_wrap=True,
    )


# Corpus -----------------------------------------------------------------------------------------


def samples(count: int) -> list[dict[str, Any]]:
    """`count` functions and classes of the standard library, in a seeded random order."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts]
    random.Random(0).shuffle(paths)
    found: list[bytes] = []
    for path in paths:
        found += definitions(path)
        if len(found) >= 4 * count:
            break
    random.Random(1).shuffle(found)
    return [{"input_ids": np.frombuffer(text, np.uint8)} for text in found[:count]]


def definitions(path: Path) -> Iterator[bytes]:
    """The source of each function and class of a module, truncated to `LONGEST` bytes."""
    try:
        source = path.read_bytes()
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return
    lines = source.splitlines(keepends=True)
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            text = b"".join(lines[node.lineno - 1 : node.end_lineno])
            if len(text) > 1:
                yield text[:LONGEST]


# Training -----------------------------------------------------------------------------------------


def settings_of(name: str, steps: int = STEPS, each: int = SAMPLES) -> dict[str, Any]:
    """The configuration of a run of `evenstep train` with a layout; only that differs."""
    return {
        "layout": LAYOUTS[name],
        "steps": {"samples": each},
        "stream": {"max_num_steps": steps, "shuffle": False},
        "data": {"paths": "demo.tokens"},
        "model": SHAPE,
        "optimizer": {"lr": 3e-3, "schedule": "constant"},
        "trainer": {"out": f"demo-{name}", "save_every": steps},
    }


def train(name: str, steps: int, each: int) -> None:
    """Run `evenstep train` in one process per rank, from the same initial weights."""
    file, out = FOLDER / f"demo-{name}.yaml", FOLDER / f"demo-{name}"
    shutil.rmtree(out, ignore_errors=True)  # it would go on where it ended
    replace_file(file, json.dumps(settings_of(name, steps, each), indent=1).encode())
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command = [sys.executable, "-m", *launcher, "-m", "evenstep", "train", str(file), "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
    if ended.returncode:
        raise RuntimeError(f"training with the layout {name!r} failed; see above.")


def record_of(run: RunFolder) -> dict[str, Any]:
    """The figures of a run. Its first step also loads and compiles code, so that times are of the
    others."""
    planning = [record["seconds/plan"] for record in run.records]
    return {
        "losses": run.log.loss.tolist(),
        "tokens_per_second": run.log.per_second(),
        "micro_batches": sum(busy.shape[1] for busy in run.log.busy),
        "planned": float(run.log.planned.mean()),
        "measured": float(run.log.measured[run.log.steady].mean()),
        "waiting": run.log.waiting_share(),
        "planning": float(np.mean(planning[1:] or planning)),
    }


def report_of(title: str, runs: dict[str, RunFolder], entries: list[Entry]) -> Report:
    """The report of all layouts; its plan is that of the last, which is packed."""
    own = entries[-1]
    assert own.plan is not None
    return Report(
        title=title,
        plan=own.plan,
        own=own.name,
        entries=entries,
        runs={name: run.log for name, run in runs.items()},
        advice=advice(own.plan, make_plan),
    )


def rows(records: dict[str, dict[str, Any]], entries: list[Entry]) -> list[list[Text]]:
    """A label and a figure of each layout: throughput, padding, balance, the loss of every step."""
    found = list(records.values())
    baseline = found[0]["tokens_per_second"]
    speeds = [record["tokens_per_second"] for record in found]
    made = {
        "tokens/s": [f"{s:,.0f} ({s / baseline:.2f}×)" for s in speeds],
        "slots": [f"{entry.stats['slots']:,}" for entry in entries],
        "padding": [f"{entry.stats['padding_ratio']:.1%}" for entry in entries],
        "micro-batches per rank": [f"{record['micro_batches']:,}" for record in found],
        "imbalance per step, planned": [f"{record['planned']:.4f}×" for record in found],
        "imbalance per step, measured": [f"{record['measured']:.3f}×" for record in found],
        "planning time per step": [f"{record['planning'] * 1e3:.1f} ms" for record in found],
        "waiting for data": [f"{record['waiting']:.1%}" for record in found],
    }
    for step in range(len(found[0]["losses"])):
        made[f"loss of step {step}"] = [f"{record['losses'][step]:.6f}" for record in found]
    return [[Text(cell) for cell in (label, *figures)] for label, figures in made.items()]


def slower_note(records: dict[str, dict[str, Any]], entries: list[Entry]) -> str:
    """Why the packed run is not faster than the dynamic one; empty if it is."""
    dynamic, packed = (records[name]["tokens_per_second"] for name in ("dynamic", "packed"))
    if packed > dynamic:
        return ""
    padding = next(entry.stats["padding_ratio"] for entry in entries if entry.name == "dynamic")
    return (
        f"packed is not faster than dynamic here: on a CPU, attention runs one sample of a packed "
        f"row at a time, but all rows of a padded batch at once. That costs more than the "
        f"{padding:.1%} of padding that dynamic batches have. On a GPU, one kernel runs the whole "
        f"row."
    )
