"""Weights of tokens and denominators: how losses of tokens become the loss of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from evenstep.core.text import whole_field
from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import IGNORE_INDEX, Batch, BatchShard, View
from evenstep.tensors.head import positive
from evenstep.tensors.losses import count_experts
from evenstep.train.collectives import Alone, Collective
from evenstep.train.framework import reshard

_PLAN_TOTALS = (
    "samples", "tokens", "empty", "loss_tokens", "sequences", "groups",
    "imbalance_step", "imbalance_micro_batch",
)  # fmt: skip


class Normalization(Protocol):
    """Weights per token, and what a batch adds to the denominator of its step.

    Methods are pure functions of a whole batch: weight a batch first, then shard it. They get the
    `unshared` batch where samples share a prefix. Two
    normalizations have the same name if and only if they are equal.
    """

    @property
    def name(self) -> str:
        """Name of the denominator, in a `Bundle` and in the totals of a step."""
        ...

    def weights(self, batch: Batch) -> Tensor:
        """(rows, width): the weight of each slot's value, 0 where the label is ignored."""
        ...

    def amount(self, batch: Batch) -> Tensor:
        """A float64 scalar: what this batch adds to the denominator."""
        ...

    def known(self, totals: Mapping[str, float]) -> float | None:
        """The denominator of the whole step if `totals` gives it, else None.

        The totals of a plan are `loss_tokens`, `sequences` (with loss tokens), `groups` and
        `samples`.
        """
        ...


def weighted(batch: Batch, normalization: Normalization) -> Batch:
    """The batch with the loss weights of `normalization`.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors.collate import Collator
    >>> plan = make_plan([3, 2], Recipe(layout=Packed(max_tokens=8)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    >>> weighted(batch, SequenceMean()).loss_weights.tolist()
    [[0.5, 0.5, 0.0, 1.0, 0.0]]
    >>> SequenceMean().amount(batch).item(), TokenMean().amount(batch).item()
    (2.0, 3.0)
    """
    if batch.tree is not None:
        samples = weighted(batch.tree.samples, normalization)
        return replace(batch, tree=replace(batch.tree, samples=samples))
    weights = normalization.weights(batch)
    return batch if weights is batch.loss_weights else replace(batch, loss_weights=weights)


class _OfLossTokens:
    """What most normalizations share: the sum over loss tokens, divided by the total of a name."""

    __slots__ = ()

    def weights(self, batch: Batch) -> Tensor:
        """1 for each loss token."""
        return whole_batch(batch).loss_weights

    def amount(self, batch: Batch) -> Tensor:
        """The sum of the weights."""
        return self.weights(batch).sum(dtype=torch.float64)

    def known(self: Normalization, totals: Mapping[str, float]) -> float | None:
        """The total of this name, if the plan gives it."""
        return totals.get(self.name)


@dataclass(frozen=True, slots=True)
class TokenMean(_OfLossTokens):
    """The mean over all loss tokens of the step.

    >>> TokenMean().known({"loss_tokens": 12})
    12
    """

    name: ClassVar[str] = "loss_tokens"


@dataclass(frozen=True, slots=True)
class SequenceMean(_OfLossTokens):
    """The mean over sequences of the mean over the loss tokens of each.

    A sequence is a sample. All segments of a split sample are divided by the loss tokens of the
    whole sample, and it is counted once, with its first segment. Samples without loss tokens are
    not counted.

    >>> SequenceMean().known({"sequences": 4})
    4
    """

    name: ClassVar[str] = "sequences"

    def weights(self, batch: Batch) -> Tensor:
        """1 / loss tokens of the sample."""
        return spread(batch, 1 / batch.loss_tokens.double().clamp(min=1))

    def amount(self, batch: Batch) -> Tensor:
        """The number of samples that begin in this batch and have loss tokens."""
        return (first_tiles(batch) & (batch.loss_tokens > 0)).sum().double()


