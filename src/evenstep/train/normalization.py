"""Normalizations: by what a step's loss is divided, said as weights per token and a denominator.

loss of a step = sum over its trained tokens of weight * value  /  denominator

Both sums run over all micro-batches and ranks, so it does not matter how the work was cut. A mean
of the micro-batches' means would be something else: sums 6 of 3 tokens and 4 of 1 token make
10 / 4 = 2.5, not (2 + 4) / 2 = 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import IGNORE_INDEX, Batch
from evenstep.train.tile_values import (
    extra_by_tile,
    first_tiles,
    group_ids,
    check_samples_whole,
    spread,
    whole,
)

_OF_PLANS = (
    "samples", "tokens", "empty", "loss_tokens", "sequences", "groups",
    "imbalance_step", "imbalance_micro_batch",
)  # fmt: skip


class Normalization(Protocol):
    """Weights per token, and what a batch adds to the denominator of its step.

    Pure functions of a whole batch: a batch is weighted first and cut for parallel ranks after.
    Equal normalizations have equal names, and unequal ones have not.
    """

    @property
    def name(self) -> str:
        """Names the denominator, in a `Bundle` and in the known totals of a step."""
        ...

    def weights(self, batch: Batch) -> Tensor:
        """(rows, width): the weight of each slot's value, 0 where the label is ignored."""
        ...

    def amount(self, batch: Batch) -> Tensor:
        """A float64 scalar: what this batch adds to the denominator."""
        ...

    def known(self, totals: Mapping[str, float]) -> float | None:
        """The denominator of the whole step if `totals` tell it, else None.

        A plan's totals are `loss_tokens`, `sequences` (with a trained label), `groups`, `samples`.
        """
        ...


def weighted(batch: Batch, normalization: Normalization) -> Batch:
    """The same batch with the weights of `normalization`; a loss multiplies by them.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors.collate import Collator
    >>> plan = make_plan([3, 2], Recipe(layout=Packed(max_tokens=8)))
    >>> batch = Collator()(plan[0, 0][0], [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    >>> weighted(batch, SequenceMean()).loss_weights.tolist()
    [[0.5, 0.5, 0.0, 1.0, 0.0]]
    >>> SequenceMean().amount(batch).item(), TokenMean().amount(batch).item()
    (2.0, 3.0)
    """
    return replace(batch, loss_weights=normalization.weights(batch))


@dataclass(frozen=True, slots=True)
class TokenMean:
    """The mean over all trained tokens of the step."""

    name: ClassVar[str] = "loss_tokens"

    def weights(self, batch: Batch) -> Tensor:
        """1 for each trained token."""
        return whole(batch).loss_weights

    def amount(self, batch: Batch) -> Tensor:
        """The trained tokens."""
        return _total(whole(batch).loss_weights)

    def known(self, totals: Mapping[str, float]) -> float | None:
        """The plan's `loss_tokens`."""
        return totals.get(self.name)


@dataclass(frozen=True, slots=True)
class SequenceMean:
    """The mean over sequences of the mean over each one's trained tokens.

    A sequence is a sample, also where it was split: its tiles divide by the trained tokens of the
    whole, and it counts once, at its first tile, wherever the others run. One that trains nothing
    does not count.
    """

    name: ClassVar[str] = "sequences"

    def weights(self, batch: Batch) -> Tensor:
        """1 / trained tokens of the sample."""
        return spread(batch, 1 / batch.loss_tokens.double().clamp(min=1))

    def amount(self, batch: Batch) -> Tensor:
        """The samples that begin in this batch and train something."""
        return (first_tiles(batch) & (batch.loss_tokens > 0)).sum().double()

    def known(self, totals: Mapping[str, float]) -> float | None:
        """The plan's `sequences`."""
        return totals.get(self.name)


@dataclass(frozen=True, slots=True)
class GroupMean:
    """The mean over groups of samples of the mean over each group's trained tokens.

    How many tokens a group trains is given by the sequence-aligned extra `group_tokens`: the sum
    of `Batch.loss_tokens` over its samples. Without it, the groups are told by the sequence-aligned
    extra `group` and counted in the batch, which is right only if each group lies in one
    micro-batch: plan with `groups=` and the recipe's groups="micro_batch".
    """

    name: ClassVar[str] = "groups"

    def weights(self, batch: Batch) -> Tensor:
        """1 / trained tokens of the group."""
        return spread(batch, 1 / self._tokens(batch))

    def amount(self, batch: Batch) -> Tensor:
        """Each sample's share of its group's trained tokens; those of a group make 1."""
        share = batch.loss_tokens / self._tokens(batch)
        return torch.where(first_tiles(batch), share, 0.0).sum()

    def known(self, totals: Mapping[str, float]) -> float | None:
        """The plan's `groups`."""
        return totals.get(self.name)

    def _tokens(self, batch: Batch) -> Tensor:
        """(tiles) float64, 1 where it is 0."""
        if "group_tokens" in whole(batch).aligned:
            return extra_by_tile(batch, "group_tokens").clamp(min=1)
        group = group_ids(batch)
        check_samples_whole(batch)
        number = torch.unique(group, return_inverse=True)[1]
        tokens = torch.where(first_tiles(batch), batch.loss_tokens, 0).double()
        return torch.zeros_like(tokens).index_add_(0, number, tokens)[number].clamp_(min=1)


