"""Compare simulated steps with measured ones, and measure how fast `simulate` and `tune` are.

python benchmarks/simulation.py            everything, written to benchmarks/results
python benchmarks/simulation.py --quick    a small version
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import Bench
from benchmarks.lengths import draw
from benchmarks.runner import run
from benchmarks.tables import Section, Table, Target
from evenstep import Cost, Packed, Padded, Plan, Recipe, Steps, Topology, World
from evenstep.cli import main
from evenstep.core.layout import Layout
from evenstep.data import InMemory
from evenstep.data.planned import PlannedStream
from evenstep.demo.decoder import Decoder, DecoderShape
from evenstep.demo.run import BUDGET, LONGEST, SHAPE, samples
from evenstep.report import Cluster, simulate
from evenstep.tensors.losses import cross_entropy
from evenstep.train import Distributed, Runner

RANKS, WARM = 2, 2
WITHIN = 0.10
LAYOUTS: dict[str, Layout] = {
    "padded to the longest": Padded(max_tokens=BUDGET, pad_to=LONGEST),
    "dynamically batched": Padded(max_tokens=BUDGET),
    "packed": Packed(max_tokens=BUDGET),
}
MANY, PER_RANK, STEPS, SECONDS = 4096, 8, 100, 30.0

# Validation -----------------------------------------------------------------------------------


def train(rank: int, name: str, each: int, steps: int, folder: str) -> None:
    """One rank of a run; writes its busy seconds and the first rank its plans."""
    torch.set_num_threads(1)
    store = Path(folder, "store").as_uri()
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = Decoder(DecoderShape(**SHAPE))
    recipe = Recipe(
        layout=LAYOUTS[name],
        topology=Topology(dp=RANKS),
        steps=Steps(samples=each),
        cost=Cost.of_model(**SHAPE),
        sync_every="step",
    )
    stream = PlannedStream(InMemory(samples(steps * each)), recipe, world=World(rank, RANKS))
    runner = Runner(model=model, loss=cross_entropy(), collective=Distributed())
    optimizer = torch.optim.AdamW(model.parameters())
    found: list[Any] = []
    for number, step in enumerate(stream):
        begin = time.perf_counter()
        result = runner.run(step)
        found.append((list(result.busy), time.perf_counter() - begin))
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            assert step.plan is not None
            step.plan.save(Path(folder, f"{number}.evenstep"))
    torch.save(found, Path(folder, f"{rank}.pt"))
    torch.distributed.destroy_process_group()


def measurements(plan: Plan, busy: list[list[float]]) -> list[tuple[list[int], float]]:
    """(lengths, seconds) of each micro-batch that holds tokens; padded rows have their width."""
    found = []
    for rank in range(plan.num_ranks):
        for micro, seconds in zip(plan[0, rank], busy[rank], strict=True):
            lengths = micro.segments.length.tolist()
            if plan.recipe.layout.segments_per_row is not None:
                lengths = [micro.width] * micro.rows
            if lengths:
                found.append((lengths, seconds))
    return found


def validation(bench: Bench) -> Section:
    """Fit the cost to every other step, predict the steps between."""
    each, steps = bench.pick(32, 8), bench.pick(18, 6)
    table = Table(
        "Steps that the cost was not fitted to",
        {"layout": "", "steps": ",", "busy s": ".3f", "predicted s": ".3f", "mean off": "+.1%",
         "worst step": ".1%", "elapsed s": ".3f"},
    )  # fmt: skip
    worst = 0.0
    for name in LAYOUTS:
        bench.say(f"validation: {name}")
        with tempfile.TemporaryDirectory() as folder:
            options = (name, each, steps, folder)
            multiprocessing.spawn(train, options, nprocs=RANKS)
            plans = [Plan.load(Path(folder, f"{at}.evenstep")) for at in range(steps)]
            ranks = [torch.load(Path(folder, f"{rank}.pt")) for rank in range(RANKS)]
        busy = [[ranks[rank][at][0] for rank in range(RANKS)] for at in range(steps)]
        seen = [m for at in range(WARM, steps, 2) for m in measurements(plans[at], busy[at])]
        cluster = Cluster(cost=Cost.fit(seen))
        others = range(WARM + 1, steps, 2)
        predicted = np.array([simulate(plans[at], cluster).time[0] for at in others])
        measured = np.array([max(sum(own) for own in busy[at]) for at in others])
        elapsed = float(np.mean([max(rank[at][1] for rank in ranks) for at in others]))
        off = float(predicted.mean() / measured.mean()) - 1
        apart = np.abs(predicted / measured - 1)
        table.add(name, len(others), measured.mean(), predicted.mean(), off, apart.max(), elapsed)
        worst = max(worst, abs(off))
    return Section(
        f"The demo's model on {RANKS} processes, simulated and measured",
        [
            f"{steps} steps of {each} samples, gloo, one thread per process. Predicted: seconds of "
            "the slowest rank of each step, with a cost that Cost.fit fits to every other step. "
            "Measured: the most CPU seconds of a rank in its forwards and backwards, without "
            "waiting for the other rank or for a core. Elapsed: wall-clock time of the same steps, "
            "with preparation and exchange, on a machine that other work shares.",
        ],
        tables=[table],
        targets=[
            Target(f"predicted within {WITHIN:.0%} of measured", f"{worst:.1%}", worst <= WITHIN)
        ],
    )


# Speed ----------------------------------------------------------------------------------------


def speed(bench: Bench) -> Section:
    """4,096 ranks, 8 samples per rank, 100 steps, one strategy."""
    ranks, steps = bench.pick(MANY, 64), bench.pick(STEPS, 3)
    table = Table("One strategy", {"lengths": "", "simulate s": ".1f", "tune s": ".1f"})
    worst = 0.0
    fixed = [f"steps.samples={ranks * PER_RANK}", "layout.max_tokens=32768", "overflow=split"]
    shared = [word for key in fixed for word in ("--set", key)]
    device = ["--model", "llama-3-8b", "--gpu", "h200", "--json"]
    with tempfile.TemporaryDirectory() as folder:
        for name, corpus in bench.corpora.items():
            path = Path(folder, "lengths.npy")
            axes = ["--set", f"topology.dp={ranks}", "--only", "your settings"]
            calls = {
                "simulate": ["simulate", str(path), *shared, *device, *axes],
                "tune": [
                    "tune", str(path), *shared, *device, "--ranks", str(ranks), "--steps",
                    str(steps), "--set", "layout.kind=packed", "--set", "topology.cp=1",
                ],
            }  # fmt: skip
            if not table.rows:  # compile the kernels, on a few steps
                np.save(path, draw(corpus, ranks * PER_RANK * 2).astype(np.int32))
                for arguments in calls.values():
                    _seconds(arguments)
            np.save(path, draw(corpus, ranks * PER_RANK * steps).astype(np.int32))
            taken = []
            for command, arguments in calls.items():
                bench.say(f"speed: {command}, {name}")
                taken.append(_seconds(arguments))
            table.add(name, *taken)
            worst = max(worst, *taken)
    return Section(
        f"{ranks:,} ranks, {PER_RANK} samples per rank, {steps} steps, one strategy",
        ["The whole command, once, from reading the lengths to the result; kernels are compiled."],
        tables=[table],
        targets=[Target(f"under {SECONDS:.0f} s", f"{worst:.1f} s", worst < SECONDS)],
    )


def _seconds(arguments: list[str]) -> float:
    begin = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        code = main(arguments)
    assert code == 0, arguments
    return time.perf_counter() - begin


SECTIONS = {"validation": validation, "speed": speed}

if __name__ == "__main__":
    sys.exit(run("simulation", "Simulated steps", SECTIONS))
