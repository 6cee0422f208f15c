"""Checks that prevent wrong gradients, and what names the cause of a failed step.

Options of a runner, batches, ranks; then memory, numbers that are not finite, and token ids
outside of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from evenstep.core.plan import MicroBatch, on_context_ranks
from evenstep.core.step import Step
from evenstep.core.text import short_repr
from evenstep.data.source import digest_of
from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import IGNORE_INDEX, Batch, BatchExchange
from evenstep.tensors.losses import Metric, Sums
from evenstep.tensors.transport import CALLS
from evenstep.train.collectives import Bundle, Collective, Distributed, gather_values, has_group
from evenstep.train.framework import unwrapped
from evenstep.train.gradients import local_tensor, square_of
from evenstep.train.normalization import Custom, GroupMean, SequenceMean, group_ids

if TYPE_CHECKING:
    from evenstep.train.step_loss import StepLoss

# Options of a runner ----------------------------------------------------------------------------


def check_kind(name: str, value: object, attribute: str, example: str) -> None:
    """Raise if a field of a runner is not the object that it should be, but its name or class."""
    if value is not None and (isinstance(value, type) or not hasattr(value, attribute)):
        raise ConfigError(f"{name} must be an object such as {example}, got {short_repr(value)}.")


def check_loss(name: str, function: Any, normalization: Any) -> None:
    """Raise if a loss does not take (outputs, batch), as `cross_entropy` itself does not, or is of
    pairs and has a normalization that weights pairs by their tokens."""
    check_kind("normalization", normalization, "weights", "TokenMean()")
    try:
        signature(function).bind(None, None)
    except ValueError:  # a built-in without a signature
        pass
    except TypeError:
        called = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(
            f"the loss {name!r} does not take (outputs, batch). Pass what a loss function of "
            f"evenstep.tensors returns, such as cross_entropy(), or a function of these two; "
            f"got {called}."
        ) from None
    of_pairs = getattr(function, "unit", "token") == "pair"
    if of_pairs and not isinstance(normalization, GroupMean | SequenceMean | Custom):
        raise ConfigError(
            f"the loss {name!r} is of pairs of sequences, but {normalization!r} weights each pair "
            f"by its tokens. Set normalization=GroupMean(), the mean over pairs."
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


def check_inside(losses: Iterable[Tensor], parameters: Iterable[Tensor]) -> None:
    """Raise if a loss depends on a parameter that is not among those of the model."""
    inside = {id(parameter) for parameter in parameters}
    nodes: list[Any] = [each.grad_fn for each in losses if each.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in inside:
            raise ConfigError(
                f"the loss depends on a parameter of shape {tuple(leaf.shape)} that is not in the "
                f"model, so its gradient would be neither scaled nor summed over ranks. Make it a "
                f"part of the model that the runner gets, or freeze it (`requires_grad_(False)`)."
            )
        further = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= further
        nodes += further


# Batches ----------------------------------------------------------------------------------------

_KEEP_GROUPS = (
    "Plan with groups= and Recipe(groups='micro_batch'), or add the sequence-aligned extra "
    "'group_tokens' to samples."
)


def check_none_skipped(samples: Mapping[int, Any], step_loss: StepLoss) -> None:
    """Raise if a sample was skipped although the denominator is known and includes it."""
    skipped = [number for number, sample in samples.items() if sample is None]
    counted = [name for name in step_loss.denominators if name not in step_loss.constants]
    if skipped and counted:
        raise InputError(
            f"sample {skipped[0]} was skipped, but the denominator {counted[0]!r} was "
            f"computed before the step and includes it. Set mode='deferred' if samples may "
            f"be skipped."
        )


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


def check_tree(preprocess: object) -> None:
    """Raise if an option of the runner prevents that samples share prefixes."""
    if preprocess is not None:
        raise ConfigError(
            "preprocess gets the slots of a micro-batch, which samples share here. Compute its "
            "values before the step (compute_log_probs) and add them to the samples, or plan "
            "without prefixes."
        )


class Groups:
    """The groups of a step that GroupMean counts: each in one micro-batch of one rank.

    Groups of samples with the extra `group_tokens` may be anywhere. `split`: whether a micro-batch
    may be divided without regard to groups.
    """

    def __init__(self, step: Step | None, split: bool) -> None:
        self.split = split
        self.ids: set[int] = set()
        """The groups of this rank's micro-batches so far."""
        self.here = True
        """False if another rank counts them, which shares its batches with this one."""
        self._planned: dict[int, int] = {}  # sample -> group in the plan of the step
        groups = None if step is None or step.plan is None else step.plan.groups
        if step is not None and step.sample_ids is not None and groups is not None:
            self._planned = dict(zip(step.sample_ids.tolist(), groups.tolist(), strict=True))

    @property
    def count(self) -> int:
        """The groups that this rank counts."""
        return len(self.ids) if self.here else 0

    def check(self, batch: Batch, micro: MicroBatch | None) -> None:
        """Note the groups that are counted in this batch; raises if one is in two micro-batches."""
        if "group_tokens" in batch.aligned:
            return
        planned = self._planned
        if micro is not None and micro.groups is not None:
            planned = dict(zip(micro.segments.sample.tolist(), micro.groups.tolist(), strict=True))
        elif self.split and not batch.is_empty:
            raise ConfigError(
                "on_memory='split' may divide a group between two micro-batches, but GroupMean "
                "counts a group's tokens per micro-batch. Plan with groups='micro_batch', or add "
                "the sequence-aligned extra 'group_tokens' to samples."
            )
        ids = group_ids(batch)
        groups = set(ids[batch.loss_tokens > 0].unique().tolist())
        again = sorted(self.ids & groups)
        if again:
            raise InputError(
                f"group {again[0]} is in two micro-batches of this rank, but GroupMean counts a "
                f"group's tokens per micro-batch. {_KEEP_GROUPS}"
            )
        self.ids |= groups
        if groups and planned:
            _compare(batch.sample_ids.tolist(), ids.tolist(), planned)

    def check_ranks(self, most: int, ranks: Collective) -> None:
        """Raise on all ranks if two of them count a group; `most` is the largest `count`."""
        if not most:
            return
        floats = any(isinstance(group, float) for group in self.ids)
        mine = sorted(self.ids) if self.here else []
        ids = torch.tensor(mine, dtype=torch.float64 if floats else torch.int64)
        padded = [*ids.view(torch.int64).tolist(), *[0] * (most - len(ids))]
        owner: dict[int, int] = {}
        for rank, (count, *groups) in enumerate(gather_values(ranks, [len(ids), *padded])):
            for bits in groups[:count]:
                other = owner.setdefault(bits, rank)
                if other != rank:
                    group = torch.tensor(bits).view(ids.dtype).item()
                    raise InputError(
                        f"group {group} is on rank {other} and on rank {rank}, but GroupMean "
                        f"counts a group's tokens per micro-batch. {_KEEP_GROUPS}"
                    )


