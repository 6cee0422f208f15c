"""run_step: micro-batches one at a time, and in the end the gradient of one exact loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from evenstep.core.cost import Cost
from evenstep.core.micro_batch import MicroBatch
from evenstep.core.step import Step
from evenstep.core.validate import one_of, whole_number
from evenstep.data.streams.feed import FedMicroBatch, Feed
from evenstep.errors import ConfigError
from evenstep.tensors.batch import Batch
from evenstep.tensors.batch_shard import BatchShard
from evenstep.tensors.collate import Collator
from evenstep.tensors.per_sequence import Sums
from evenstep.train.attempt import Attempt, TooLargeError, Work, nothing
from evenstep.train.collectives import Alone, Collective
from evenstep.train.framework import Framework
from evenstep.train.step_loss import Mode
from evenstep.train.gradients import set_aside
from evenstep.train.normalization import Normalization, TokenMean
from evenstep.train.step_checks import check_collective
from evenstep.train.result import StepResult

LossFunction: TypeAlias = Callable[[Any, Any], Sums | Tensor]
"""(the model's outputs, batch) -> sums that nothing divided, or a scalar."""
OnMemory: TypeAlias = Literal["raise", "split"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A loss of a step: a function that sums, by what its sum is divided, and what it weighs."""

    function: LossFunction
    normalization: Normalization = field(default_factory=TokenMean)
    weight: float = 1.0


def call(model: Any, batch: Any) -> Any:
    """The forward of a model that takes a batch, as `train.model.Decoder` does."""
    return model(batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """How the steps of a model are run. `run(step)` leaves the exact gradient in `.grad`, added to
    what was there before, as backward does; a step that fails leaves what was there before.

    model         a plain module, DDP or fully_shard, compiled or not
    loss          a function written for one sequence (`cross_entropy()`), or several `Loss`es by
                  name, each with its own denominator
    normalization by what a single loss is divided, over all micro-batches and ranks
    mode          None takes `known` where the step's totals tell every denominator, and otherwise
                  `deferred`: one all-reduce at the end of the step, for denominators, losses and
                  metrics together. `per_micro_batch` is another loss; see `StepLoss`
    forward       from model and batch to what the loss takes
    cut           the part of a batch that this context-parallel rank runs
    prefetch      micro-batches that are prepared ahead; prefetch + 1 are alive. One for which the
                  device has no room yet is copied in its turn
    cost          model FLOPs of a segment (`Cost.of_model`), for MFU with `peak_flops` per second
    on_memory     `split` halves a micro-batch that runs out of memory on all ranks and runs the
                  step again; it costs a small all-reduce a micro-batch
    """

    model: Any
    loss: LossFunction | Mapping[str, Loss]
    normalization: Normalization = field(default_factory=TokenMean)
    mode: Mode | None = None
    collective: Collective = field(default_factory=Alone)
    collate: Callable[[MicroBatch, Any], Batch] = field(default_factory=Collator)
    forward: Callable[[Any, Any], Any] = call
    cut: Callable[[Batch], BatchShard] | None = None
    device: torch.device | str | None = None
    prefetch: int = 1
    cost: Cost | None = None
    peak_flops: float | None = None
    on_memory: OnMemory = "raise"

    def __post_init__(self) -> None:
        whole_number("prefetch", self.prefetch, least=0)
        one_of("on_memory", self.on_memory, OnMemory)
        if self.on_memory == "split" and Framework.of(self.model).kind == "fsdp":
            raise ConfigError(
                "on_memory='split' has every rank finish its micro-batch before they agree, but "
                "ranks of fully_shard wait for each other inside it, and would hang. Use "
                "on_memory='raise' and a smaller budget."
            )

    @property
    def losses(self) -> dict[str, Loss]:
        """Each loss by name."""
        if isinstance(self.loss, Mapping):
            return dict(self.loss)
        return {"loss": Loss(function=self.loss, normalization=self.normalization)}

    def run(self, step: Step | Sequence[Batch]) -> StepResult:
        """Run a step: a stream's, or batches that are there already."""
        if self.on_memory == "split" and (not isinstance(step, Step) or step.batches is not None):
            raise ConfigError(
                "on_memory='split' needs the samples of a step, but its batches are collated "
                "already. Let the runner collate."
            )
        if not isinstance(step, Step):
            return self._once(Work(items=step, count=len(step), number=0, totals={}, budget=None))
        check_collective(step.ranks, self.collective)
        return self._until_it_fits(step) if self.on_memory == "split" else self._once(_work(step))

    def run_fed(self, feed: Iterable[FedMicroBatch], number: int = 0) -> StepResult:
        """Run a step that is being filled while it runs (`data.feed.Feed`).

        Ranks agree before each micro-batch whether any has another; who has none runs a dummy. The
        result says how old samples were when they ran.
        """
        if self.on_memory == "split":
            raise ConfigError(
                "on_memory='split' runs a step again from its first sample, but a feed gives each "
                "sample once. Use on_memory='raise'."
            )
        work = Work(
            items=feed,
            count=None,
            number=number,
            totals={},
            budget=feed.budget if isinstance(feed, Feed) else None,
            dummy=feed.empty_micro_batch if isinstance(feed, Feed) else nothing(),
        )
        return self._once(work)

    def _once(self, work: Work) -> StepResult:
        attempt = Attempt(self, work)
        with set_aside(self.model.parameters(), attempt.framework.owns_gradients):
            return attempt.result()

    def _until_it_fits(self, step: Step) -> StepResult:
        while True:
            try:
                return self._once(_work(step))
            except TooLargeError as error:
                micros = list(step.micro_batches)
                micros[error.position : error.position + 1] = micros[error.position].halves()
                step = replace(step, micro_batches=tuple(micros))


def run_step(
    step: Step | Sequence[Batch],
    model: Any,
    loss: LossFunction | Mapping[str, Loss],
    **options: Any,
) -> StepResult:
    """Run one step of `model`: forward and backward of each micro-batch, one after the other.

    Afterwards `.grad` holds the gradient of the step's exact loss, ready to be clipped. Options
    are those of `Runner`.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors.losses import cross_entropy
    >>> from evenstep.demo.decoder import Decoder, DecoderShape
    >>> samples = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    >>> plan = make_plan([3, 2], Recipe(layout=Packed(max_tokens=3)))
    >>> batches = [Collator()(micro, samples) for micro in plan[0, 0]]
    >>> result = run_step(batches, Decoder(DecoderShape(vocab=10)), cross_entropy())
    >>> result.micro_batches, result.tokens, result.numbers.denominators
    (2, 5, {'loss_tokens': 3.0})
    """
    return Runner(model=model, loss=loss, **options).run(step)


def _work(step: Step) -> Work:
    return Work(
        items=step if step.batches is None else step.batches,
        count=len(step),
        number=step.number,
        totals=step.totals,
        budget=step.budget,
        loss_tokens=step.loss_tokens,
    )
