"""Checks of batches and ranks that prevent wrong gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from evenstep.core.text import short_repr
from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import Batch
from evenstep.tensors.losses import Metric
from evenstep.train.collectives import Bundle, Collective, Distributed
from evenstep.train.normalization import Custom, GroupMean, SequenceMean, group_ids
from evenstep.train.step_loss import StepLoss

_KEEP_GROUPS = (
    "Plan with groups= and Recipe(groups='micro_batch'), or add the sequence-aligned extra "
    "'group_tokens' to samples."
)
# What must be the same on all ranks, by the name of its metrics.
COUNT, CONSTANT, SCALE = "evenstep/count", "evenstep/constant", "evenstep/scale"


# Losses ----------------------------------------------------------------------------------------


def check_pair_losses(losses: Mapping[str, Any]) -> None:
    """Raise if a loss of pairs has a normalization that weights pairs by their tokens."""
    for name, loss in losses.items():
        of_pairs = getattr(loss.function, "unit", "token") == "pair"
        if of_pairs and not isinstance(loss.normalization, GroupMean | SequenceMean | Custom):
            raise ConfigError(
                f"the loss {name!r} is of pairs of sequences, but {loss.normalization!r} weights "
                f"each pair by its tokens. Set normalization=GroupMean(), the mean over pairs."
            )


# Samples and batches ---------------------------------------------------------------------------


def check_none_skipped(samples: Mapping[int, Any], step_loss: StepLoss) -> None:
    """Raise if a sample was skipped although the denominator is known and includes it."""
    skipped = [number for number, sample in samples.items() if sample is None]
    counted = [name for name in step_loss.denominators if name not in step_loss.constants]
    if skipped and counted and step_loss.mode == "known":
        raise InputError(
            f"sample {skipped[0]} was skipped, but the denominator {counted[0]!r} was "
            f"computed before the step and includes it. Set mode='deferred' if samples may "
            f"be skipped."
        )


def check_groups_whole(batch: Batch, seen: set[int], split: bool) -> set[int]:
    """Raise if GroupMean counts groups per batch and a group is in two micro-batches.

    `seen` holds the groups of this rank's earlier micro-batches; those of `batch` are added, and
    returned. `split`: whether the micro-batch may be divided without regard to groups.
    """
    if "group_tokens" in batch.aligned:
        return set()
    if split and not batch.is_empty:
        raise ConfigError(
            "on_memory='split' may divide a group between two micro-batches, but GroupMean "
            "counts a group's tokens per micro-batch. Plan with groups='micro_batch', or add the "
            "sequence-aligned extra 'group_tokens' to samples."
        )
    groups = set(group_ids(batch)[batch.loss_tokens > 0].unique().tolist())
    again = sorted(seen & groups)
    if again:
        raise InputError(
            f"group {again[0]} is in two micro-batches of this rank, but GroupMean counts a "
            f"group's tokens per micro-batch. {_KEEP_GROUPS}"
        )
    seen |= groups
    return groups


def check_groups_planned(batch: Batch, group_of: Mapping[int, int]) -> None:
    """Raise unless the extra `group` divides these samples into the groups of the plan.

    `group_of` is the group of each sample in the plan; ids may differ. A group that the plan may
    divide between micro-batches is compared in each: if no group of the extra is in two groups of
    the plan, and their numbers are equal, which the denominator shows, they are the same.
    """
    pairs = {
        (group_of[sample], group)
        for sample, group in zip(batch.sample_ids.tolist(), group_ids(batch).tolist(), strict=True)
        if sample >= 0
    }
    both: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})
    for plan, extra in sorted(pairs):
        if both[0].setdefault(plan, extra) != extra or both[1].setdefault(extra, plan) != plan:
            raise InputError(
                f"samples of the extra 'group' {extra} are in group {plan} of the plan, which is "
                f"not the same division into groups, so GroupMean does not know what to count. "
                f"Pass the ids of the extra to groups=."
            )


def check_groups_on_ranks(groups: set[int], most: int, ranks: Collective) -> None:
    """Raise on all ranks if one of this rank's groups is on another rank too.

    `most` is the largest number of groups of a rank. Group ids may be floats.
    """
    if not most:
        return
    mine = torch.zeros((ranks.size, 2, most), dtype=torch.float64)
    # A float64 represents the high and the low half of an id exactly.
    ids = torch.tensor(sorted(groups), dtype=torch.float64 if _floats(groups) else torch.int64)
    bits = ids.view(torch.int64)
    mine[ranks.rank, 0, : len(bits)] = (bits >> 32).double()
    mine[ranks.rank, 1, : len(bits)] = (bits & 0xFFFFFFFF).double()
    counts = torch.zeros(ranks.size, dtype=torch.float64)
    counts[ranks.rank] = len(bits)
    packed = ranks.all_reduce_sum(torch.cat((counts, mine.flatten()))).cpu()
    counts, halves = packed[: ranks.size].long(), packed[ranks.size :].view(ranks.size, 2, most)
    owner: dict[tuple[float, ...], int] = {}
    for rank in range(ranks.size):
        for pair in halves[rank, :, : int(counts[rank])].T.tolist():
            other = owner.setdefault(tuple(pair), rank)
            if other != rank:
                bits = torch.tensor(int(pair[0]) * 2**32 + int(pair[1]))
                group = bits.view(ids.dtype).item()
                raise InputError(
                    f"group {group} is on rank {other} and on rank {rank}, but GroupMean counts a "
                    f"group's tokens per micro-batch. {_KEEP_GROUPS}"
                )


def _floats(groups: set[int]) -> bool:
    return any(isinstance(group, float) for group in groups)


def check_labels(batch: Batch, loss_tokens: Mapping[int, int]) -> None:
    """Raise if a sample's loss tokens differ from those that the known denominators include."""
    for number, counted in zip(batch.sample_ids.tolist(), batch.loss_tokens.tolist(), strict=True):
        expected = loss_tokens.get(number, counted)
        if expected != counted:
            raise InputError(
                f"sample {number} has {counted} loss tokens, but the stream's loss_tokens give "
                f"{expected}, and the loss is divided by these. Count labels as the collator does "
                f"(the first token has none), or omit loss_tokens."
            )


