"""Training runs with the Trainer, SFTTrainer and accelerate that are stopped and resumed."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from evenstep import Packed, Padded, PlannedStream, Recipe, Steps, Topology, World
from evenstep.data import MeasuredMapped
from evenstep.integrations.accelerate import accelerate_loader
from evenstep.integrations.trainer import EvenstepMixin
from tests.internals import Layout

VOCAB, EPOCHS = 64, 3
LENGTHS = np.random.default_rng(13).integers(2, 24, 83).tolist()
LAYOUTS: dict[str, Layout] = {"packed": Packed(max_tokens=48), "padded": Padded(max_tokens=48)}


CRASHES = False  # whether a run is stopped by ending its process


def stop_now() -> None:
    if CRASHES:
        os._exit(9)
    raise KilledError


class KilledError(Exception):
    """Ends a run, as a crash does."""


@dataclass
class Samples:
    """Samples that note which of them were read in which pass."""

    reads: list[list[int]] = field(default_factory=lambda: [[]])

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, item: int) -> dict[str, Any]:
        self.reads[-1].append(item)
        tokens = np.random.default_rng(item).integers(1, VOCAB, LENGTHS[item])
        return {"input_ids": torch.from_numpy(tokens), "name": f"sample {item}"}


def tiny_model(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, **changes,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def parameters(model: Any) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


class Events(TrainerCallback):  # type: ignore[misc]
    """Begins a new list of reads with each epoch, and kills the run before a step."""

    def __init__(self, samples: Samples, stop: int | None) -> None:
        self.samples, self.stop = samples, stop
        self.sums: list[float] = []  # of all parameters, after each step

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        self.sums.append(sum(float(p.detach().double().sum()) for p in model.parameters()))

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.samples.reads.append([])

    def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == self.stop:
            stop_now()


class PlannedTrainer(EvenstepMixin, Trainer):  # type: ignore[misc]
    pass


def arguments_of(kind: Any, folder: Path, **changes: Any) -> Any:
    options = {
        "output_dir": str(folder), "num_train_epochs": EPOCHS, "gradient_accumulation_steps": 2,
        "use_cpu": True, "report_to": [], "save_steps": 2, "logging_steps": 1, "disable_tqdm": True,
        "learning_rate": 1e-2, "logging_nan_inf_filter": False,
    }  # fmt: skip
    return kind(**{**options, **changes})


def run_trainer(
    folder: Path, layout: str, stop: int | None = None, resume: bool = False, **changes: Any
) -> dict[str, Any]:
    """A run of the Trainer; `stop` is the step before which it is killed."""
    samples = Samples()
    steps, epochs = changes.pop("steps", Steps()), changes.pop("epochs", EPOCHS)
    events = Events(samples, stop)
    trainer = PlannedTrainer(
        tiny_model(),
        arguments_of(TrainingArguments, folder, num_train_epochs=epochs, **changes),
        train_dataset=samples,
        lengths=LENGTHS,
        recipe=Recipe(layout=LAYOUTS[layout], steps=steps),
        callbacks=[events],
    )
    return {**trained(trainer, samples, resume), "sums": events.sums}


def trained(trainer: Any, samples: Samples, resume: bool) -> dict[str, Any]:
    try:
        trainer.train(resume_from_checkpoint=resume)
    except KilledError:
        pass
    else:
        assert trainer.state.global_step == trainer.state.max_steps
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "reads": samples.reads[1:],
        "losses": losses,
        "parameters": parameters(trainer.model),
        "fillers": [
            step for step in range(trainer.state.max_steps) if trainer.step_sampler.is_filler(step)
        ],
        "steps": trainer.state.max_steps,
    }


def run_sft(
    folder: Path, layout: str, stop: int | None = None, resume: bool = False
) -> dict[str, Any]:
    """A run of TRL's SFTTrainer."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    class PlannedSFT(EvenstepMixin, SFTTrainer):  # type: ignore[misc]
        pass

    words = Tokenizer(WordLevel({f"w{n}": n for n in range(VOCAB)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
    samples = Samples()
    rows = Dataset.from_list(
        [{"input_ids": samples[n]["input_ids"].tolist()} for n in range(len(LENGTHS))]
    )
    arguments = arguments_of(
        SFTConfig,
        folder,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        bf16=False,
    )
    trainer = PlannedSFT(
        tiny_model(),
        arguments,
        train_dataset=rows,
        processing_class=tokenizer,
        recipe=Recipe(layout=LAYOUTS[layout]),
        callbacks=[Events(samples, stop)],
    )
    trainer.train_dataset = MeasuredMapped(samples, lengths=LENGTHS, transform=without_name)
    return trained(trainer, samples, resume)


def without_name(sample: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": sample["input_ids"]}


def run_accelerate(
    folder: Path,
    layout: str,
    stop: int | None = None,
    resume: bool = False,
    save_steps: int = 2,
    epochs: int = EPOCHS,
    steps: Steps = Steps(micro_batches=2),  # noqa: B008
    accumulate: int = 2,
    optimizer: Any = torch.optim.AdamW,
) -> dict[str, Any]:
    """A loop with accelerate that saves its state every few steps."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    samples, model = Samples(), tiny_model()
    world = World(accelerator.process_index, accelerator.num_processes)
    recipe = Recipe(layout=LAYOUTS[layout], steps=steps, topology=Topology(dp=world.size))
    source = MeasuredMapped(samples, lengths=LENGTHS, transform=without_name)
    loader = accelerate_loader(
        accelerator, PlannedStream(source, recipe, world=world, seed=42), model=model
    )
    model, optimizer = accelerator.prepare(model, optimizer(model.parameters(), lr=1e-2))
    losses: list[float] = []
    if resume:
        accelerator.load_state(str(folder / "state"))
        losses = json.loads((folder / f"losses{world.rank}.json").read_text())
    lengths = []
    samples.reads.clear()
    for _ in range(loader.epoch, epochs):
        samples.reads.append([])
        lengths.append(len(loader))
        for batch in loader:
            if len(losses) == stop:
                if CRASHES:
                    stop_now()
                losses.append(-1)
                break
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
                if len(losses) % save_steps == 0:
                    accelerator.save_state(str(folder / "state"))
                    (folder / f"losses{world.rank}.json").write_text(json.dumps(losses))
        if losses[-1] == -1:
            break
    return {
        "reads": samples.reads,
        "losses": losses,
        "parameters": parameters(accelerator.unwrap_model(model)),
        "lengths": lengths,
        "steps": loader.num_steps(epochs),
    }


RUNS: dict[str, Callable[..., dict[str, Any]]] = {
    "trainer": run_trainer,
    "accelerate": run_accelerate,
    "sft": run_sft,
}


def chain(rank: int, folder: str, port: int, run: str, layout: str) -> None:
    """One of two processes: a whole run, and one that is killed in the second and third epoch."""
    join(rank, port)
    where = Path(folder)
    (where / "whole").mkdir(exist_ok=True)
    (where / "chain").mkdir(exist_ok=True)
    whole = RUNS[run](where / "whole", layout)
    each = len(whole["losses"]) // EPOCHS
    stops = [each + each // 2, 2 * each + each // 2, None]
    parts = [
        RUNS[run](where / "chain", layout, stop, resume=number > 0)
        for number, stop in enumerate(stops)
    ]
    (where / f"{rank}.json").write_text(json.dumps({"whole": whole, "parts": parts}))
    torch.distributed.destroy_process_group()


def crash(rank: int, folder: str, port: int, run: str) -> None:
    """One of two processes that end in the second epoch, without a word."""
    global CRASHES
    join(rank, port)
    CRASHES = True
    RUNS[run](Path(folder), "packed", 11)


def run_on(rank: int, folder: str, port: int, run: str) -> None:
    """One of two processes: a whole run, and one that continues after a crash."""
    join(rank, port)
    where = Path(folder)
    (where / "whole").mkdir(exist_ok=True)
    found = {
        "whole": RUNS[run](where / "whole", "packed"),
        "resumed": RUNS[run](where, "packed", resume=True),
    }
    (where / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def alike(rank: int, folder: str, port: int) -> None:
    """One of two processes that run steps of eight samples with accelerate."""
    join(rank, port)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(run_steps_of_samples(Path(folder))))
    torch.distributed.destroy_process_group()


def run_steps_of_samples(folder: Path) -> dict[str, Any]:
    return run_accelerate(
        folder, "packed", save_steps=1000, epochs=1, steps=Steps(samples=12), accumulate=6,
        optimizer=torch.optim.SGD,
    )  # fmt: skip


def join(rank: int, port: int) -> None:
    """Make this process one of two."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)


def in_two(function: Callable[..., None], folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What each of two processes wrote."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(function, (str(folder), port, *arguments), nprocs=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
