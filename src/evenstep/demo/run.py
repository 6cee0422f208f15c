"""`make demo`: a small model trained on the standard library in three ways, by two processes.

source -> stream -> plan -> batch -> runner, three times with the same samples in every step:
padded to the longest, dynamically batched, packed. The loss of every step is the same; what it
takes is not. Each step is planned once by each rank, and the plans that ran are those that are
drawn.
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
from rich.table import Table

from evenstep import screen
from evenstep.core.archive import replace_file
from evenstep.core.cost import Cost
from evenstep.core.joining import join_plans
from evenstep.core.layout import Layout, Packed, Padded
from evenstep.core.plan import Plan
from evenstep.core.recipe import Recipe, Steps
from evenstep.core.step import Step
from evenstep.core.topology import Topology
from evenstep.core.world import World
from evenstep.data.sources.token_file import TokenFile
from evenstep.data.sources.token_writer import write_token_file
from evenstep.data.streams.planned import PlannedStream
from evenstep.report import Entry, comparison_page

RANKS = 2
STEPS = 12
SAMPLES = 64  # of a step
LONGEST = 2048  # tokens of a sample; longer ones are cut when they are stored
BUDGET = 8192  # slots of a micro-batch
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
    "padded to the longest": Padded(max_tokens=BUDGET, pad_to=LONGEST),
    "dynamically batched": Padded(max_tokens=BUDGET),
    "packed": Packed(max_tokens=BUDGET),
}


def main(steps: int = STEPS, each: int = SAMPLES) -> None:
    """Store the corpus, train three times, print one table, and leave a page with a picture.

    So many `steps` of `each` so many samples.
    """
    console = screen.console()
    FOLDER.mkdir(exist_ok=True)
    with screen.progress("Reading the standard library"):
        corpus = write_token_file(FOLDER / "demo.tokens", samples(steps * each), dtype=np.uint8)
    lengths = corpus.lengths_of(np.arange(len(corpus)))
    console.print(
        f"Functions and classes of the Python standard library, a byte is a token: "
        f"{len(lengths):,} samples, {lengths.sum():,} tokens, the median "
        f"{int(np.median(lengths)):,}, the longest {lengths.max():,}.\n{RANKS} processes, "
        f"{each} samples a step, micro-batches of at most {BUDGET:,} slots.\n"
    )
    records = train_all(corpus.path, each)
    entries = [entry_of(name, record) for name, record in records.items()]
    console.print(table(records, entries))
    losses = np.array([record["losses"] for record in records.values()])
    console.print(
        f"\nThe losses of a step differ by at most {np.ptp(losses, axis=0).max():.1e}: the same "
        f"samples, the same gradient, however they were cut."
    )
    page = FOLDER / "demo.html"
    title = f"{steps} steps of the Python standard library on {RANKS} ranks"
    replace_file(page, comparison_page(entries, title).encode())
    console.print(f"The plans are drawn in {page}: open it in a browser.")


# The corpus -------------------------------------------------------------------------------------


def samples(count: int) -> list[dict[str, Any]]:
    """So many functions and classes of the standard library, in a seeded random order."""
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
    """The source of each function and class of a module, the longest cut to what we store."""
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
    """The same for all layouts but the layout itself."""
    return Recipe(
        layout=layout,
        topology=Topology(dp=RANKS),
        steps=Steps(samples=each),
        cost=Cost.of_model(**SHAPE),
        sync_every="step",
    )


def plan_path(name: str) -> Path:
    """Where rank 0 saves the plan of all steps of a layout."""
    return FOLDER / f"demo-{name.replace(' ', '-')}.evenstep"


def entry_of(name: str, record: dict[str, Any]) -> Entry:
    """What a layout ran, for the table and the picture."""
    plan = Plan.load(plan_path(name))
    return Entry(name, plan, record["planning"] * plan.num_steps)


class Planned:
    """The steps of a stream, with their plans kept and the time that each took to plan."""

    def __init__(self, stream: PlannedStream) -> None:
        self.stream = stream
        self.steps: list[Step] = []
        self.seconds: list[float] = []

    def __iter__(self) -> Iterator[Step]:
        steps = iter(self.stream)
        while True:
            began = time.perf_counter()
            step = next(steps, None)
            if step is None:
                return
            self.seconds.append(time.perf_counter() - began)
            self.steps.append(step)
            yield step

    @property
    def plan(self) -> Plan:
        """The plan of all steps so far, an epoch's, on all ranks."""
        pairs = [(step.plan, step.sample_ids) for step in self.steps]
        plans = [plan for plan, _ in pairs if plan is not None]
        return join_plans(plans, [ids for _, ids in pairs if ids is not None])

    @property
    def per_step(self) -> float:
        """Seconds to plan a step. The first, which loads or compiles kernels, is left out."""
        return float(np.mean(self.seconds[1:] or self.seconds))