def not_trainable(parameters: Sequence[Tensor]) -> ConfigError:
    """Why a loss has no gradient."""
    if not any(parameter.requires_grad for parameter in parameters):
        return ConfigError(
            "all parameters of the model are frozen, so the loss has no gradient. Call "
            "requires_grad_() on those to train, or use compute_log_probs for values alone."
        )
    return ConfigError(
        "the loss does not depend on any parameter that requires a gradient. Do not detach the "
        "outputs of the model, and unfreeze a parameter that every micro-batch uses."
    )


# Ranks ------------------------------------------------------------------------------------------


def extremes(name: str, value: float | Tensor) -> dict[str, Metric]:
    """Metrics to check that all ranks have the same value.

    If ranks contribute 8, 8 and 4, `extremes_of` returns (4, 8) on all of them.
    """
    mine = torch.as_tensor(value, dtype=torch.float64)
    return {f"{name}_least": Metric.min(mine), f"{name}_most": Metric.max(mine)}


def extremes_of(reduced: Bundle, name: str) -> tuple[float, float]:
    """(minimum, maximum) of the values that ranks contributed."""
    least, most = reduced.metrics[f"{name}_least"], reduced.metrics[f"{name}_most"]
    return float(least.value), float(most.value)


def check_loss_function(name: str, function: Any) -> None:
    """Raise if a loss cannot be called with outputs and a batch, such as `cross_entropy` itself."""
    try:
        signature(function).bind(None, None)
    except ValueError:  # a built-in without a signature
        return
    except TypeError:
        called = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(
            f"the loss {name!r} does not take (outputs, batch). Pass what a loss function of "
            f"evenstep.tensors returns, such as cross_entropy(), or a function of these two; "
            f"got {called}."
        ) from None


