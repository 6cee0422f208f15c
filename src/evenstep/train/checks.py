"""Checks of batches and ranks that prevent wrong gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.core.text import short_repr
from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import IGNORE_INDEX, Batch
from evenstep.tensors.losses import Metric
from evenstep.train.collectives import Bundle, Collective, Distributed
from evenstep.train.framework import unwrapped
from evenstep.train.normalization import Custom, GroupMean, SequenceMean, group_ids
from evenstep.train.step_loss import StepLoss

_KEEP_GROUPS = (
    "Plan with groups= and Recipe(groups='micro_batch'), or add the sequence-aligned extra "
    "'group_tokens' to samples."
)
LEAST, MOST = "evenstep/least", "evenstep/most"
SCALE_LEAST, SCALE_MOST = "evenstep/scale_least", "evenstep/scale_most"


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
    counted = [n for n in step_loss.denominators.values() if n.known({}) is None]
    if skipped and counted and step_loss.mode == "known":
        raise InputError(
            f"sample {skipped[0]} was skipped, but the denominator {counted[0].name!r} was "
            f"computed before the step and includes it. Set mode='deferred' if samples may "
            f"be skipped."
        )


def check_groups_whole(batch: Batch, step_loss: StepLoss, seen: set[int], split: bool) -> set[int]:
    """Raise if GroupMean counts groups per batch and a group is in two micro-batches.

    `seen` holds the groups of this rank's earlier micro-batches; those of `batch` are added, and
    returned. `split`: whether the micro-batch may be divided without regard to groups.
    """
    if "group_tokens" in batch.aligned or not counts_groups(step_loss):
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


def counts_groups(step_loss: StepLoss) -> bool:
    """Whether a denominator is the number of groups."""
    return any(isinstance(n, GroupMean) for n in step_loss.denominators.values())


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
    if not loss_tokens:
        return
    for number, counted in zip(batch.sample_ids.tolist(), batch.loss_tokens.tolist(), strict=True):
        expected = loss_tokens.get(number, counted)
        if expected != counted:
            raise InputError(
                f"sample {number} has {counted} loss tokens, but the stream's loss_tokens give "
                f"{expected}, and the loss is divided by these. Count labels as the collator does "
                f"(the first token has none), or omit loss_tokens."
            )


class TokenIds:
    """The token ids of batches, compared with the vocabulary of a model once a forward fails.

    Not before: some models replace ids outside of their embedding, such as those of images. On a
    GPU, torch only says that an assertion failed, some operations later, and nothing can be read
    from it any more, so ids are noted on the host.
    """

    def __init__(self, model: Any) -> None:
        self.size = vocabulary_size(model)
        self.outside: tuple[int, str, int] | None = None
        """(sample, "token id" or "label", the number) of the first one outside."""

    def note(self, batch: Batch) -> None:
        """Look at the ids of a batch."""
        if self.size is None or self.outside is not None or not batch.tokens.numel():
            return
        labels = batch.labels.masked_fill(batch.labels == IGNORE_INDEX, 0)
        for what, ids in (("token id", batch.tokens), ("label", labels)):
            outside = ((ids < 0) | (ids >= self.size)).flatten().nonzero()
            if len(outside):
                tile = batch.segment_ids.flatten()[outside[0]]
                number = int(ids.flatten()[outside[0]])
                self.outside = int(batch.sample_ids[tile]), what, number
                return

    def explain(self, error: Exception) -> InputError | None:
        """What to raise instead of an error of a forward, if ids outside may be its cause."""
        said = str(error)
        raised = isinstance(error, IndexError) or "device-side assert" in said
        raised = raised or "out of bounds" in said
        if self.outside is None or self.size is None or not raised:
            return None
        sample, what, number = self.outside
        return InputError(
            f"sample {sample} has the {what} {number}, but the model's vocabulary has {self.size} "
            f"tokens (0 to {self.size - 1}). Use the tokenizer of the model, or "
            f"resize its embeddings."
        )


def vocabulary_size(model: Any) -> int | None:
    """The rows of the model's token embedding; None if it is unknown which one it is."""
    inner, embedding = unwrapped(model), None
    if hasattr(inner, "get_input_embeddings"):
        with suppress(NotImplementedError):
            embedding = inner.get_input_embeddings()
    elif isinstance(inner, nn.Module):
        embeddings = [module for module in inner.modules() if isinstance(module, nn.Embedding)]
        embedding = embeddings[0] if len(embeddings) == 1 else None
    size = getattr(embedding, "num_embeddings", None)
    return None if size is None else int(size)


def check_trainable(objective: Tensor, parameters: Sequence[Tensor]) -> None:
    """Raise if a loss has no gradient."""
    if objective.requires_grad:
        return
    if not any(parameter.requires_grad for parameter in parameters):
        raise ConfigError(
            "all parameters of the model are frozen, so the loss has no gradient. Call "
            "requires_grad_() on those to train, or use compute_log_probs for values alone."
        )
    raise ConfigError(
        "the loss does not depend on any parameter that requires a gradient. Do not detach the "
        "outputs of the model, and unfreeze a parameter that every micro-batch uses."
    )


# Ranks ------------------------------------------------------------------------------------------


def extremes(value: float) -> dict[str, Metric]:
    """Metrics to check that all ranks have the same value.

    If ranks contribute 8, 8 and 4, `extremes_of` returns (4, 8) on all of them.
    """
    mine = torch.tensor(value, dtype=torch.float64)
    return {LEAST: Metric.min(mine), MOST: Metric.max(mine)}


def extremes_of(reduced: Bundle) -> tuple[float, float]:
    """(minimum, maximum) of the values that ranks contributed."""
    return float(reduced.metrics[LEAST].value), float(reduced.metrics[MOST].value)


def extremes_of_scale(scale: Tensor) -> dict[str, Metric]:
    """Metrics to check that all ranks have the same scale of their GradScaler."""
    return {SCALE_LEAST: Metric.min(scale), SCALE_MOST: Metric.max(scale)}


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
    found = torch.zeros(collective.size, dtype=torch.float64)
    # 48 bits: a float64 represents them exactly.
    found[collective.rank] = int(fingerprint[:12], 16) if fingerprint else 0
    values = collective.all_reduce_sum(found).tolist()
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
    """Raise if ranks scaled their gradients by different constants."""
    if SCALE_LEAST in reduced.metrics:
        scales = [float(reduced.metrics[name].value) for name in (SCALE_LEAST, SCALE_MOST)]
        if scales[0] != scales[1]:
            raise InputError(
                f"the GradScalers of ranks have different scales, from {scales[0]:g} to "
                f"{scales[1]:g}. Create them alike and call scaler.update() on every rank."
            )
    if LEAST not in reduced.metrics:
        return
    least, most = extremes_of(reduced)
    if least != most:
        raise InputError(
            f"ranks scaled their losses by different constants, from {least:g} to {most:g}, "
            f"because their steps have different budgets. Give every rank a step of the same "
            f"stream (`until_all_end` for ranks whose stream ended)."
        )