def _compare(samples: list[int], groups: list[int], planned: Mapping[int, int]) -> None:
    """Raise unless the extra `group` divides these samples into the groups of the plan.

    Ids may differ. A group that the plan may divide between micro-batches is compared in each: if
    no group of the extra is in two groups of the plan, and their numbers are equal, which the
    denominator shows, they are the same.
    """
    pairs = {(planned[s], group) for s, group in zip(samples, groups, strict=True) if s >= 0}
    extra_of: dict[int, int] = {}
    plan_of: dict[int, int] = {}
    for plan, extra in sorted(pairs):
        if extra_of.setdefault(plan, extra) != extra or plan_of.setdefault(extra, plan) != plan:
            raise InputError(
                f"samples of the extra 'group' {extra} are in group {plan} of the plan, which is "
                f"not the same division into groups, so GroupMean does not know what to count. "
                f"Pass the ids of the extra to groups=."
            )


# Ranks ------------------------------------------------------------------------------------------

_SAME = {
    "evenstep/count": "ranks have from {:.0f} to {:.0f} micro-batches, but synchronise at each. "
    "Give every rank its step of the same plan.",
    "evenstep/scale": "the GradScalers of ranks have different scales, from {:g} to {:g}. Create "
    "them alike and call scaler.update() on every rank.",
    "evenstep/constant": "ranks scaled their losses by different constants, from {:g} to {:g}, "
    "because their steps have different budgets. Give every rank a step of the same stream "
    "(`until_all_end` for ranks whose stream ended).",
    "evenstep/used": "ranks of fully_shard used different parameters in this step, whose gradients "
    "it then mixes. Call model.set_reduce_scatter_unused_params(True), or use the same parameters "
    "on all ranks.",
}
"""What must be the same on all ranks, and the error if it is not."""


