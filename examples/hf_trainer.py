"""The Hugging Face Trainer on planned steps: what to change, and what it saves.

    python examples/hf_trainer.py        15 seconds on two cores

A class of two lines and a `recipe=` replace the batches of the Trainer. The tiny Llama here trains
twice, in padded batches of 4 and packed; a step has the same 16 samples each time, so the Trainer
logs the same losses. A third run is stopped after step 6 and resumed from its checkpoint.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

from evenstep import Packed, Padded, Recipe, Steps, make_plan
from evenstep.integrations.trainer import EvenstepMixin

STEP = Steps(samples=16)
RECIPES = {
    "padded batches of 4": Recipe(layout=Padded(samples=4), steps=STEP, balance="none"),
    "packed": Recipe(layout=Packed(max_tokens=1024), steps=STEP),
}
MICRO_BATCHES = 4  # of a step, at most


class PlannedTrainer(EvenstepMixin, Trainer):  # type: ignore[misc]
    """All that a Trainer needs; of TRL's SFTTrainer, see trl_sft.py."""


def made_samples(count: int) -> list[dict[str, Any]]:
    """Sequences that count upwards in one step width, most of them short."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(8 + rng.exponential(60, count).astype(int), 400)
    starts, widths = rng.integers(0, 128, count), rng.integers(1, 5, count)
    return [
        {"input_ids": (start + width * np.arange(length)) % 128}
        for start, width, length in zip(starts, widths, lengths, strict=True)
    ]


def tiny_llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, num_attention_heads=4, **sizes))


@dataclass
class Run:
    """The losses that the Trainer logged, and the time it took."""

    losses: list[float]
    seconds: float


def train(folder: str, recipe: Recipe, samples: list[dict[str, Any]], **options: Any) -> Run:
    arguments = TrainingArguments(
        folder,
        gradient_accumulation_steps=MICRO_BATCHES,
        learning_rate=3e-3,
        max_steps=12,
        logging_steps=1,
        save_steps=6,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = PlannedTrainer(tiny_llama(), arguments, train_dataset=samples, recipe=recipe)
    trainer.remove_callback(PrinterCallback)  # the table below is shorter
    started = time.perf_counter()
    trainer.train(**options)
    seconds = time.perf_counter() - started
    logged = trainer.state.log_history
    return Run([entry["loss"] for entry in logged if "loss" in entry], seconds)


def main() -> None:
    samples = made_samples(192)
    lengths = [len(sample["input_ids"]) for sample in samples]
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, recipe in RECIPES.items():
            runs[name] = train(f"{folder}/{name}", recipe, samples)
        halfway = f"{folder}/packed/checkpoint-6"
        resumed = train(f"{folder}/again", recipe, samples, resume_from_checkpoint=halfway)
    base = next(iter(runs.values()))
    print(f"\n{'':20}  padding  seconds  first and last loss  loss differs by")
    for name, run in runs.items():
        padding = make_plan(lengths, RECIPES[name]).stats()["padding_ratio"]
        apart = np.abs(np.subtract(run.losses, base.losses)).max()
        print(
            f"{name:20}  {padding:7.1%}  {run.seconds:7.1f}  "
            f"{run.losses[0]:9.3f} {run.losses[-1]:9.3f}  {apart:15.1e}"
        )
    apart = np.abs(np.subtract(resumed.losses, runs["packed"].losses)).max()
    print(f"packed, resumed after step 6: loss differs by {apart:.1e} from the run without a stop")


if __name__ == "__main__":
    main()
