"""The CPU time of a runner per micro-batch, compared with a loop by hand over the same batches.

python benchmarks/overhead.py [--turns N]    writes benchmarks/results/overhead.md and .json

A tiny decoder on the CPU with one thread, so that what surrounds the model shows. Ways take turns
in one process; CPU time of the process, median of the turns. Batches are collated already.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch
from torch.nn import functional

from benchmarks import machine, tables
from benchmarks.tables import Section, Table, Target
from evenstep import Packed, Recipe, make_plan
from evenstep.demo import Decoder, DecoderShape
from evenstep.tensors import Collator, cross_entropy
from evenstep.train import Runner

VOCAB, MICRO_BATCHES = 64, 16
MOST = {"runner, plain loss": 1.5, "runner, cross_entropy()": 2.0}
BASE = "loop by hand, plain loss"


def plain(logits: Any, batch: Any) -> Any:
    """The loss that one writes by hand."""
    return functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")


class Bare(torch.nn.Module):  # type: ignore[misc]
    """An embedding and a linear layer: nearly nothing besides the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(VOCAB, 32), torch.nn.Linear(32, VOCAB)

    def forward(self, batch: Any) -> Any:
        return self.head(self.embed(batch.tokens))


def ways(layers: int) -> dict[str, Callable[[], Any]]:
    """A step in several ways; each leaves its gradient in the same model."""
    torch.manual_seed(0)
    shape = DecoderShape(vocab=VOCAB, hidden=32, layers=layers, heads=2, kv_heads=1, ffn=48)
    model, loss = Decoder(shape) if layers else Bare(), cross_entropy()
    rng = np.random.default_rng(0)
    lengths = [16] * 4 * MICRO_BATCHES
    samples = [{"input_ids": torch.from_numpy(rng.integers(0, VOCAB, n))} for n in lengths]
    plan = make_plan(lengths, Recipe(layout=Packed(max_tokens=64)))
    batches = [Collator()(micro, samples) for micro in plan[0, 0]]
    assert len(batches) == MICRO_BATCHES
    labels = sum(int((batch.labels != -100).sum()) for batch in batches)
    runners = {
        "runner, plain loss": Runner(model=model, loss=plain),
        "runner, cross_entropy()": Runner(model=model, loss=loss),
    }

    def by_hand() -> None:
        model.zero_grad()
        for batch in batches:
            (plain(model(batch), batch) / labels).backward()

    def run(runner: Runner) -> None:
        model.zero_grad()
        runner.run(batches)

    return {BASE: by_hand} | {
        name: lambda runner=runner: run(runner) for name, runner in runners.items()
    }


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(
        "CPU time of a micro-batch of 64 slots",
        {"layers": "d", "": "", "µs": ".0f", "of the loop": ".2f"},
    )
    targets = []
    for layers in (0, 1, 2):
        every = ways(layers)
        times: dict[str, list[float]] = {name: [] for name in every}
        for _ in range(options.turns):
            for name, step in every.items():
                began = time.process_time()
                step()
                times[name].append(time.process_time() - began)
        for name, seconds in times.items():
            middle = statistics.median(seconds)
            ratio = statistics.median(a / b for a, b in zip(seconds, times[BASE], strict=True))
            table.add(layers, name, 1e6 * middle / MICRO_BATCHES, ratio)
            if layers and name in MOST:
                most = MOST[name]
                about = f"{name}, layers: {layers}, at most {most:g}×"
                targets.append(Target(about, f"{ratio:.2f}×", ratio <= most))
    notes = [
        f"Steps of {MICRO_BATCHES} micro-batches of a decoder with hidden size 32, one thread, "
        f"{options.turns} turns. A runner also measures busy time, counts tokens and computes the "
        f"norm of the gradient, which the loop does not. Without layers: an "
        f"embedding and a linear layer, nearly nothing besides the loss; shown, not judged."
    ]
    section = Section("Runner and loop by hand", notes, tables=[table], targets=targets)
    data = {"machine": machine.facts(), "section": section.to_dict()}
    text = json.dumps(data, indent=1, ensure_ascii=False)
    about = tables.markdown_table(Table("Machine", {"": "", " ": ""}, [*machine.facts().items()]))
    texts = [
        "# CPU time of the runner", "Written by `python benchmarks/overhead.py`.", about,
        tables.markdown(section),
    ]  # fmt: skip
    print("\n\n".join(texts))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "overhead.json").write_text(text + "\n", encoding="utf-8")
    (options.out / "overhead.md").write_text("\n\n".join(texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