def same_on_ranks(name: str, value: float | Tensor) -> dict[str, Metric]:
    """Metrics with which `check_same` finds whether all ranks have the same value."""
    mine = torch.as_tensor(value, dtype=torch.float64)
    name = f"evenstep/{name}"
    return {f"{name}_least": Metric.min(mine), f"{name}_most": Metric.max(mine)}


def check_same(reduced: Bundle) -> None:
    """Raise if ranks have different values."""
    for name, message in _SAME.items():
        if f"{name}_least" in reduced.metrics:
            ends = [float(reduced.metrics[f"{name}_{end}"].value) for end in ("least", "most")]
            if ends[0] != ends[1]:
                raise InputError(message.format(*ends))


def check_collective(ranks: int, collective: Collective) -> None:
    """Raise if the ranks of a step run in several processes but the collective has one rank.

    One process may run the steps of all ranks in turn without a collective.
    """
    if ranks == 1 or collective.size > 1 or not has_group():
        return
    if torch.distributed.get_world_size() > 1:
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


def exchange_digests(step: Any) -> list[int]:
    """Of each wave of a step or of batches that shares samples between ranks, its digest."""
    items = step.micro_batches if isinstance(step, Step) else step
    if not isinstance(items, Sequence):
        return []
    exchanges = [getattr(item, "exchange", None) for item in items]
    return [each.digest for each in exchanges if each is not None]


def compare_plans(step: Any, collective: Collective, always: bool = False) -> bool:
    """Raise on all ranks if they have different steps, where these may share samples between ranks:
    ranks would exchange nonsense. With `always`, compare other steps as well. Whether it did."""
    digests, plan = exchange_digests(step), getattr(step, "plan", None)
    shares = bool(digests) or (plan is not None and plan.recipe.sharing is not None)
    if collective.size == 1 or not (shares or always):
        return False
    fingerprint = getattr(step, "fingerprint", "")
    if digests:
        fingerprint = digest_of(f"{fingerprint} {digests}", size=8).hex()
    check_fingerprints(fingerprint, collective)
    return True


def context_step(step: Any, collective: Collective) -> Any:
    """The step, or this rank's parts of its samples if its context-parallel ranks are among the
    ranks of the collective. A feed is returned as it is, or raises like a step without a plan."""
    cp, ranks = getattr(step, "context_ranks", 1), getattr(step, "ranks", 1)
    if cp == 1 or collective.size == ranks or collective.size % (ranks * cp):
        return step
    plan = getattr(step, "plan", None)
    if plan is None or collective.size != ranks * cp:
        raise ConfigError(
            f"topology.cp={cp} divides samples between ranks by a plan for all {collective.size} "
            f"ranks of the collective, which this step or feed does not have, so that every sample "
            f"would run {cp} times. Use the whole steps of a PlannedStream with topology.dp="
            f"{collective.size // cp}, or pass Runner(shard=...)."
        )
    if step.batches is not None:
        raise ConfigError(
            f"topology.cp={cp} divides samples between ranks before they are collated, but this "
            f"step holds batches. Pass a step with samples, which the runner collates."
        )
    plan = on_context_ranks(plan)
    micros = tuple(micro.renumbered(step.sample_ids) for micro in plan[0, collective.rank])
    return replace(step, micro_batches=micros, ranks=plan.num_ranks, plan=plan, costs=(), _read={})


def check_exchange(exchange: BatchExchange, collective: Collective, compared: bool) -> None:
    """Raise if the runner cannot exchange the samples that a wave shares."""
    ranks = len(exchange.sent)
    if ranks != collective.size:
        raise ConfigError(
            f"the step shares samples between {ranks} ranks, but the collective has "
            f"{collective.size}. Pass collective=Distributed() with the group of these ranks."
        )
    if not compared:
        raise ConfigError(
            "batches that share samples between ranks must all be known before the step, so that "
            "ranks can compare their plans. Pass a Step or a list of batches."
        )