def train_all(corpus: Path, each: int) -> dict[str, dict[str, Any]]:
    """Train with every layout in real processes that find each other; what rank 0 recorded."""
    import torch

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    records = FOLDER / "demo.json"
    torch.multiprocessing.spawn(train_rank, (port, corpus, each, records), nprocs=RANKS)
    found: dict[str, dict[str, Any]] = json.loads(records.read_text())
    return found


def train_rank(rank: int, port: int, corpus: Path, each: int, records: Path) -> None:
    """One process."""
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
    """A rank's steps, in the corpus's own order, which is a random one."""
    lengths = source.lengths_of(np.arange(len(source)))
    return PlannedStream(
        source,
        recipe,
        world=World(rank, RANKS),
        shuffle=False,
        loss_tokens=lengths - 1,  # all but each first token
    )


def train(rank: int, name: str, recipe: Recipe, corpus: Path) -> dict[str, Any]:
    """Train from the same beginning with one layout."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from evenstep.demo.decoder import Decoder, DecoderShape
    from evenstep.tensors.losses import cross_entropy
    from evenstep.train.collectives import Distributed
    from evenstep.train.runner import Runner
    from evenstep.train.watch import Watch

    torch.manual_seed(0)
    model = DistributedDataParallel(Decoder(DecoderShape(**SHAPE)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stream = stream_of(TokenFile(corpus), recipe, rank)
    planned = Planned(stream)
    runner = Runner(model=model, loss=cross_entropy(), collective=Distributed())
    results = []
    with Watch(timeout=60), progress(rank, name) as advance:
        for step in planned:
            results.append(runner.run(step).reduce(runner.collective))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            advance(len(results), len(stream))
    if rank == 0:
        planned.plan.save(plan_path(name))
    steady = results[1:]  # the first step warms everything up
    seconds = sum(result.timings.total for result in steady)
    return {
        "losses": [result.loss for result in results],
        "tokens_per_second": sum(r.tokens_per_second * r.timings.total for r in steady) / seconds,
        "micro_batches": sum(result.num_micro_batches for result in results),
        "planned": float(np.mean([result.planned_imbalance for result in results])),
        "measured": float(np.mean([result.measured_imbalance for result in steady])),
        "waiting": sum(result.timings.wait for result in steady) / seconds,
        "planning": planned.per_step,
    }


def progress(rank: int, name: str) -> Any:
    """A bar on rank 0, nothing on the others."""
    return screen.progress(f"Training: {name}") if rank == 0 else _Silent()


class _Silent:
    def __enter__(self) -> Callable[[int, int], None]:
        return lambda done, total: None

    def __exit__(self, *_: object) -> None:
        pass


def table(records: dict[str, dict[str, Any]], entries: list[Entry]) -> Table:
    """One column for each layout; the loss of every step below."""
    found = list(records.values())
    least = found[0]["tokens_per_second"]
    made = Table(title="The same steps, cut in three ways")
    made.add_column("")
    for name in records:
        made.add_column(name, justify="right")
    speeds = [record["tokens_per_second"] for record in found]
    made.add_row("real tokens a second", *(f"{s:,.0f} ({s / least:.2f}×)" for s in speeds))
    made.add_row("slots", *(f"{entry.stats['slots']:,}" for entry in entries))
    made.add_row("padding", *(f"{entry.stats['padding_ratio']:.1%}" for entry in entries))
    made.add_row("micro-batches a rank", *(f"{record['micro_batches']:,}" for record in found))
    made.add_row("imbalance, planned", *(f"{record['planned']:.4f}×" for record in found))
    made.add_row("imbalance, measured", *(f"{record['measured']:.3f}×" for record in found))
    made.add_row("time to plan a step", *(f"{record['planning'] * 1e3:.1f} ms" for record in found))
    made.add_row("waiting for data", *(f"{record['waiting']:.1%}" for record in found))
    made.add_section()
    for step in range(len(found[0]["losses"])):
        made.add_row(f"loss of step {step}", *(f"{r['losses'][step]:.6f}" for r in found))
    return made