@dataclass(frozen=True, slots=True)
class Constant:
    """The sum over trained tokens, divided by one number."""

    value: float

    def __post_init__(self) -> None:
        _positive("value", self.value)

    @property
    def name(self) -> str:
        return f"constant({self.value})"

    def weights(self, batch: Batch) -> Tensor:
        """1 for each trained token."""
        return whole(batch).loss_weights

    def amount(self, batch: Batch) -> Tensor:
        """Nothing: the denominator does not depend on batches."""
        return _total(whole(batch).loss_weights[:0])

    def known(self, totals: Mapping[str, float]) -> float | None:
        """Always the value."""
        return self.value


@dataclass(frozen=True, slots=True)
class FixedLength:
    """The sum over trained tokens, divided by so many tokens for each sample (Dr. GRPO).

    Long samples weigh more than short ones, and a sample that trains nothing still counts.
    """

    length: float

    def __post_init__(self) -> None:
        _positive("length", self.length)

    @property
    def name(self) -> str:
        return f"fixed_length({self.length})"

    def weights(self, batch: Batch) -> Tensor:
        """1 for each trained token."""
        return whole(batch).loss_weights

    def amount(self, batch: Batch) -> Tensor:
        """The length for each sample that begins in this batch."""
        return first_tiles(batch).sum().double() * self.length

    def known(self, totals: Mapping[str, float]) -> float | None:
        """The plan's `samples` times the length."""
        samples = totals.get("samples")
        return None if samples is None else samples * self.length


@dataclass(frozen=True, slots=True)
class SampleWeights:
    """The mean over trained tokens, each weighing what its sample does.

    The weight is a sequence-aligned extra, 0 or more.
    """

    extra: str = "weight"

    @property
    def name(self) -> str:
        return f"sample_weights({self.extra})"

    def weights(self, batch: Batch) -> Tensor:
        """The weight of the token's sample."""
        return spread(batch, extra_by_tile(batch, self.extra))

    def amount(self, batch: Batch) -> Tensor:
        """The sum of the weights."""
        return _total(self.weights(batch))

    def known(self, totals: Mapping[str, float]) -> float | None:
        """What the totals say under its name."""
        return totals.get(self.name)


@dataclass(frozen=True, slots=True)
class Custom:
    """Weights of your own, and their sum or an amount of your own.

    >>> half = Custom("half", lambda batch: batch.loss_weights / 2)
    """

    name: str
    of_slots: Callable[[Batch], Tensor]
    of_batch: Callable[[Batch], Tensor] | None = None

    def __post_init__(self) -> None:
        if self.name in _OF_PLANS:
            raise ConfigError(
                f"a custom normalization is called {self.name!r}, which is what plans call a total "
                f"of their own, so the loss would be divided by that. Give it another name."
            )

    def weights(self, batch: Batch) -> Tensor:
        """What the function gives, 0 where the label is ignored."""
        weights = self.of_slots(whole(batch))
        if weights.shape != batch.labels.shape:
            raise InputError(
                f"the weights {self.name!r} have the shape {tuple(weights.shape)} for a batch of "
                f"{tuple(batch.labels.shape)}, so slots cannot be matched. Return one per slot."
            )
        return weights.masked_fill(batch.labels == IGNORE_INDEX, 0)

    def amount(self, batch: Batch) -> Tensor:
        """What the function gives; the sum of the weights by default."""
        return _total(self.weights(batch) if self.of_batch is None else self.of_batch(batch))

    def known(self, totals: Mapping[str, float]) -> float | None:
        """What the totals say under its name."""
        return totals.get(self.name)


NORMALIZATIONS: dict[str, Callable[..., Normalization]] = {
    "token_mean": TokenMean,
    "sequence_mean": SequenceMean,
    "group_mean": GroupMean,
    "constant": Constant,
    "fixed_length": FixedLength,
    "sample_weights": SampleWeights,
}


def _total(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)


def _positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError(
            f"{name} is {value}, and a loss divided by it has no meaning. Set it > 0."
        )