def check_exchanged(model: Any, batch: Batch, before: int) -> None:
    """Raise if the forward of a wave that shares samples exchanged none, on all ranks alike."""
    if batch.exchange is not None and CALLS[batch.exchange.name] == before:
        raise ConfigError(
            f"{type(unwrapped(model)).__name__} does not see the tokens that other ranks hold of a "
            f"shared sample. Use evenstep.tensors.attention in its layers (use_attention(model) "
            f"for Hugging Face models), or plan without sharing and context parallelism."
        )


def check_fingerprints(fingerprint: str, collective: Collective) -> None:
    """Raise on all ranks if one of them has another stream or position than the first.

    Ranks without a fingerprint are not compared. All ranks must call this together.
    """
    mine = int(fingerprint[:12], 16) if fingerprint else 0  # 48 bits
    known = {rank: each for rank, (each,) in enumerate(gather_values(collective, [mine])) if each}
    first = next(iter(known), 0)
    others = [rank for rank, value in known.items() if value != known[first]]
    if others:
        raise InputError(
            f"rank {others[0]} runs another step than rank {first}"
            f"{f' ({len(others)} ranks differ)' if len(others) > 1 else ''}. Give all ranks the "
            f"same data in the same order, seed, recipe and cursor."
        )


# Out of memory ----------------------------------------------------------------------------------

FITS, DIVISIBLE, SEGMENT, GROUP = range(4)  # what ran out of memory, from nothing to a group
INDIVISIBLE = {
    SEGMENT: "ran out of memory with a single segment, which cannot be divided. Lower max_tokens, "
    "set overflow='split', or use context parallelism.",
    GROUP: "ran out of memory with a single group, which groups='micro_batch' keeps together. "
    "Lower max_tokens or the samples per group, or plan with groups='step'.",
}


def out_of_memory(
    ranks: Collective, count: int, state: int, slots: int = 0
) -> tuple[int, int, int]:
    """(rank, what it ran out of memory with, the fewest slots that did), the same choice on all
    ranks by one exchange.

    A rank that cannot divide its micro-batch names itself, others the first such rank. `count` is
    the number of micro-batches, which must be the same on all ranks.
    """
    states, counts, sizes = zip(*gather_values(ranks, [state, count, slots]), strict=True)
    if min(counts) != max(counts):
        raise InputError(_SAME["evenstep/count"].format(min(counts), max(counts)))
    indivisible = [rank for rank, each in enumerate(states) if each > DIVISIBLE]
    fewest = min((size for size, each in zip(sizes, states, strict=True) if each), default=0)
    if not indivisible:
        return ranks.rank, int(max(states)), fewest
    rank = ranks.rank if ranks.rank in indivisible else indivisible[0]
    return rank, int(states[rank]), fewest


# Numbers that are not finite --------------------------------------------------------------------

_PLACES = ("the loss", "the gradient of the model's outputs", "the gradient of the parameters")
_LOSS, _OUTPUTS, _PARAMETERS = range(3)
_SHOWN = 6  # samples named per rank
_NOWHERE = 2.0**40


