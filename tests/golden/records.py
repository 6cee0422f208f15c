"""Stored records: streams, training steps, commands and configurations as they were.

`python -m tests.golden.records` writes `records.json` anew. What depends on how a step is divided
is left out: of a planned stream the samples of each step are stored, of a training step its loss
and the projection of every parameter's gradient on fixed random directions.
"""

import hashlib
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evenstep import (
    Cost,
    Packed,
    Padded,
    PlannedStream,
    PooledStream,
    Recipe,
    Step,
    Steps,
    Topology,
    World,
)
from evenstep.cli import main
from evenstep.data import InMemory
from evenstep.errors import EvenstepError
from tests.config import dialect_files
from tests.config.dialect_files import Case
from tests.internals import Layout
from tests.train.running import Plan, Way, run_plan, samples_of, steps_of
from tests.train.steps import NORMALIZATIONS, model_of

FILE = Path(__file__).with_name("records.json")
STREAMS, TRAINED = 500, 200
LAYOUTS: tuple[Layout, ...] = (
    Packed(max_tokens=48),
    Padded(max_tokens=64),
    Packed(rows=2, pad_to=40),
    Padded(samples=3),
)


def stream_record(number: int) -> str:
    """A digest of the first steps of a random stream on all ranks, with their cursors."""
    rng = np.random.default_rng(number)
    lengths, dp = rng.integers(1, 40, int(rng.integers(4, 60))), int(rng.integers(1, 5))
    pooled = number % 2 == 1
    layout = LAYOUTS[int(rng.integers(len(LAYOUTS)))]
    sizes = (Steps(samples=8), Steps(tokens=120), Steps(micro_batches=2))
    recipe = Recipe(
        layout=layout,
        topology=Topology(dp=dp),
        steps=sizes[2 if pooled else int(rng.integers(3))],
        overflow="split" if rng.integers(2) else "error",
        cost=Cost(per_token=1, per_pair=0.1),
    )
    source = InMemory([{"input_ids": [i] * int(n)} for i, n in enumerate(lengths)])
    stream_of = PooledStream if pooled else PlannedStream
    streams = [
        stream_of(source, recipe, world=World(rank, dp), seed=number, shuffle=bool(number % 3))
        for rank in range(dp)
    ]
    try:
        steps = [list(islice(iter(stream), 6)) for stream in streams]
    except EvenstepError as error:
        return type(error).__name__
    shown = [list(shown_pools(rank) if pooled else shown_steps(rank)) for rank in steps]
    if not pooled:  # the union over ranks does not depend on the plan
        joined = [
            sorted(np.concatenate([ids for ids, _ in step])) for step in zip(*shown, strict=True)
        ]
        shown = [joined, [cursor for _, cursor in shown[0]]]
    text = json.dumps(shown, default=int, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def shown_steps(steps: list[Step]) -> Iterator[tuple[Any, Any]]:
    """This rank's samples of each step, and the position after it."""
    for step in steps:
        yield step.own_sample_ids, step.cursor.to_dict()


def shown_pools(steps: list[Step]) -> Iterator[Any]:
    """Samples and segments of each micro-batch, and the position after the step."""
    for step in steps:
        segments = [micro.segments for micro in step.micro_batches]
        yield [
            [part.sample.tolist(), part.start.tolist(), part.length.tolist()] for part in segments
        ]
        yield step.cursor.to_dict()


def training_record(number: int) -> list[float]:
    """The loss of a random step and a number per parameter that its gradient gives."""
    rng = np.random.default_rng(1000 + number)
    lengths = rng.integers(2, 12, int(rng.integers(1, 9))).tolist()
    work = samples_of(lengths, seed=number, masked=0.2)
    ways: tuple[Way, ...] = ("batches", "collated", "planned")
    layouts = (Packed(max_tokens=24), Padded(samples=2, max_tokens=24), Packed(max_tokens=999))
    plan = Plan(
        ways[number % 3], layouts[int(rng.integers(3))], dp=int(rng.integers(1, 4)), seed=number
    )
    name = sorted(NORMALIZATIONS)[number % len(NORMALIZATIONS)]
    try:
        ran = run_plan(plan, steps_of(plan, work), model_of(), normalization=NORMALIZATIONS[name])[
            0
        ]
    except EvenstepError:
        return []
    draw = torch.Generator().manual_seed(number)
    gradients = [gradient for _, gradient in sorted(ran.gradient.items())]
    return [float(ran.result.loss)] + [
        float((g * torch.randn(g.shape, generator=draw, dtype=g.dtype)).sum()) for g in gradients
    ]


def command_records() -> dict[str, dict[str, Any]]:
    """The values that each command prints for fixed inputs, by their dotted names."""
    with tempfile.TemporaryDirectory() as folder:
        saved, plan = Path(folder) / "lengths.npy", Path(folder) / "saved.plan"
        np.save(saved, np.random.default_rng(0).integers(10, 900, 400))
        options = ["--max-tokens", "2k", "--ranks", "4", "--samples-per-step", "64"]
        model = ["--model", "llama-3-8b"]
        lines = {
            "plan": ["plan", str(saved), *options, "--out", str(plan)],
            "check": ["check", str(plan)],
            "report": ["report", str(plan)],
            "compare": ["compare", str(saved), *options, *model],
            "simulate": ["simulate", str(saved), *options, *model, "--gpu", "h200"],
            "tune": ["tune", str(saved), *model, "--gpu", "h200", "--ranks", "8"],
        }
        return {
            name: dict(leaves(json.loads(printed([*line, "--json"]))))
            for name, line in lines.items()
        }


def printed(line: list[str]) -> str:
    """What a command prints on standard output."""
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(io.StringIO()):
        main(line)
    return output.getvalue()


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """{"a": [1, {"b": 2}]} -> ("a.0", 1), ("a.1.b", 2); without digests, times and sentences."""
    children = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in children:
        if isinstance(child, dict | list):
            yield from leaves(child, f"{name}{key}.")
        elif key not in ("fingerprint", "seconds", "reason", "plan"):
            yield f"{name}{key}", child


def configuration_records() -> dict[str, str]:
    """Every file of other systems in the tests, converted."""
    records = {}
    cases = {name: case for name, case in vars(dialect_files).items() if isinstance(case, Case)}
    for name, case in sorted(cases.items()):
        with tempfile.TemporaryDirectory() as folder:
            line = ["config", "convert", str(case.write(Path(folder))), "--from", case.dialect]
            records[name] = printed(line).replace(folder, "")
    return records


RECORDS: dict[str, Callable[[], Any]] = {
    "streams": lambda: [stream_record(number) for number in range(STREAMS)],
    "training": lambda: [training_record(number) for number in range(TRAINED)],
    "commands": command_records,
    "configurations": configuration_records,
}

if __name__ == "__main__":
    FILE.write_text(json.dumps({name: make() for name, make in RECORDS.items()}, indent=0) + "\n")
    print(f"Wrote {FILE.name}")
