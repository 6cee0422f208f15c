"""A loop with accelerate on planned steps: what to change, and what it saves.

    python examples/accelerate_loop.py        10 seconds on two cores
    accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py

`accelerate_loader` replaces the dataloader; the loop itself stays as it is. The tiny Llama here
trains twice, in padded batches of 4 and packed, on the same 16 samples per step, so losses are the
same, also on two processes. Then the packed run is stopped after step 6 and resumed from what
`accelerator.save_state` wrote.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import LlamaConfig, LlamaForCausalLM

from evenstep import Packed, Padded, PlannedStream, Recipe, Steps, Topology, World
from evenstep.data import InMemory
from evenstep.integrations.accelerate import accelerate_loader

STEP = Steps(samples=16)
RECIPES = {
    "padded batches of 4": Recipe(layout=Padded(samples=4), steps=STEP, balance="none"),
    "packed": Recipe(layout=Packed(max_tokens=1024), steps=STEP),
}
EPOCHS, MICRO_BATCHES = 2, 4  # at most 4 micro-batches of a step on each process


def made_samples(count: int) -> list[dict[str, Any]]:
    """Sequences that count upwards in steps of 1 to 4, most of them short."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(8 + rng.exponential(60, count).astype(int), 400)
    starts, widths = rng.integers(0, 128, count), rng.integers(1, 5, count)
    return [
        {"input_ids": (start + width * np.arange(length)) % 128}
        for start, width, length in zip(starts, widths, lengths, strict=True)
    ]


class Training:
    """Everything that is prepared by accelerate, and the loop."""

    def __init__(self, samples: list[dict[str, Any]], recipe: Recipe) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_attention_heads=4, **sizes))
        self.accelerator = Accelerator(gradient_accumulation_steps=MICRO_BATCHES, cpu=True)
        world = World(self.accelerator.process_index, self.accelerator.num_processes)
        recipe = replace(recipe, topology=Topology(dp=world.size))
        self.stream = PlannedStream(InMemory(samples), recipe, world=world)
        self.loader = accelerate_loader(self.accelerator, self.stream, model=model)  # not prepared
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def steps(self) -> Iterator[float]:
        """Train, and yield the loss of each step."""
        held = []
        for _ in range(self.loader.epoch, EPOCHS):
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch).loss
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                held.append(self.accelerator.reduce(loss.detach(), "mean"))
                if self.accelerator.sync_gradients:
                    yield float(torch.stack(held).mean())
                    held.clear()

    def padding(self) -> float:
        """The share of padding in the first epoch, from its plan."""
        return float(self.stream.plan_epoch(0).stats()["padding_ratio"])


def main() -> None:
    samples, rows, base = made_samples(96), [], np.empty(0)
    for name, recipe in RECIPES.items():
        training = Training(samples, recipe)
        started = time.perf_counter()
        losses = np.array(list(training.steps()))
        seconds = time.perf_counter() - started
        base = base if len(base) else losses
        rows.append((name, training.padding(), seconds, losses, np.abs(losses - base).max()))

    with tempfile.TemporaryDirectory() as own:
        folder = broadcast_object_list([own])[0]  # that of the first process
        first = Training(samples, recipe)
        for number, _ in enumerate(first.steps(), start=1):
            if number == 6:
                first.accelerator.save_state(folder)
                break
        second = Training(samples, recipe)
        second.accelerator.load_state(folder)
        apart = np.abs(np.array(list(second.steps())) - losses[6:]).max()
        second.accelerator.wait_for_everyone()

    say = training.accelerator.print  # on the first process alone
    say(f"{'':20}  padding  seconds  first and last loss  loss differs by")
    for name, padding, seconds, losses, differs in rows:
        ends = f"{losses[0]:9.3f} {losses[-1]:9.3f}"
        say(f"{name:20}  {padding:7.1%}  {seconds:7.1f}  {ends}  {differs:15.1e}")
    say(f"packed, resumed after step 6: loss differs by {apart:.1e} from the run without a stop")


if __name__ == "__main__":
    main()