class Suspects:
    """Finds the micro-batch and samples that made the loss or gradient of a step inf or NaN.

    Each micro-batch leaves a few numbers on the device: the loss of each segment, the gradient of
    the model's outputs summed over each segment, and the squared norm of all gradients so far.
    They are read only if the reduced loss or gradient of the step is not finite, which all ranks
    see alike.
    """

    def __init__(self) -> None:
        # Of each micro-batch: its segments, whether gradients of all ranks are mixed in its
        # backward, and (place, values, mask of real tiles if values are per tile).
        self._traces: list[tuple[Any, bool, list[tuple[int, Tensor, Tensor | None]]]] = []

    def before_backward(
        self,
        segments: Any,
        exchanged: bool,
        outputs: Any,
        batch: Any,
        losses: Mapping[str, Sums | Tensor],
    ) -> None:
        """Record the losses of a micro-batch, and the gradient of its outputs once it is there."""
        numbers: list[tuple[int, Tensor, Tensor | None]] = []
        self._traces.append((segments, exchanged, numbers))
        for loss in losses.values():
            if isinstance(loss, Sums) and loss.by_tile is not None:
                numbers.append((_LOSS, loss.by_tile.detach(), loss.real))
            total = loss.loss if isinstance(loss, Sums) else loss
            numbers.append((_LOSS, total.detach(), None))
        outputs = getattr(outputs, "logits", outputs)
        if not isinstance(outputs, Tensor) or not outputs.requires_grad:
            return

        def note(gradient: Tensor) -> None:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            whole = isinstance(batch, Batch) and batch.tree is None
            if whole and gradient.shape[:2] == batch.tokens.shape:
                by_slot = gradient.flatten(2).sum(-1, dtype=wide).flatten()
                tiles = by_slot.new_zeros(len(batch.sample_ids))
                by_tile = tiles.index_add_(0, batch.segment_ids.flatten(), by_slot)
                numbers.append((_OUTPUTS, by_tile, batch.sample_ids >= 0))
            else:
                numbers.append((_OUTPUTS, gradient.sum(dtype=wide), None))

        outputs.register_hook(note)

    def after_backward(self, gradients: Iterable[Tensor]) -> None:
        """Record the norm of the gradients so far, exchanged or not."""
        self._traces[-1][2].append((_PARAMETERS, square_of(map(local_tensor, gradients)), None))

    def source(self, collective: Collective, count: int | None) -> str:
        """Where the first non-finite number of all ranks appeared, for an error message.

        A collective call.
        """
        table = gather_values(collective, torch.tensor(self._first(), dtype=torch.float64))
        # A gradient that was exchanged is not finite on all ranks, so it does not tell the rank.
        order = [(row[2], row[0], row[1], rank) for rank, row in enumerate(table)]
        unsure, position, place, rank = min(order)
        if position == _NOWHERE:
            return "no micro-batch shows where it came from"
        of = "" if count is None else f" of {count}"
        where = f"{_PLACES[int(place)]} of micro-batch {int(position)}{of}"
        if unsure:
            return f"{where} on one of the ranks"
        number, ids = int(table[rank][3]), [str(int(each)) for each in table[rank][4:] if each >= 0]
        more = f" and {number - len(ids)} more" if number > len(ids) else ""
        samples = f"sample{'s' if number > 1 else ''} {', '.join(ids)}{more}"
        return f"{where} on rank {rank} ({samples if ids else 'no sample'})"

    def _first(self) -> list[float]:
        """[position, place, 1 if the rank is unsure, number of samples, their ids]."""
        for position, (segments, exchanged, numbers) in enumerate(self._traces):
            sample_ids = segments.arrays.sample
            # Values per tile before a single one, which does not tell the samples.
            for place, values, real in sorted(numbers, key=lambda each: (each[0], -each[1].ndim)):
                bad = ~values.isfinite()
                if not bool(bad.any()):
                    continue
                bad = bad if real is None else bad[real]
                ids = np.unique(sample_ids[bad.cpu().numpy()]) if values.ndim else sample_ids
                ids = ids if len(ids) else sample_ids
                shown = [*ids[:_SHOWN].tolist(), *[-1] * _SHOWN][:_SHOWN]
                return [position, place, exchanged and place == _PARAMETERS, len(ids), *shown]
        return [_NOWHERE, 0, True, 0, *[-1] * _SHOWN]


# Token ids outside of the vocabulary ------------------------------------------------------------


class TokenIds:
    """The token ids of batches, compared with the vocabulary of a model once a forward fails.

    Not before: some models replace ids outside of their embedding, such as those of images. On a
    GPU, torch only says that an assertion failed, some operations later, and nothing can be read
    from it any more, so ids are noted on the host before they are moved there.
    """

    def __init__(self, model: Any) -> None:
        self.size = _vocabulary_size(model)
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
        message = str(error)
        by_an_index = isinstance(error, IndexError) or "device-side assert" in message
        by_an_index = by_an_index or "out of bounds" in message
        if self.outside is None or self.size is None or not by_an_index:
            return None
        sample, what, number = self.outside
        return InputError(
            f"sample {sample} has the {what} {number}, but the model's vocabulary has {self.size} "
            f"tokens (0 to {self.size - 1}). Use the tokenizer of the model, or "
            f"resize its embeddings."
        )


def _vocabulary_size(model: Any) -> int | None:
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