@dataclass(frozen=True, slots=True)
class GroupMean(_OfLossTokens):
    """The mean over groups of samples of the mean over the loss tokens of each group.

    The sequence-aligned extra `group_tokens` gives the loss tokens of a sample's group: the sum of
    `Batch.loss_tokens` over its samples. Without it, they are counted in the batch by the
    sequence-aligned extra `group`, which requires that each group is in one micro-batch: plan with
    `groups=` and Recipe(groups="micro_batch").

    >>> GroupMean().known({"groups": 2})
    2
    """

    name: ClassVar[str] = "groups"

    def weights(self, batch: Batch) -> Tensor:
        """1 / loss tokens of the group."""
        return spread(batch, 1 / self._tokens(batch))

    def amount(self, batch: Batch) -> Tensor:
        """The sum of each sample's share of its group's loss tokens; a whole group adds 1."""
        share = batch.loss_tokens / self._tokens(batch)
        return torch.where(first_tiles(batch), share, 0.0).sum()

    def _tokens(self, batch: Batch) -> Tensor:
        """(tiles) float64: loss tokens of the group, at least 1."""
        if "group_tokens" in whole_batch(batch).aligned:
            return extra_by_tile(batch, "group_tokens").double().clamp(min=1)
        group = group_ids(batch)
        if batch.exchange is not None:  # on all ranks of the wave
            raise InputError(
                "ranks share samples in this wave, so groups cannot be counted in a batch. Add the "
                "sequence-aligned extra 'group_tokens'."
            )
        check_samples_whole(batch)
        number = torch.unique(group, return_inverse=True)[1]
        tokens = torch.where(first_tiles(batch), batch.loss_tokens, 0).double()
        return torch.zeros_like(tokens).index_add_(0, number, tokens)[number].clamp_(min=1)


def with_group_tokens(batch: Batch) -> Batch:
    """The batch with the extra `group_tokens`, so that `GroupMean` need not count it, which would
    wait for the device."""
    if batch.tree is not None:
        samples = with_group_tokens(batch.tree.samples)
        return replace(batch, tree=replace(batch.tree, samples=samples))
    if "group_tokens" in batch.aligned:
        return batch
    tokens = GroupMean()._tokens(batch)[batch.sample_ids >= 0]
    extras = {**batch.extras, "group_tokens": tokens}
    return replace(batch, extras=extras, aligned={**batch.aligned, "group_tokens": "sequence"})


@dataclass(frozen=True, slots=True)
class Constant(_OfLossTokens):
    """The sum over loss tokens, divided by a constant.

    >>> Constant(8192.0).known({})
    8192.0
    """

    value: float

    def __post_init__(self) -> None:
        positive("value", self.value)

    @property
    def name(self) -> str:
        return f"constant({self.value})"

    def amount(self, batch: Batch) -> Tensor:
        """0: the denominator does not depend on batches."""
        return whole_batch(batch).loss_weights[:0].sum(dtype=torch.float64)

    def known(self, totals: Mapping[str, float]) -> float | None:
        """Always `value`."""
        return self.value


@dataclass(frozen=True, slots=True)
class FixedLength(_OfLossTokens):
    """The sum over loss tokens, divided by `length` times the number of samples (Dr. GRPO).

    Long samples weigh more than short ones, and samples without loss tokens are counted.

    >>> FixedLength(1024).known({"samples": 4})
    4096
    """

    length: float

    def __post_init__(self) -> None:
        positive("length", self.length)

    @property
    def name(self) -> str:
        return f"fixed_length({self.length})"

    def amount(self, batch: Batch) -> Tensor:
        """`length` times the number of samples that begin in this batch."""
        return first_tiles(batch).sum().double() * self.length

    def known(self, totals: Mapping[str, float]) -> float | None:
        """The plan's `samples` times `length`."""
        samples = totals.get("samples")
        return None if samples is None else samples * self.length


@dataclass(frozen=True, slots=True)
class SampleWeights(_OfLossTokens):
    """The mean over loss tokens, weighted by sample.

    `extra` names a sequence-aligned extra with the weight of each sample, 0 or more.

    >>> SampleWeights("weight").name
    'sample_weights(weight)'
    """

    extra: str = "weight"

    @property
    def name(self) -> str:
        return f"sample_weights({self.extra})"

    def weights(self, batch: Batch) -> Tensor:
        """The weight of the token's sample."""
        return spread(batch, extra_by_tile(batch, self.extra).double())