def check_kind(name: str, value: object, attribute: str, example: str) -> None:
    """Raise if a field of a runner is not the object that it should be, but its name or class."""
    if value is not None and (isinstance(value, type) or not hasattr(value, attribute)):
        raise ConfigError(f"{name} must be an object such as {example}, got {short_repr(value)}.")


def check_gradients_on() -> None:
    """Raise if torch records no gradients here."""
    if not torch.is_grad_enabled():
        raise ConfigError(
            "a runner computes gradients, but torch.no_grad or inference_mode is on. Leave it out, "
            "or use compute_log_probs for values without gradients."
        )


def check_collective(ranks: int, collective: Collective) -> None:
    """Raise if the ranks of a step run in several processes but the collective has one rank.

    One process may run the steps of all ranks in turn without a collective.
    """
    group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if ranks > 1 and collective.size == 1 and group and torch.distributed.get_world_size() > 1:
        raise ConfigError(
            f"the step is shared by {ranks} ranks, but the runner's collective has one rank, so "
            f"gradients are not summed. Pass collective=Distributed()."
        )


def check_shards(named: Iterable[tuple[str, Any]], collective: Collective) -> None:
    """Raise if the collective would sum gradients of different shards of a parameter."""
    if not isinstance(collective, Distributed):
        return
    ranks = set(torch.distributed.get_process_group_ranks(collective.group))
    for name, parameter in named:
        mesh = getattr(parameter, "device_mesh", None)
        sharded_over = [] if mesh is None else mesh.mesh.flatten().tolist()
        if len(ranks.intersection(sharded_over)) > 1:
            raise ConfigError(
                f"the parameter {name!r} is divided between ranks {sharded_over}, but the "
                f"collective sums gradients over ranks {sorted(ranks)}. Pass "
                f"collective=Distributed(group) with the group of data-parallel ranks."
            )


def check_fingerprints(fingerprint: str, collective: Collective) -> None:
    """Raise on all ranks if one of them has another stream or position than the first.

    Ranks without a fingerprint are not compared. All ranks must call this together.
    """
    digests = torch.zeros(collective.size, dtype=torch.float64)
    # 48 bits: a float64 represents them exactly.
    digests[collective.rank] = int(fingerprint[:12], 16) if fingerprint else 0
    values = collective.all_reduce_sum(digests).tolist()
    known = {rank: value for rank, value in enumerate(values) if value}
    first = next(iter(known), 0)
    others = [rank for rank, value in known.items() if value != known[first]]
    if others:
        raise InputError(
            f"rank {others[0]} runs another step than rank {first}"
            f"{f' ({len(others)} ranks differ)' if len(others) > 1 else ''}. Give all ranks the "
            f"same data in the same order, seed, recipe and cursor."
        )


def check_counts(counts: Sequence[float]) -> None:
    """Raise if ranks that synchronise at every micro-batch have different numbers of them."""
    if min(counts) != max(counts):
        raise InputError(
            f"ranks have from {min(counts):.0f} to {max(counts):.0f} micro-batches, but "
            f"synchronise at each. Give every rank its step of the same plan."
        )


def check_constants(reduced: Bundle) -> None:
    """Raise if ranks scaled their losses or gradients by different constants."""
    if f"{SCALE}_least" in reduced.metrics:
        least, most = extremes_of(reduced, SCALE)
        if least != most:
            raise InputError(
                f"the GradScalers of ranks have different scales, from {least:g} to {most:g}. "
                f"Create them alike and call scaler.update() on every rank."
            )
    if f"{CONSTANT}_least" in reduced.metrics:
        least, most = extremes_of(reduced, CONSTANT)
        if least != most:
            raise InputError(
                f"ranks scaled their losses by different constants, from {least:g} to {most:g}, "
                f"because their steps have different budgets. Give every rank a step of the same "
                f"stream (`until_all_end` for ranks whose stream ended)."
            )
