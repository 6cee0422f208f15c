"""`make demo`: train a small model on the Python standard library in three layouts, on two ranks.

source -> stream -> plan -> batch -> runner, three times with the same samples in every step:
padded to the maximum length, in dynamic batches of similar length, and packed. The loss of every
step is the same; the throughput is not. The report shows the plans that ran, the losses and the
times.
"""

from __future__ import annotations

import ast
import json
import random
import socket
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from evenstep import screen
from evenstep.core.cost import Cost
from evenstep.core.layout import Layout, Packed, Padded
from evenstep.core.plan import Plan, join_plans
from evenstep.core.plan_file import replace_file
from evenstep.core.recipe import Recipe, Steps, Topology, World
from evenstep.core.step import Step
from evenstep.data.planned import PlannedStream
from evenstep.data.token_file import TokenFile, write_token_file
from evenstep.planning.kernels import compile_seconds
from evenstep.planning.planner import make_plan
from evenstep.report import Entry, Report, RunLog, advice, report_page

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

LAYOUTS: dict[str, Layout] = {
    "padded": Padded(max_tokens=BUDGET, pad_to=LONGEST),
    "dynamic": Padded(max_tokens=BUDGET),
    "packed": Packed(max_tokens=BUDGET),
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
    records = train_all(corpus.paths[0], each)
    entries = [entry_of(name, record) for name, record in records.items()]
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
    replace_file(page, report_page(report_of(title, records, entries)).encode())
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


# Plans and training -----------------------------------------------------------------------------


def recipe_of(layout: Layout, each: int = SAMPLES) -> Recipe:
    """The recipe of a layout; all other settings are the same."""
    return Recipe(
        layout=layout,
        topology=Topology(dp=RANKS),
        steps=Steps(samples=each),
        cost=Cost.of_model(**SHAPE),
        sync_every="step",
    )


def plan_path(name: str) -> Path:
    """Path of the plan that rank 0 saves for a layout."""
    return FOLDER / f"demo-{name.replace(' ', '-')}.evenstep"


def entry_of(name: str, record: dict[str, Any]) -> Entry:
    """The plan of a layout, for the table and the page."""
    plan = Plan.load(plan_path(name))
    return Entry(name, plan, record["planning"] * plan.num_steps)


def report_of(title: str, records: dict[str, dict[str, Any]], entries: list[Entry]) -> Report:
    """The report of all layouts; its plan is that of the last, which is packed."""
    own = entries[-1]
    assert own.plan is not None
    return Report(
        title=title,
        plan=own.plan,
        own=own.name,
        entries=entries,
        runs={name: RunLog.of(record["log"]) for name, record in records.items()},
        advice=advice(own.plan, make_plan),
    )


class Planned:
    """Iterates over a stream, recording its steps and the time to plan each."""

    def __init__(self, stream: PlannedStream) -> None:
        self.stream = stream
        self.steps: list[Step] = []
        self.seconds: list[float] = []

    def __iter__(self) -> Iterator[Step]:
        steps = iter(self.stream)
        while True:
            began, compiled = time.perf_counter(), compile_seconds()
            step = next(steps, None)
            if step is None:
                return
            self.seconds.append(time.perf_counter() - began - (compile_seconds() - compiled))
            self.steps.append(step)
            yield step

    @property
    def plan(self) -> Plan:
        """The joined plan of all steps so far, for all ranks."""
        pairs = [(step.plan, step.sample_ids) for step in self.steps]
        plans = [plan for plan, _ in pairs if plan is not None]
        return join_plans(plans, [ids for _, ids in pairs if ids is not None])

    @property
    def per_step(self) -> float:
        """Mean seconds to plan a step. The first is left out: it also loads and compiles code."""
        return float(np.mean(self.seconds[1:] or self.seconds))


def train_all(corpus: Path, each: int) -> dict[str, dict[str, Any]]:
    """Train with every layout in one process per rank; returns the records of rank 0."""
    import torch

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    records = FOLDER / "demo.json"
    torch.multiprocessing.spawn(train_rank, (port, corpus, each, records), nprocs=RANKS)
    found: dict[str, dict[str, Any]] = json.loads(records.read_text())
    return found


def train_rank(rank: int, port: int, corpus: Path, each: int, records: Path) -> None:
    """The process of one rank."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    recipes = {name: recipe_of(layout, each) for name, layout in LAYOUTS.items()}
    found = {name: train(rank, name, recipe, corpus) for name, recipe in recipes.items()}
    if rank == 0:
        replace_file(records, json.dumps(found).encode())
    torch.distributed.destroy_process_group()


def stream_of(source: TokenFile, recipe: Recipe, rank: int) -> PlannedStream:
    """The steps of a rank, in the order of the corpus, which is already random."""
    lengths = source.lengths_of(np.arange(len(source)))
    return PlannedStream(
        source,
        recipe,
        world=World(rank, RANKS),
        shuffle=False,
        loss_tokens=lengths - 1,  # all tokens but the first
    )


def train(rank: int, name: str, recipe: Recipe, corpus: Path) -> dict[str, Any]:
    """Train with one layout, from the same initial weights."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from evenstep.demo.decoder import Decoder, DecoderShape
    from evenstep.tensors.losses import cross_entropy
    from evenstep.train.collectives import Distributed
    from evenstep.train.result import gathered
    from evenstep.train.runner import Runner
    from evenstep.train.watch import Watch

    torch.manual_seed(0)
    model = DistributedDataParallel(Decoder(DecoderShape(**SHAPE)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stream = stream_of(TokenFile(corpus), recipe, rank)
    planned = Planned(stream)
    runner = Runner(model=model, loss=cross_entropy(), collective=Distributed())
    results: list[Any] = []
    log: list[dict[str, Any]] = []
    with Watch(timeout=60), progress(rank, name) as advance:
        for step in planned:
            results.append(runner.run(step).reduce(runner.collective))
            times = gathered(results[-1], runner.collective)
            log.append({"step": len(log), **results[-1].to_dict(), **times})
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            advance(len(results), len(stream))
    if rank == 0:
        planned.plan.save(plan_path(name))
    steady = results[1:]  # the first step is a warm-up
    seconds = sum(result.timings.total for result in steady)
    return {
        "losses": [result.loss for result in results],
        "tokens_per_second": sum(r.tokens_per_second * r.timings.total for r in steady) / seconds,
        "micro_batches": sum(result.num_micro_batches for result in results),
        "planned": float(np.mean([result.planned_imbalance for result in results])),
        "measured": float(np.mean([result.measured_imbalance for result in steady])),
        "waiting": sum(result.timings.wait for result in steady) / seconds,
        "planning": planned.per_step,
        "log": log,
    }


def progress(rank: int, name: str) -> Any:
    """A progress bar on rank 0, nothing on other ranks."""
    return screen.progress(f"Training: {name}") if rank == 0 else _Silent()


class _Silent:
    def __enter__(self) -> Callable[[int, int], None]:
        return lambda done, total: None

    def __exit__(self, *_: object) -> None:
        pass


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