@dataclass(frozen=True, slots=True)
class Custom(_OfLossTokens):
    """Weights from a function of the batch; the denominator is their sum or `of_batch`.

    A sample may have several segments (overflow="split", context parallelism, sharing): count
    samples by the first, `(batch.starts == 0) & (batch.sample_ids >= 0)`.

    Weights count where a slot has a label. Set `distance` for a loss on labels further ahead
    (multi-token prediction): the last slots of a prompt have a label two tokens ahead, but none
    one token ahead.

    >>> half = Custom("half", lambda batch: batch.loss_weights / 2)
    >>> second = Custom("second", lambda batch: torch.ones(batch.labels.shape), distance=2)
    """

    name: str
    of_slots: Callable[[Batch], Tensor]
    of_batch: Callable[[Batch], Tensor] | None = None
    distance: int = 1

    def __post_init__(self) -> None:
        whole_field(self, "distance", least=0)
        _free_name("custom normalization", self.name)

    def weights(self, batch: Batch) -> Tensor:
        """The result of `of_slots`, 0 where the label `distance` tokens ahead is ignored."""
        weights = self.of_slots(whole_batch(batch))
        if weights.shape != batch.labels.shape:
            raise InputError(
                f"the weights {self.name!r} have shape {tuple(weights.shape)}, but the batch has "
                f"shape {tuple(batch.labels.shape)}. Return one weight per slot."
            )
        labels = batch.labels if self.distance == 1 else batch.labels_at(self.distance)
        return weights.masked_fill(labels == IGNORE_INDEX, 0)

    def amount(self, batch: Batch) -> Tensor:
        """The result of `of_batch`; by default the sum of the weights."""
        amounts = self.weights(batch) if self.of_batch is None else self.of_batch(batch)
        return amounts.sum(dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class ByLoss(_OfLossTokens):
    """The sum of the divisors that the loss function returns, as `(loss, divisor)`.

    For amounts that are known only in the forward pass. Losses with the same name share a
    denominator and must return the same divisor. Not for mode="known" and mode="counted", which
    need denominators before the first forward.

    >>> ByLoss("num_labels_in_batch").known({}) is None
    True
    """

    name: str

    def __post_init__(self) -> None:
        _free_name("normalization", self.name)

    def amount(self, batch: Batch) -> Tensor:
        """0: what the loss returns takes its place."""
        return whole_batch(batch).loss_weights[:0].sum(dtype=torch.float64)

    def known(self, totals: Mapping[str, float]) -> float | None:
        """Never."""
        return None


@dataclass(frozen=True, slots=True)
class AllTokens(_OfLossTokens):
    """The mean over all real tokens of the step, for losses that need no label.

    The other normalizations weight loss tokens only. A loss of labels, such as `cross_entropy`, is
    0 for the tokens added here but is divided by their number.

    >>> AllTokens().known({"tokens": 12, "samples": 2})
    12
    """

    name: ClassVar[str] = "tokens"

    def weights(self, batch: Batch) -> Tensor:
        """1 for each real token, 0 for padding."""
        return whole_batch(batch).token_mask.double()

    def amount(self, batch: Batch) -> Tensor:
        """The number of real tokens."""
        return whole_batch(batch).seqlens.sum(dtype=torch.float64)

    def known(self, totals: Mapping[str, float]) -> float | None:
        """The plan's `tokens`, if no sample can be skipped."""
        return totals.get(self.name) if "samples" in totals else None


LABELLED = (TokenMean, SequenceMean, GroupMean, Constant, FixedLength, SampleWeights)
"""Those that weight loss tokens only. What a `Custom` one weights is known to its function."""


def _free_name(what: str, name: str) -> None:
    if name in _PLAN_TOTALS:
        raise ConfigError(
            f"the {what} {name!r} has the name of a total of plans. Use another name than "
            f"{', '.join(_PLAN_TOTALS)}."
        )


# Values per tile --------------------------------------------------------------------------------


def whole_batch(batch: Any) -> Batch:
    """The batch itself; raises for a batch shard."""
    if isinstance(batch, BatchShard):
        raise InputError(
            "a normalization needs a whole batch, got a batch shard. Weight the batch before "
            "sharding it: shard weighted(batch, normalization)."
        )
    assert isinstance(batch, Batch)
    return batch


def first_tiles(batch: Batch) -> Tensor:
    """(tiles) bool: whether a sample begins here. Each sample begins once per step."""
    return (whole_batch(batch).starts == 0) & (batch.sample_ids >= 0)


def spread(batch: Batch, per_tile: Tensor) -> Tensor:
    """(rows, width) float64: the weight of each slot times that of its tile."""
    weights = whole_batch(batch).loss_weights
    return torch.where(weights != 0, weights * per_tile[batch.segment_ids], 0.0)


def extra_by_tile(batch: Batch, name: str) -> Tensor:
    """(tiles): a sequence-aligned extra, 0 for tails."""
    value: Any = batch.extras.get(name)
    if whole_batch(batch).aligned.get(name) != "sequence" or value is None or value.ndim != 1:
        raise InputError(
            f"the normalization needs an extra {name!r} with one number per sequence. Declare it: "
            f"Collator(extras={{{name!r}: Extra(aligned='sequence')}})."
        )
    return View.of_all(batch).by_segment(name)


def group_ids(batch: Batch) -> Tensor:
    """(tiles): the group of each tile. Raises if the dtype may have rounded group ids."""
    groups = extra_by_tile(batch, "group")
    if groups.is_floating_point():
        exact = 2 / torch.finfo(groups.dtype).eps
        if bool((groups.abs() >= exact).any()):
            raise InputError(
                f"the extra 'group' holds ids of {exact:.0f} or more in {groups.dtype}, which "
                f"cannot represent them exactly. Declare it with dtype=torch.int64."
            )
    return groups


def check_samples_whole(batch: Batch) -> None:
    """Raise if other segments of a split sample are in another micro-batch."""
    counts = (batch.labels != IGNORE_INDEX).reshape(-1).long()
    here = torch.zeros_like(batch.loss_tokens).index_add_(0, batch.segment_ids.reshape(-1), counts)
    number = torch.unique(batch.sample_ids, return_inverse=True)[1]
    short = torch.zeros_like(here).index_add_(0, number, here)[number] != batch.loss_tokens
    if bool((short & (batch.sample_ids >= 0)).any()):
        sample = int(batch.sample_ids[short & (batch.sample_ids >= 0)][0])
        raise InputError(
            f"sample {sample} was split and one of its segments is in another micro-batch, so its "
            f"group cannot be counted here. Add the sequence-aligned extra 'group_tokens'."
        )


def expert_frequencies(
    model: Any,
    batches: Iterable[Batch],
    *,
    top_k: int,
    forward: Callable[[Any, Batch], Any],
    normalization: Normalization | None = None,
    collective: Collective | None = None,
) -> Tensor:
    """(layers, experts) float64: each expert's share of the choices in a step, on all ranks.

    Runs `forward` on this rank's batches without gradients, so that
    `load_balancing(over="step", frequencies=...)` has the exact gradient of the whole step. The
    normalization must be that of the loss, by default `AllTokens`. Both passes choose the same
    experts only if the forward is deterministic: no dropout, no router noise.

        batches = [collate(micro, samples) for micro, samples in step]
        shares = expert_frequencies(model, batches, top_k=2, forward=forward)
        balance = Loss(
            function=load_balancing(top_k=2, over="step", frequencies=shares),
            normalization=AllTokens(),
        )
    """
    ranks = Alone() if collective is None else collective
    over = AllTokens() if normalization is None else normalization
    total: Tensor | None = None
    for batch in batches:
        with torch.no_grad():
            outputs = forward(model, batch)
            counts, choices = count_experts(outputs, weighted(batch, over), top_k)
        both = torch.cat((counts.flatten(), choices.reshape(1)))
        total, shape = both if total is None else total + both, counts.shape
    reshard(model)
    if total is None:
        raise InputError("no batches were given. Pass this rank's batches of the step.")
    total = ranks.all_reduce_sum(total).to(total.device)
    return total[:-1].view(shape) / total[-1].clamp(min=torch.finfo(torch.float64).tiny)
