"""SFT in your own PyTorch loop: a chat JSONL file, packed, with loss on the assistant's tokens.

    python examples/sft_own_loop.py        15 seconds on two cores

The chats are questions about the Python standard library, written to a file first. The loop runs
three times: in padded batches of 8, packed, and packed but stopped halfway and resumed in a new
model from a checkpoint. A step has the same 16 chats each time, so losses are the same as well.
"""

from __future__ import annotations

import inspect
import json
import shutil
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evenstep import Packed, Padded, PlannedStream, Recipe, Steps
from evenstep.data import Corpus, TokenFile
from evenstep.demo import Decoder, DecoderShape
from evenstep.tensors import cross_entropy
from evenstep.train import Runner, StepResult

STEP = Steps(samples=16)  # samples of an optimizer step, whatever the layout
PADDED = Recipe(layout=Padded(samples=8), steps=STEP, balance="none")
PACKED = Recipe(layout=Packed(max_tokens=1024), steps=STEP)


def write_chats(path: Path) -> None:
    """One chat per line, in the format of most SFT data."""
    functions = [
        (f"{module.__name__}.{name}", function)
        for module in (inspect, json, shutil, tempfile, textwrap, time)
        for name, function in inspect.getmembers(module, callable)
        if inspect.getdoc(function) and not name.startswith("_")
    ]
    with path.open("w") as file:
        for name, function in functions:
            messages = [
                {"role": "user", "content": f"What does {name} do?"},
                {"role": "assistant", "content": str(inspect.getdoc(function))[:400]},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


class Training:
    """A model, its optimizer and its data: what a checkpoint holds."""

    def __init__(self, chats: TokenFile, recipe: Recipe) -> None:
        torch.manual_seed(0)
        self.model = Decoder(DecoderShape(vocab=256))  # or your own; a Hugging Face model works too
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.runner = Runner(model=self.model, loss=cross_entropy())
        self.stream = PlannedStream(chats, recipe, seed=0, infinite_loop=True)

    def train(self, steps: int) -> list[StepResult]:
        results = []
        for _, step in zip(range(steps), self.stream, strict=False):
            results.append(self.runner.run(step))  # .grad: of the mean over all loss tokens
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return results

    def save(self, path: Path) -> None:
        state = {name: getattr(self, name).state_dict() for name in ("model", "optimizer")}
        torch.save({**state, "cursor": self.stream.state_dict()}, path)

    def load(self, path: Path) -> None:
        state: dict[str, Any] = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.stream.load_state_dict(state["cursor"])  # continues after the last step that ran


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_chats(folder / "chats.jsonl")
        # Tokens and the mask of the assistant's tokens, in a memory-mapped file. Without
        # tokenizer="folder/of/a/tokenizer", tokens are bytes.
        corpus = Corpus(paths=str(folder / "chats.jsonl"), format="chat")
        chats = corpus.stored(folder / "chats.tokens")
        lengths = chats.lengths_of(np.arange(len(chats)))
        print(f"{len(chats)} chats of {lengths.min()} to {lengths.max()} tokens")
        runs = {"padded batches of 8": Training(chats, PADDED).train(20)}
        runs["packed"] = Training(chats, PACKED).train(20)

        first = Training(chats, PACKED)
        results = first.train(10)
        first.save(folder / "checkpoint.pt")
        second = Training(chats, PACKED)
        second.load(folder / "checkpoint.pt")
        runs["packed, resumed"] = results + second.train(10)
        show(runs)


def show(runs: dict[str, list[StepResult]]) -> None:
    base = next(iter(runs.values()))
    print(f"{'':20}  padding  seconds  first and last loss  loss differs by")
    for name, results in runs.items():
        padding = 1 - sum(r.tokens for r in results) / sum(r.slots for r in results)
        seconds = sum(result.timings.total for result in results)
        apart = max(abs(a.loss - b.loss) for a, b in zip(results, base, strict=True))
        print(
            f"{name:20}  {padding:7.1%}  {seconds:7.1f}  "
            f"{results[0].loss:9.3f} {results[-1].loss:9.3f}  {apart:15.1e}"
        )


if __name__ == "__main__":
    main()
