"""Checks: what an attempt at a step refuses, before a wrong gradient comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import Batch
from evenstep.tensors.metrics import Metric
from evenstep.train.bundle import Bundle
from evenstep.train.collectives import Collective
from evenstep.train.step_loss import StepLoss
from evenstep.train.normalization import GroupMean
from evenstep.train.tile_values import group_ids

LEAST, MOST = "evenstep/least", "evenstep/most"


# Of samples and batches -------------------------------------------------------------------------


def check_none_skipped(samples: Mapping[int, Any], step_loss: StepLoss) -> None:
    """Whoever skips samples breaks what was promised, which the others would not notice."""
    skipped = [number for number, sample in samples.items() if sample is None]
    promised = [n for n in step_loss.denominators.values() if n.known({}) is None]
    if skipped and promised and step_loss.mode == "known":
        raise InputError(
            f"sample {skipped[0]} was skipped, but {promised[0].name!r} was known before the "
            f"step and counts it, so the gradients would be off. Set mode='deferred' where "
            f"samples may be skipped."
        )


def check_groups_whole(
    batch: Batch, step_loss: StepLoss, seen: set[int], split: bool
) -> None:
    """Where GroupMean counts groups by itself, each must lie in one micro-batch.

    `seen` are the groups of this rank's earlier micro-batches; those of `batch` are added.
    """
    means = (isinstance(n, GroupMean) for n in step_loss.denominators.values())
    if "group_tokens" in batch.aligned or not any(means):
        return
    if split:
        raise ConfigError(
            "on_memory='split' may divide a group between two micro-batches, but GroupMean "
            "counts each group's tokens in its micro-batch, so the group would count twice. "
            "Give samples the sequence-aligned extra 'group_tokens'."
        )
    groups = group_ids(batch)[batch.loss_tokens > 0].unique().tolist()
    again = sorted(seen.intersection(groups))
    if again:
        raise InputError(
            f"group {again[0]} lies in two micro-batches of this rank, but GroupMean counts "
            f"each group's tokens in its micro-batch, so the group would count twice. Plan "
            f"with groups='micro_batch', or give samples the sequence-aligned extra "
            f"'group_tokens'."
        )
    seen.update(groups)


def check_labels(batch: Batch, loss_tokens: Mapping[int, int]) -> None:
    """Where a denominator was known before the step, each sample must train what it counts on."""
    if not loss_tokens:
        return
    for number, counted in zip(batch.sample_ids.tolist(), batch.loss_tokens.tolist(), strict=True):
        told = loss_tokens.get(number, counted)
        if told != counted:
            raise InputError(
                f"sample {number} has {counted} loss tokens but the stream's loss_tokens say {told}, "
                f"and the step is divided by them, so its gradient would be off. Count the labels "
                f"that the collator leaves (the first token has none), or leave loss_tokens out."
            )


# Of ranks ---------------------------------------------------------------------------------------


def extremes(value: float) -> dict[str, Metric]:
    """What a rank brings to a bundle, for all to learn whether they have the same number.

    Ranks that bring 8, 8 and 4 all read (4, 8) with `extremes_of`.
    """
    mine = torch.tensor(value, dtype=torch.float64)
    return {LEAST: Metric.min(mine), MOST: Metric.max(mine)}


def extremes_of(reduced: Bundle) -> tuple[float, float]:
    """(the least, the most) of what ranks brought."""
    return float(reduced.metrics[LEAST].value), float(reduced.metrics[MOST].value)


def check_collective(ranks: int, collective: Collective) -> None:
    """Ranks that share a step in processes of one group have to meet; who plays all of them in
    one process, one after the other, need not."""
    group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if ranks > 1 and collective.size == 1 and group and torch.distributed.get_world_size() > 1:
        raise ConfigError(
            f"the step is shared by {ranks} ranks but this runner meets none of them, so each "
            f"would train a model of its own. Pass collective=Distributed()."
        )


def check_counts(counts: Sequence[float]) -> None:
    """Where ranks meet at every micro-batch, they need as many."""
    if min(counts) != max(counts):
        raise InputError(
            f"ranks have from {min(counts):.0f} to {max(counts):.0f} micro-batches but meet at "
            f"each, so some would wait for ever. Give every rank its step of one plan, which has "
            f"as many on each."
        )


def check_constants(reduced: Bundle) -> None:
    """Gradients that were deferred with different constants cannot be added up."""
    if LEAST not in reduced.metrics:
        return
    least, most = extremes_of(reduced)
    if least != most:
        raise InputError(
            f"ranks scaled their losses by constants from {least:g} to {most:g}, because their "
            f"steps have other budgets, so the sum of their gradients means nothing. Give every "
            f"rank a step of the same stream (`until_all_end` for those that ended)."
        )
