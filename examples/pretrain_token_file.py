"""Pre-training from token files with a saved plan: documents split, packed, dealt to 4 ranks.

    python examples/pretrain_token_file.py        15 seconds on two cores

Documents are pieces of the Python standard library, a token per byte, in two token files (memory-
mapped; opening them takes the same time for any size). The plan of an epoch is made once, from
lengths alone; then it is checked and saved, which a job without GPUs can do. Training reads the
plan on 1 rank, then on the 4 ranks that it was made for, which are threads here. Losses are the
same, and so is a run that stops halfway and resumes from its cursor.
"""

from __future__ import annotations

import inspect
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evenstep import (
    Cost,
    Packed,
    Padded,
    Plan,
    PlannedStream,
    Recipe,
    Steps,
    Topology,
    World,
    make_plan,
)
from evenstep.data import TokenFile, write_token_file
from evenstep.demo import Decoder, DecoderShape
from evenstep.tensors import cross_entropy
from evenstep.testing import assert_valid_plan, run_ranks
from evenstep.train import Alone, Collective, Runner

JOB = Recipe(
    layout=Packed(max_tokens=1024),
    topology=Topology(dp=4),
    steps=Steps(samples=24),
    cost=Cost.of_model(layers=2, hidden=64, ffn=128, heads=4, vocab=256),
    overflow="split",  # a longer document continues in other micro-batches; no label is lost
)
USUAL = replace(JOB, layout=Padded(samples=4, max_tokens=4096), balance="none")


def write_files(folder: Path) -> TokenFile:
    """Documents in two files, as a corpus of several shards; both are one source."""
    documents = []
    for name in ("bisect", "copy", "heapq", "shlex", "string"):
        pieces = inspect.getsource(__import__(name)).split("\n\n")
        documents += [np.frombuffer(text.encode(), np.uint8) for text in pieces if len(text) > 40]
    half = len(documents) // 2
    write_token_file(folder / "part-0.tokens", documents[:half], dtype=np.uint16)
    write_token_file(folder / "part-1.tokens", documents[half:], dtype=np.uint16)
    return TokenFile(str(folder / "part-*.tokens"))


def train(
    files: str, plan: Path, state: dict[str, Any], ranks: Collective, stop: int | None = None
) -> tuple[list[float], dict[str, Any]]:
    """The loss of each step, and what a checkpoint holds."""
    model = Decoder(DecoderShape(vocab=256))
    model.load_state_dict(state["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    world = World(ranks.rank, ranks.size)
    stream = PlannedStream.from_plan(TokenFile(files), Plan.load(plan), world=world)
    if "cursor" in state:
        stream.load_state_dict(state["cursor"])
    runner = Runner(model=model, loss=cross_entropy(), collective=ranks)
    losses = []
    for step in stream:
        losses.append(runner.run(step).loss)
        optimizer.step()
        optimizer.zero_grad()
        if len(losses) == stop:
            break
    return losses, {"model": model.state_dict(), "cursor": stream.state_dict()}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = write_files(Path(folder))
        lengths = source.lengths_of(np.arange(len(source)))
        print(f"{len(source)} documents of {lengths.min()} to {lengths.max()} tokens, 4 ranks")
        print(f"{'':20}  padding  micro-batches per rank  imbalance")
        for name, recipe in {"padded batches of 4": USUAL, "packed": JOB}.items():
            plan = make_plan(lengths, recipe)
            assert_valid_plan(plan)
            found, each = plan.stats(), plan.num_micro_batches // plan.num_ranks
            print(
                f"{name:20}  {found['padding_ratio']:7.1%}  {each:22}  "
                f"{found['imbalance_cost_micro_batch']:9.3f}"
            )
        files, saved = f"{folder}/part-*.tokens", Path(folder) / "epoch.plan"
        # The order of documents is that of a stream with this seed, in epoch 0.
        PlannedStream(source, JOB, world=World(0, 4), seed=0).plan_epoch(0).save(saved)
        start = {"model": Decoder(DecoderShape(vocab=256)).state_dict()}
        losses, _ = train(files, saved, start, Alone())
        print(f"{len(losses)} steps on 1 rank, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        four = run_ranks(4, lambda ranks: train(files, saved, start, ranks)[0])
        print(f"on 4 ranks: loss differs by {np.abs(np.subtract(four[0], losses)).max():.1e}")
        half, checkpoint = train(files, saved, start, Alone(), stop=len(losses) // 2)
        rest, _ = train(files, saved, checkpoint, Alone())
        print(f"resumed: loss differs by {np.abs(np.subtract(half + rest, losses)).max():.1e}")


if __name__ == "__main__":
    main()
