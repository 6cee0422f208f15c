"""The samples of a run: tokens in files, the recipe, the steps of a rank, and held-out ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evenstep.core.cost import Cost
from evenstep.core.plan import MicroBatch, Plan
from evenstep.core.plan_file import replace_file
from evenstep.core.ragged import FloatArray, IntArray
from evenstep.core.recipe import Recipe, World
from evenstep.data.corpus import statuses
from evenstep.data.planned import PlannedStream
from evenstep.data.source import LOSS_MASKS, digest_of
from evenstep.data.token_file import TokenFile
from evenstep.tensors.batch import Batch, Extra
from evenstep.tensors.collate import Collator
from evenstep.train.framework import Forward
from evenstep.train.scoring import sum_log_probs
from evenstep.trainer.job import Job
from evenstep.trainer.ranks import Ranks

_MASKS = ("labels", *LOSS_MASKS)
_PAIR = {
    "group": Extra(aligned="sequence", dtype=torch.int64),
    "chosen": Extra(aligned="sequence", dtype=torch.int64),
    "reference_log_probs": Extra(aligned="sequence", dtype=torch.float32),
}


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Stored samples of a run, in the order of the data: those of pairs chosen, rejected, …"""

    file: TokenFile
    name: str
    pairs: bool
    whole: bool
    """Whether all tokens count in the loss."""
    references: FloatArray | None = None
    """Of pairs: the log-prob of each sample's loss tokens by the model before training."""

    def collate(self, micro: MicroBatch, samples: Any) -> Batch:
        """The batch of a micro-batch, with what the loss of the job reads."""
        unread = {"source", *(_MASKS if self.whole else ())}
        chosen = {}
        for i in dict.fromkeys(micro.segments.sample.tolist()):
            chosen[i] = {key: value for key, value in samples[i].items() if key not in unread}
            if self.references is not None:
                pair = {"group": i // 2, "chosen": 1 - i % 2}
                chosen[i] |= {**pair, "reference_log_probs": self.references[i]}
        return Collator(extras={} if self.references is None else _PAIR)(micro, chosen)

    def stream(self, recipe: Recipe, world: World, **options: Any) -> PlannedStream:
        """The steps of a rank; a pair stays in one micro-batch."""
        if self.pairs:
            recipe = replace(recipe, groups="micro_batch")
            options["groups"] = np.arange(len(self.file)) // 2
        return PlannedStream(self.file, recipe, world=world, **options)

    def steps(self, job: Job, recipe: Recipe, world: World) -> PlannedStream:
        """The steps of the whole run."""
        seed, shuffle = job.settings.stream.seed, job.settings.stream.shuffle
        options: Any = {"seed": seed, "shuffle": shuffle, "max_num_steps": job.steps}
        return self.stream(recipe, world, infinite_loop=True, **options)

    def first_plans(self, job: Job, recipe: Recipe, world: World) -> list[Plan]:
        """The plans of the first 20 steps, to see how large they are."""
        steps = islice(self.steps(job, recipe, world), 20)
        return [step.plan for step in steps if step.plan is not None]

    def sources(self) -> IntArray:
        """The number of the source of each held-out sample."""
        return np.array([self.file[i]["source"][0] for i in range(len(self.file))], np.int64)


def stored_samples(job: Job, ranks: Ranks) -> tuple[Samples, Samples | None]:
    """The samples to train on, and those held out, as tokens. Rank 0 writes them; others wait."""
    with ranks.together(job.folder):
        if ranks.first:
            _store(job)
    kind = job.settings.trainer.job
    options: Any = {"pairs": kind == "dpo", "whole": kind == "pretrain"}
    files = zip(_store(job), ("data", "validation"), strict=True)
    trained, held_out = (
        None if file is None else Samples(file, name, **options) for file, name in files
    )
    assert trained is not None
    return trained, held_out


def _store(job: Job) -> tuple[TokenFile, TokenFile | None]:
    job.folder.mkdir(parents=True, exist_ok=True)
    with _reported() as report:
        trained = job.corpus.stored(job.folder / "data.tokens", report)
        return trained, job.corpus.stored_held_out(job.folder / "validation.tokens", report)


@contextmanager
def _reported() -> Iterator[Callable[[int, int], None] | None]:
    """What shows the progress on a terminal, in one line that is cleared at the end."""
    if not sys.stderr.isatty():
        yield None
        return

    def report(done: int, total: int) -> None:
        sys.stderr.write(f"\rtokenizing {done:,} of {total:,}")
        sys.stderr.flush()

    try:
        yield report
    finally:
        sys.stderr.write("\r\x1b[2K")


def recipe_for(job: Job, size: int, cost: Cost | None) -> Recipe:
    """The recipe with the number of ranks and, unless it is given, the model's cost."""
    settings, recipe = job.settings, job.settings.recipe
    changes: dict[str, Any] = {"topology": replace(recipe.topology, dp=size)}
    if cost is not None and recipe.cost == Cost():
        changes["cost"] = cost
    if settings.trainer.parallel == "ddp" or size == 1:
        changes["sync_every"] = "step"
    return replace(recipe, **changes)


def fitted(recipe: Recipe, model: Any, samples: Samples) -> Recipe:
    """The recipe, padded if a Hugging Face model cannot be packed."""
    from evenstep.integrations.huggingface import choose_layout

    longest = int(samples.file.lengths_of(np.arange(len(samples.file))).max())
    return replace(recipe, layout=choose_layout(model, recipe.layout, longest=longest))


def with_references(
    samples: Samples, job: Job, ranks: Ranks, model: Any, forward: Forward, recipe: Recipe
) -> Samples:
    """Pairs with the log-probs of the model as it is now, which are computed once and kept beside
    the samples."""
    path = job.folder / f"{samples.name}.reference.npy"
    key = _reference_key(samples, job)
    values: FloatArray | None = None
    beside = path.with_suffix(".json")
    if path.exists() and beside.exists() and beside.read_text() == key:
        values = np.load(path)
    if not all(ranks.gather(values is not None)):
        options: Any = {"collective": ranks.collective, "forward": forward, "device": ranks.device}
        values = sum_log_probs(model, samples.file, recipe, **options).numpy()
        if ranks.first:
            beside.unlink(missing_ok=True)  # a kill leaves no key beside other values
            with path.open("wb") as file:
                np.save(file, values)
            replace_file(beside, key.encode())
        ranks.gather(None)
    return replace(samples, references=values)


def _reference_key(samples: Samples, job: Job) -> str:
    """What reference log-probs depend on, as JSON."""
    settings, path = job.settings, job.settings.model.path
    files = [] if path is None else sorted(Path(path).iterdir()) if Path(path).is_dir() else [path]
    seen = [
        [str(file), status.st_size, status.st_mtime_ns]
        for file, status in statuses([Path(file) for file in files])
    ]
    values = {
        "samples": samples.file.fingerprint,
        "model": repr(settings.model),
        "files": digest_of(json.dumps(seen)).hex(),
        "seed": settings.stream.seed,
        "precision": settings.trainer.precision,
        "overflow": [settings.recipe.overflow, repr(settings.recipe.layout)],
    }
    return json.dumps(values, indent=1)
