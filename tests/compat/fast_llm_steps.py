"""Steps of documents for the schedule runner, also in processes of their own."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from evenstep.compat.fast_llm import (
    LossDef,
    ScheduleConfig,
    ScheduleRunner,
    collate_documents,
    num_documents_in_batch,
    num_labels_in_batch,
)
from evenstep.demo import Decoder
from evenstep.tensors import Batch, cross_entropy
from evenstep.train import Collective, Distributed
from tests.train.steps import gradient_of, model_of

Document: TypeAlias = dict[str, Any]
Cut: TypeAlias = list[list[list[Document]]]
"""Per rank, per micro-batch, its documents."""


def scores_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The log-prob of each label, 0 where there is none."""
    flat, targets = logits.flatten(0, 1), labels.flatten()
    values = torch.nn.functional.cross_entropy(flat, targets, ignore_index=-100, reduction="none")
    return -values.view_as(labels)


def nll(logits: Tensor, batch: Any) -> Any:
    return cross_entropy()(logits, batch), num_labels_in_batch(batch)


def z_loss(logits: Tensor, batch: Any) -> Any:
    labelled = batch.labels != -100
    return (logits.logsumexp(-1) ** 2)[labelled].sum(), labelled.sum()


def by_document(logits: Tensor, batch: Any) -> Any:
    return -scores_of(logits, batch.labels).sum(), num_documents_in_batch(batch)


def two_ahead(logits: Tensor, batch: Any) -> Any:
    return -scores_of(logits, batch.labels_at(2)).sum(), num_labels_in_batch(batch, 2)


def drift(logits: Tensor, batch: Any) -> Any:
    """From a reference model, whose log-probs the hook has added."""
    labelled = batch.labels != -100
    scores = scores_of(logits, batch.labels)
    return ((scores - batch.extras["reference"]) ** 2)[labelled].sum(), labelled.sum()


LOSSES = {
    "nll": LossDef("nll", nll),
    "z": LossDef("z", z_loss, weight=0.25),
    "documents": LossDef("documents", by_document, "num_documents_in_batch", 0.5),
    "ahead": LossDef("ahead", two_ahead, "num_labels_in_batch_2", 0.125),
    "drift": LossDef("drift", drift),
}


# Made here: threads of fake ranks share one random generator.
MODEL, OTHER = model_of(), model_of(seed=7)


class Reference:
    """A hook that runs a reference model."""

    def __init__(self) -> None:
        self.model = copy.deepcopy(OTHER)

    def __call__(self, batch: Batch, *, phase: str, iteration: int) -> Batch:
        assert not torch.is_grad_enabled()
        assert (phase, iteration) == ("training", 1)
        scores = scores_of(self.model(batch), batch.labels)
        return replace(batch, extras={"reference": scores}, aligned={"reference": "label"})


def run(
    model: Any,
    cut: list[list[Document]],
    names: list[str],
    by_micro_batch: bool = False,
    **options: Any,
) -> tuple[dict[str, float], int]:
    """(losses, documents) of one rank; leaves the gradient in the model."""
    batches = (collate_documents(documents) for documents in cut)
    runner = ScheduleRunner(
        model, [LOSSES[name] for name in names], preprocess_batch=Reference(), **options
    )
    schedule = ScheduleConfig(
        depth_first_micro_batches=len(cut), per_micro_batch_normalization=by_micro_batch
    )
    losses, _, _, documents = runner.run_step(batches, schedule)
    return losses, documents


def on_rank(ranks: Collective, cut: Cut, names: list[str], **options: Any) -> Any:
    model = copy.deepcopy(MODEL)
    found = run(model, cut[ranks.rank], names, collective=ranks, budget=64, **options)
    return (*found, gradient_of(model))


def on_process(rank: int, size: int, cut: Cut, names: list[list[str]]) -> list[Any]:
    """For each set of losses and wrapper, (losses, documents, gradient)."""
    found = []
    for each in names:
        for wrap in ("plain", "ddp"):
            model: Decoder = copy.deepcopy(MODEL)
            wrapped = DistributedDataParallel(model) if wrap == "ddp" else model
            losses, documents = run(
                wrapped, cut[rank], each, collective=Distributed(), budget=64, prefetch=1
            )
            found.append((losses, documents, gradient_of(model)))
    return found
