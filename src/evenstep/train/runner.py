"""Runner: run a step one micro-batch at a time and leave its exact gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from evenstep.core.cost import Cost
from evenstep.core.plan import MicroBatch
from evenstep.core.step import Step
from evenstep.core.text import one_of, short_repr, whole_number
from evenstep.data.feed import FedMicroBatch, Feed
from evenstep.errors import ConfigError
from evenstep.tensors.batch import Batch, BatchShard
from evenstep.tensors.collate import Collator
from evenstep.tensors.losses import Sums
from evenstep.train.checks import (
    check_collective,
    check_fingerprints,
    check_gradients_on,
    check_kind,
    check_loss_function,
    check_pair_losses,
)
from evenstep.train.collectives import Alone, Collective
from evenstep.train.framework import Forward, Framework, forward_of, recover
from evenstep.train.gradients import set_aside
from evenstep.train.normalization import Normalization, TokenMean
from evenstep.train.result import Keep, StepResult
from evenstep.train.step_loss import Mode
from evenstep.train.step_run import Attempt, TooLargeError, Work, empty_micro_batch

LossFunction: TypeAlias = Callable[[Any, Any], Sums | Tensor | tuple[Sums | Tensor, Tensor]]
"""(the model's outputs, batch) -> unnormalized sums, or a scalar; with `ByLoss` also a divisor."""
OnMemory: TypeAlias = Literal["raise", "split"]
OnNonfinite: TypeAlias = Literal["raise", "skip"]


class LazyBatches(Protocol):
    """A known number of batches that are made when they are iterated."""

    @property
    def budget(self) -> int | None:
        """The most slots of a batch, the same on all ranks; None if unknown."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A loss of a step: a function that returns a sum, its normalization and its weight.

    >>> from evenstep.tensors import cross_entropy
    >>> losses = {"nll": Loss(function=cross_entropy(), weight=0.5)}
    """

    function: LossFunction
    normalization: Normalization = field(default_factory=TokenMean)
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """Runs the steps of a model. `run(step)` adds the exact gradient of the step to `.grad`.

    If a step fails, `.grad` is unchanged and nothing of the step is left in DDP or fully_shard. A
    step that has tokens to predict but no loss token on any rank is an error.

    model         a plain module, DDP or fully_shard, compiled or not
    loss          a function written for one sequence (`cross_entropy()`), or several `Loss`es by
                  name, each with its own normalization
    normalization what a single loss is divided by, over all micro-batches and ranks
    mode          None uses `known` if the totals of the step give every denominator. Else, with
                  one denominator, `deferred`: one all-reduce at the end of the step for
                  denominators, losses and metrics. With several, `counted`: all micro-batches are
                  collated before the first one runs. A fed step with several is `deferred`, which
                  then costs one more backward per micro-batch and one more gradient in memory for
                  each further denominator. `per_micro_batch` is a different loss; see
                  `evenstep.train.step_loss`
    collective    the ranks that share a step: `Distributed()`, or `Alone()` for one process
    collate       (micro-batch, samples) -> Batch
    forward       (model, batch) -> outputs, as the loss function takes them; None uses `hf_forward`
                  for Hugging Face models and `model(batch)` for others. Of a `ModelOutput`, losses
                  get the logits; return `dict(outputs)` to pass on all of it
    shard         Batch -> BatchShard of this context-parallel rank, e.g.
                  `lambda batch: shard_context(batch, rank, size)`
    preprocess    Batch -> Batch, without gradient, on the device and just before the micro-batch
                  runs; for example adds the log-probs of a reference model as an extra
    device        where batches are moved before they run; None: where the model's first parameter
                  is
    prefetch      number of micro-batches prepared ahead; prefetch + 1 are alive. If the device has
                  no memory for the next one yet, it is copied when it runs
    cost          model FLOPs of a segment (`Cost.of_model`), for MFU with `peak_flops` per second
    on_memory     `split`: if a micro-batch runs out of memory, divide it in two on all ranks and
                  run the step again; groups stay whole if the plan keeps them in one micro-batch.
                  Needs a small all-reduce per micro-batch
    on_nonfinite  what to do if the loss or gradient of a step is inf or NaN, on all ranks alike.
                  `raise`: an error that names the micro-batch and the samples. `skip`: discard
                  the gradient of the step; `StepResult.skipped` is True. None leaves the gradient
                  as it is; see `StepResult.finite`
    scaler        a `torch.amp.GradScaler`: gradients are scaled, ready for its `unscale_`, `step`
                  and `update`, which skips steps that are not finite
    keep          `samples` or `tokens`: return the loss values of each sample, or also of each
                  token, in `StepResult.kept`
    """

    model: Any
    loss: LossFunction | Mapping[str, Loss]
    normalization: Normalization = field(default_factory=TokenMean)
    mode: Mode | None = None
    collective: Collective = field(default_factory=Alone)
    collate: Callable[[MicroBatch, Any], Batch] = field(default_factory=Collator)
    forward: Forward | None = None
    shard: Callable[[Batch], BatchShard] | None = None
    preprocess: Callable[[Batch], Batch] | None = None
    device: torch.device | str | None = None
    prefetch: int = 1
    cost: Cost | None = None
    peak_flops: float | None = None
    on_memory: OnMemory = "raise"
    on_nonfinite: OnNonfinite | None = None
    scaler: Any = None
    keep: Keep | None = None
    _compared: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    """The fingerprint of the first step, once ranks have compared it."""

    def __post_init__(self) -> None:
        if not hasattr(self.model, "parameters") or isinstance(self.model, type):
            raise ConfigError(
                f"model must be a torch.nn.Module, got {short_repr(self.model)}. Load the model "
                f"first, for example with AutoModelForCausalLM.from_pretrained(...)."
            )
        if self.forward is None:
            object.__setattr__(self, "forward", forward_of(self.model))
        check_kind("collective", self.collective, "all_reduce_sum", "Distributed() or Alone()")
        check_kind("cost", self.cost, "of_lengths", "Cost.named('llama-3-8b')")
        for name, each in self.losses.items():
            check_kind("normalization", each.normalization, "weights", "TokenMean()")
            check_loss_function(name, each.function)
        whole_number("prefetch", self.prefetch, least=0)
        one_of("on_memory", self.on_memory, OnMemory)
        check_pair_losses(self.losses)
        if self.on_memory == "split" and self.mode == "per_micro_batch":
            raise ConfigError(
                "on_memory='split' changes the number of micro-batches, on which the loss of "
                "mode='per_micro_batch' depends. Use mode='deferred'."
            )
        if self.on_nonfinite is not None:
            one_of("on_nonfinite", self.on_nonfinite, OnNonfinite)
        if self.keep is not None:
            one_of("keep", self.keep, Keep)
        if self.on_nonfinite and self.scaler is not None and self.scaler.is_enabled():
            raise ConfigError(
                f"on_nonfinite={self.on_nonfinite!r} and a scaler exclude each other: the scaler "
                f"has to see gradients that are not finite, to skip the step and lower its scale. "
                f"Set on_nonfinite=None."
            )
        if self.on_memory == "split" and Framework.of(self.model).kind == "fsdp":
            raise ConfigError(
                "on_memory='split' does not support fully_shard, whose ranks synchronise inside a "
                "micro-batch and would hang. Use on_memory='raise' and a smaller max_tokens."
            )

    @property
    def losses(self) -> dict[str, Loss]:
        """Each loss by name."""
        if isinstance(self.loss, Mapping):
            return dict(self.loss)
        return {"loss": Loss(function=self.loss, normalization=self.normalization)}

    def run(self, step: Step | Sequence[Batch] | LazyBatches) -> StepResult:
        """Run a step of a stream, or batches: a sequence, or lazy ones with a known number."""
        check_gradients_on()
        if self.on_memory == "split" and (not isinstance(step, Step) or step.batches is not None):
            raise ConfigError(
                "on_memory='split' needs samples, but the step holds collated batches. Pass a Step "
                "whose samples the runner collates."
            )
        if self.collective.size > 1 and not self._compared:
            self._compared.append(getattr(step, "fingerprint", ""))
            check_fingerprints(self._compared[0], self.collective)
        if not isinstance(step, Step):
            budget = getattr(step, "budget", None)
            return self._once(Work(items=step, count=len(step), number=0, totals={}, budget=budget))
        check_collective(step.ranks, self.collective)
        if self.on_memory == "split" and step.plan is not None and step.plan.recipe.equal_tokens:
            raise ConfigError(
                "on_memory='split' divides micro-batches without regard to other ranks, but "
                "equal_tokens makes those of a wave equally wide. Leave one of them out."
            )
        return self._until_it_fits(step) if self.on_memory == "split" else self._once(_work(step))

    def run_fed(
        self, feed: Iterable[FedMicroBatch], number: int = 0, *, lock_step: bool | None = None
    ) -> StepResult:
        """Run a step that is filled while it runs (`evenstep.data.Feed`).

        Each rank runs its micro-batches as they arrive, and ranks exchange gradients at the end.
        With `lock_step`, they exchange before each micro-batch whether any of them has one, and
        ranks without work run an empty one, so that every rank waits for the slowest producer.
        Only models whose forward communicates between data-parallel ranks need that. By default,
        those are the models of fully_shard; set it for expert parallelism. DDP broadcasts buffers
        in the first forward of a step, so ranks wait there unless `broadcast_buffers=False`.

        `StepResult.ages` holds the age of each sample when it ran.
        """
        if self.on_memory == "split":
            raise ConfigError(
                "on_memory='split' runs a step again, but a feed yields each sample once. Use "
                "on_memory='raise'."
            )
        needed = Framework.of(self.model).kind == "fsdp"
        if needed and lock_step is False:
            raise ConfigError(
                "lock_step=False does not support fully_shard, whose ranks synchronise inside a "
                "micro-batch. Leave it out."
            )
        work = Work(
            items=feed,
            count=None,
            number=number,
            totals={},
            budget=feed.budget if isinstance(feed, Feed) else None,
            empty=feed.empty_micro_batch if isinstance(feed, Feed) else empty_micro_batch(),
            lock_step=needed if lock_step is None else lock_step,
        )
        return self._once(work)

    def _once(self, work: Work) -> StepResult:
        attempt = Attempt(self, work)
        with set_aside(self.model.parameters(), attempt.framework.owns_gradients) as aside:
            try:
                result = attempt.result()
            except BaseException:
                recover(attempt.framework)
                raise
            if result.skipped:
                aside.drop()
        return result

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
    """Run the forward and backward of each micro-batch of one step.

    Adds the gradient of the exact loss of the step to `.grad`, ready for clipping. `options` are
    the fields of `Runner`.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.tensors.losses import cross_entropy
    >>> from evenstep.demo.decoder import Decoder, DecoderShape
    >>> samples = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    >>> plan = make_plan([3, 2], Recipe(layout=Packed(max_tokens=3)))
    >>> batches = [Collator()(micro, samples) for micro in plan[0, 0]]
    >>> result = run_step(batches, Decoder(DecoderShape(vocab=10)), cross_entropy())
    >>> result.num_micro_batches, result.tokens, result.numbers.denominators
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
        groups=_groups_of(step),
        costs=step.costs,
    )


def _groups_of(step: Step) -> dict[int, int]:
    """The group of each sample of a step in its plan; {} if it has none."""
    if step.plan is None or step.plan.groups is None or step.sample_ids is None:
        return {}
    return dict(zip(step.sample_ids.tolist(), step.plan.groups.tolist(), strict=True))
