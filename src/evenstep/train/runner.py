"""Runner: run a step one micro-batch at a time and leave its exact gradient."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from evenstep.core.cost import Cost
from evenstep.core.plan import MicroBatch
from evenstep.core.ragged import IntArray, Segments
from evenstep.core.step import Step
from evenstep.core.text import one_of, short_repr, whole_number
from evenstep.data.feed import FedMicroBatch, Feed
from evenstep.data.source import cause_of_no_loss
from evenstep.errors import ConfigError, InputError, MicroBatchError
from evenstep.tensors.batch import IGNORE_INDEX, Batch, BatchShard
from evenstep.tensors.collate import Collator
from evenstep.tensors.losses import Metric, Sums
from evenstep.train.checks import (
    CONSTANT,
    COUNT,
    SCALE,
    check_collective,
    check_constants,
    check_counts,
    check_fingerprints,
    check_gradients_on,
    check_groups_on_ranks,
    check_groups_planned,
    check_groups_whole,
    check_kind,
    check_labels,
    check_loss_function,
    check_none_skipped,
    check_pair_losses,
    check_shards,
    extremes,
    extremes_of,
    not_trainable,
)
from evenstep.train.collectives import Alone, Bundle, Collective
from evenstep.train.failures import Suspects, TokenIds, TooLargeError, out_of_memory, recover
from evenstep.train.framework import Forward, Framework, device_of, forward_of
from evenstep.train.gradients import SeparateGradients, set_aside, square_share, sum_gradients
from evenstep.train.normalization import (
    ByLoss,
    GroupMean,
    Normalization,
    TokenMean,
    split_divisor,
    weighted,
)
from evenstep.train.prefetch import Prefetch
from evenstep.train.result import (
    ANY_CAUSE,
    BUSY,
    BUSY_MOST,
    FLOPS,
    GROUPS_MOST,
    LABELS,
    PREDICTED,
    SLOTS,
    SQUARE,
    TOKENS,
    ComputeTime,
    HostSegments,
    Keep,
    Keeper,
    StepResult,
    Stopwatch,
    Timings,
)
from evenstep.train.step_loss import LossValues, Mode, StepLoss, power_of_two

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
    _step_loss: list[StepLoss] = field(default_factory=list, init=False, repr=False, compare=False)
    """Of the last step: most steps have the same."""

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
            return self._run(StepRun(runner=self, items=step, count=len(step), budget=budget))
        check_collective(step.ranks, self.collective)
        if self.on_memory == "split" and step.plan is not None and step.plan.recipe.equal_tokens:
            raise ConfigError(
                "on_memory='split' divides micro-batches without regard to other ranks, but "
                "equal_tokens makes those of a wave equally wide. Leave one of them out."
            )
        while True:
            run = StepRun(
                runner=self,
                items=step if step.batches is None else step.batches,
                count=len(step),
                number=step.number,
                totals=step.totals,
                budget=step.budget,
                step=step,
            )
            try:
                return self._run(run)
            except TooLargeError as error:
                micros = list(step.micro_batches)
                micros[error.position : error.position + 1] = micros[error.position].halves()
                step = replace(step, micro_batches=tuple(micros))

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
        run = StepRun(
            runner=self,
            items=feed,
            count=None,
            number=number,
            budget=feed.budget if isinstance(feed, Feed) else None,
            empty=feed.empty_micro_batch if isinstance(feed, Feed) else None,
            lock_step=needed if lock_step is None else lock_step,
        )
        return self._run(run)

    def _run(self, run: StepRun) -> StepResult:
        """Run a step; if that fails, the gradients and the model are as they were."""
        with set_aside(run.parameters, run.framework.owns_gradients) as discard:
            try:
                result = run.run()
            except BaseException:
                recover(run.framework)
                raise
            if result.skipped:
                discard()
        return result


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


# -------------------------------------------------------------------------------------------------
# StepRun: one run of a step
# -------------------------------------------------------------------------------------------------


def empty_micro_batch() -> MicroBatch:
    """An empty micro-batch of one slot."""
    none = np.empty(0, np.int64)
    return MicroBatch(Segments(none, none, none), np.array([0, 0]), 1, none)


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A collated micro-batch, with host-side copies of what results and errors report."""

    batch: Batch
    on_device: bool
    """False if the device had no memory for it yet; it is then moved when it runs."""
    segments: HostSegments
    labels: int
    parts: int
    """Number of segments, or of groups that stay together."""
    groups: Collection[int] = ()
    """Those that GroupMean counts in this batch, unless the plan keeps them in it."""
    born: tuple[float, ...] = ()
    """When each of its samples was created, if they are fed."""

    @property
    def description(self) -> str:
        """1 x 8 slots, 3 segments of samples 4, 0, 7"""
        return _describe(self.batch.rows, self.batch.width, self.segments.sample)


@dataclass(kw_only=True, eq=False)
class StepRun:
    """One run of a step: prepare, forward, loss, backward, finish.

    The methods stand in the order in which a micro-batch passes through them. A step of
    `on_memory="split"` takes several runs if a micro-batch is too large.
    """

    runner: Runner
    items: Iterable[Batch | FedMicroBatch | tuple[MicroBatch, Mapping[int, Any] | Batch]]
    count: int | None
    """Number of micro-batches; None while a step is being fed."""
    number: int = 0
    totals: Mapping[str, float] = field(default_factory=dict)
    budget: int | None = None
    step: Step | None = None
    empty: MicroBatch | None = None
    """Empty micro-batch for ranks without work; None for one of one slot."""
    lock_step: bool = False
    """Whether ranks agree before each micro-batch that is fed."""

    def __post_init__(self) -> None:
        runner, self.ranks = self.runner, self.runner.collective
        self.losses = runner.losses
        self.framework = Framework.of(runner.model)  # reshards, which changes the parameters
        self.parameters = list(runner.model.parameters())
        device = device_of(runner.model) if runner.device is None else runner.device
        self.device = None if device is None else torch.device(device)
        on_host = self.device is None or self.device.type == "cpu"
        # Ids are noted before they are moved to another device, where they may be lost.
        self.token_ids = None if on_host else TokenIds(runner.model)
        cuda = self.device is not None and self.device.type == "cuda"
        self.stream = torch.cuda.current_stream(self.device) if cuda else None
        self.compute, self.communicate = ComputeTime(cuda), Stopwatch()
        self.position = 0  # of the micro-batch that runs
        self.fed: MicroBatch | None = None  # being prepared
        self.example: Any = None  # one of this rank's samples, for errors
        self.ages: list[float] = []
        self.tokens = self.slots = self.labels = self.predicted = 0
        self.flops, self.sharers = 0.0, 1  # context-parallel ranks that share a micro-batch
        self.seen_groups: set[int] = set()  # counted by GroupMean on this rank
        self.ran_groups: set[int] = set()  # those of them that ran
        self.bundles: list[Bundle] = []
        self.scale: Tensor | None = None  # of the GradScaler in this step
        self.suspects = Suspects() if runner.on_nonfinite else None
        self.keeper = Keeper(runner.keep) if runner.keep else None
        self.mode = runner.mode or self._choose_mode()
        self.step_loss = self._make_step_loss()
        self.scales: Mapping[str, float] | None = None  # of every micro-batch, if they are equal
        self.separate = SeparateGradients(self.parameters) if self.step_loss.separate else None
        norms = self.step_loss.denominators.values()
        self.counts_groups = any(isinstance(each, GroupMean) for each in norms)
        self.planned_groups = _planned_groups(self.step) if self.counts_groups else {}

    def _choose_mode(self) -> Mode:
        """'known' if the totals, which are equal on all ranks, give every denominator."""
        norms = {loss.normalization.name: loss.normalization for loss in self.losses.values()}
        if all(each.known(self.totals) is not None for each in norms.values()):
            return "known"
        by_loss = any(isinstance(each, ByLoss) for each in norms.values())
        return (
            "counted" if len(norms) > 1 and self.count is not None and not by_loss else "deferred"
        )

    def _make_step_loss(self) -> StepLoss:
        """The losses of this step; that of the step before, if nothing has changed."""
        if self.mode in ("per_micro_batch", "counted") and self.count is None:
            raise ConfigError(
                f"mode={self.mode!r} needs all micro-batches, which are unknown while a "
                f"step is being fed. Use mode='deferred'."
            )
        losses = {name: (loss.normalization, loss.weight) for name, loss in self.losses.items()}
        separate = self.mode == "deferred" and len({n.name for n, _ in losses.values()}) > 1
        kind = self.framework.kind
        self.sums = kind == "plain" or self.runner.on_memory == "split"
        self.sums = self.sums or (kind == "ddp" and separate)
        if self.sums:
            check_shards(self.runner.model.named_parameters(), self.ranks)
        averaged_over = 1 if self.sums else self.framework.averaged_over(self.ranks)
        constant = power_of_two(self.budget) if self.budget else 1.0
        same = (losses, self.mode, averaged_over, constant, separate)
        for last in self.runner._step_loss:
            if (last.losses, last.mode, last.averaged_over, last.constant, last.separate) == same:
                return last
        step_loss = StepLoss(
            losses=losses,
            mode=self.mode,
            averaged_over=averaged_over,
            constant=constant,
            separate=separate,
        )
        self.runner._step_loss[:] = [step_loss]
        return step_loss

    def run(self) -> StepResult:
        """Run all micro-batches and leave the gradient of the step in `.grad`."""
        began = time.perf_counter()
        self._check_totals()
        if self.step_loss.mode == "counted":
            self._collate_and_count()
        counting = time.perf_counter() - began
        abandon = self.items.abandon if isinstance(self.items, Feed) else lambda: None
        prepared = Prefetch(
            self._prepare_all(), self.runner.prefetch, abandon, self._name_in_preparation
        )
        first = 0.0  # seconds to the first forward
        with closing(iter(prepared)) as items:
            for ready in self._in_lock_step(items) if self.lock_step else items:
                first = first or time.perf_counter() - began
                self._run_micro_batch(ready, last=self.position + 1 == self.count)
                del ready  # before requesting the next one: prefetch + 1 are alive
        exchanged = self.sums or self.separate is not None
        if self.position == 0 or (self.count is None and not exchanged):
            # The last micro-batch was not known in advance: an empty one exchanges gradients.
            self._run_micro_batch(self._prepare_empty(), last=True)
        bundle, numbers = self._finish()
        timings = Timings(
            wait=counting + prepared.waited,
            prepare=counting + prepared.preparing,
            compute=self.compute.seconds,
            communicate=self.communicate.seconds,
            total=time.perf_counter() - began,
            first=first,
        )
        return self._result(timings, bundle, numbers)

    # Prepare, in the prefetching thread ----------------------------------------------------------

    def _prepare_all(self) -> Iterator[Prepared]:
        for item in self.items:
            if isinstance(item, Batch):
                yield self._prepare(item)
            elif isinstance(item, FedMicroBatch):
                self.fed, born = item.micro, tuple(item.born.values())
                yield self._prepare(self._collate(item.micro, item.samples), born=born)
                self.fed = None
            elif isinstance(item[1], Batch):  # collated when it was counted
                yield self._prepare(item[1], item[0])
            else:
                check_none_skipped(item[1], self.step_loss)
                yield self._prepare(self._collate(item[0], item[1]), item[0])

    def _collate(self, micro: MicroBatch, samples: Mapping[int, Any]) -> Batch:
        self.example = next(iter(samples.values()), self.example)
        try:
            return self.runner.collate(micro, samples)
        except torch.OutOfMemoryError as error:
            raise MicroBatchError(
                f"a micro-batch of step {self.number} on rank {self.ranks.rank} "
                f"({_describe_planned(micro)}) ran out of memory while it was collated. Collate on "
                f"the CPU and pass Runner(device=...), lower prefetch, or lower max_tokens."
            ) from error

    def _prepare(
        self, batch: Batch, micro: MicroBatch | None = None, born: tuple[float, ...] = ()
    ) -> Prepared:
        """Check a batch, count what it holds and move it to the device, if that has memory."""
        groups = self._check_groups(batch, micro) if self.counts_groups else ()
        if self.step_loss.mode == "known" and self.step is not None and self.step.loss_tokens:
            check_labels(batch, self.step.loss_tokens)
        if self.token_ids is not None:
            self.token_ids.note(batch)
        segments = HostSegments.of(batch)
        labels = int((batch.labels != IGNORE_INDEX).sum())
        parts = len(segments.sample) if micro is None else int(micro.parts.max(initial=0)) + 1
        on_device = False
        # If the micro-batch that runs now holds the memory, this one is moved when it is its turn.
        with suppress(torch.OutOfMemoryError):
            batch, on_device = self._move(batch), True
        return Prepared(batch, on_device, segments, labels, parts, groups, born)

    def _check_groups(self, batch: Batch, micro: MicroBatch | None) -> set[int]:
        """The groups that GroupMean counts in this batch, after a look at the plan's."""
        planned = self.planned_groups
        whole = micro is not None and micro.groups is not None
        if micro is not None and micro.groups is not None:
            planned = dict(zip(micro.segments.sample.tolist(), micro.groups.tolist(), strict=True))
        split = self.runner.on_memory == "split" and not whole
        groups = check_groups_whole(batch, self.seen_groups, split)
        if groups and planned:
            check_groups_planned(batch, planned)
        return groups

    def _move(self, batch: Batch) -> Batch:
        if self.device is None:
            return batch
        if self.runner.device is None and self.device.type == batch.device.type == "cpu":
            return batch  # where the model is
        if self.stream is None:
            return batch.to(self.device)
        # Use the model's stream; this thread has another current stream.
        with torch.cuda.stream(self.stream):
            batch = batch.pin_memory() if batch.device.type == "cpu" else batch
            return batch.to(self.device, non_blocking=True)

    def _prepare_empty(self) -> Prepared:
        return self._prepare(self.runner.collate(self.empty or empty_micro_batch(), {}))

    def _in_lock_step(self, items: Iterator[Prepared]) -> Iterator[Prepared]:
        """Yield micro-batches until all ranks are done; ranks without one get empty ones."""
        while True:
            item = next(items, None)
            with self.communicate:
                have = torch.tensor([float(item is not None)])
                anyone = bool(self.ranks.all_reduce_sum(have).item())
            if not anyone:
                return
            yield self._prepare_empty() if item is None else item
            del item

    def _collate_and_count(self) -> None:
        """Counted mode: collate all micro-batches and sum over ranks what each adds to
        denominators."""
        items: list[Batch | tuple[MicroBatch, Batch]] = []
        for position, item in enumerate(self.items):
            assert not isinstance(item, FedMicroBatch)
            if isinstance(item, Batch):
                items.append(item)
                continue
            assert not isinstance(item[1], Batch)
            try:
                items.append((item[0], self._collate(item[0], item[1])))
            except Exception as error:
                with suppress(Exception):
                    error.add_note(f"while preparing {self._name_in_preparation(position)}")
                raise
        batches = [item[1] if isinstance(item, tuple) else item for item in items]
        # A rank without micro-batches runs an empty one.
        batches = batches or [self.runner.collate(self.empty or empty_micro_batch(), {})]
        first = getattr(self._shard(batches[0]), "rank", 0) == 0
        bundles = []
        for batch in batches:
            amounts = self.step_loss.amounts(batch, first).items()
            sums = {f"amount/{name}": amount for name, amount in amounts}
            sums[LABELS] = (batch.labels != IGNORE_INDEX).sum()
            sums[PREDICTED] = torch.tensor(HostSegments.of(batch).predicted)
            bundles.append(Bundle(sums))
        with self.communicate:
            reduced = Bundle.merge(bundles).reduce(self.ranks)
        self.step_loss = self.step_loss.counted(reduced)
        none = float(reduced.sums[LABELS]) == 0 and float(reduced.sums[PREDICTED]) > 0
        if none and self.step_loss.needs_labels(self.step_loss.known({})):
            raise self._without_loss()
        self.items = items

    # Forward, loss and backward of one micro-batch -----------------------------------------------

    def _run_micro_batch(self, ready: Prepared, last: bool) -> None:
        now, failure = time.time(), None
        self.ages += [now - born for born in ready.born]
        # Sharded accumulators of several denominators hold exchanged gradients only.
        exchange = (last or self.separate is not None) and not self.sums
        try:
            batch = ready.batch if ready.on_device else self._move(ready.batch)
            if self.runner.preprocess is not None:
                batch = self._preprocess(self.runner.preprocess, batch)
            shard = self._shard(batch)
            first = getattr(shard, "rank", 0) == 0  # of the ranks that share the batch
            amounts = self.step_loss.amounts(batch, first)
            if first:
                self.ran_groups.update(ready.groups)
            with self.compute, self.framework.exchange(exchange):
                self._forward_and_backward(ready, batch, shard, amounts, exchange)
            if self.suspects is not None:
                self.suspects.after_backward(self._gradients(), self.framework)
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)  # its frames keep the memory alive
        except Exception as error:
            explained = self._explain(error, ready)
            if explained is None:
                raise
            raise explained from error
        if failure is not None or self.runner.on_memory == "split":
            self._check_memory(failure, ready)
        self.sharers = getattr(shard, "size", 1)
        self.tokens += int(ready.segments.length.sum())
        self.slots += ready.batch.rows * ready.batch.width
        self.labels += ready.labels
        self.predicted += ready.segments.predicted
        if self.runner.cost is not None:
            self.flops += float(self.runner.cost.of_lengths(ready.segments.length).sum())
        self.position += 1

    def _preprocess(self, preprocess: Callable[[Batch], Batch], batch: Batch) -> Batch:
        began = time.perf_counter()
        torch.clear_autocast_cache()  # casts of weights before the last update
        with torch.no_grad():
            batch = preprocess(batch)
        self.compute.elapsed += time.perf_counter() - began
        return batch

    def _shard(self, batch: Batch) -> Batch | BatchShard:
        return batch if self.runner.shard is None else self.runner.shard(batch)

    def _forward_and_backward(
        self,
        ready: Prepared,
        batch: Batch,
        shard: Batch | BatchShard,
        amounts: dict[str, Tensor],
        exchange: bool,
    ) -> None:
        assert self.runner.forward is not None
        # An autocast around the step keeps the casts of weights. Their part of the graph would be
        # older than this micro-batch, so that fully_shard reduces gradients before they have
        # arrived, and their values those of before the last update.
        torch.clear_autocast_cache()
        outputs = self.runner.forward(self.runner.model, shard)

        losses: dict[str, Sums | Tensor] = {}  # as the functions return them, without divisors
        for name, loss in self.losses.items():
            value = loss.function(outputs, self._shard(weighted(batch, loss.normalization)))
            if isinstance(value, tuple) or isinstance(loss.normalization, ByLoss):
                value, divisor = split_divisor(name, loss.normalization, value)
                amounts[loss.normalization.name] = divisor.detach().double()
            losses[name] = value
        if self.keeper is not None:
            self.keeper.add(ready.segments, losses)
        if self.suspects is not None:
            ids = ready.segments.sample
            self.suspects.before_backward(ids, exchange, outputs, shard, losses)

        sums = {n: loss.loss if isinstance(loss, Sums) else loss for n, loss in losses.items()}
        scales = self._scales(amounts)
        if self.separate is None:
            self._scaled(self.step_loss.objective(sums, scales)).backward()
        else:
            objectives = self.step_loss.objectives(sums, scales)
            self.separate.backward({n: self._scaled(each) for n, each in objectives.items()})
        metrics = {
            f"{name}/{key}" if len(losses) > 1 else key: metric
            for name, loss in losses.items()
            if isinstance(loss, Sums)
            for key, metric in loss.metrics.items()
        }
        self.bundles.append(self.step_loss.bundle(sums, amounts, scales, metrics))

    def _scales(self, amounts: Mapping[str, Tensor]) -> Mapping[str, float]:
        """Factors of this micro-batch's loss sums before backward."""
        if self.step_loss.mode == "per_micro_batch":
            with self.communicate:
                bundle = Bundle(amounts, extremes(COUNT, self.count or 0)).reduce(self.ranks)
            check_counts(extremes_of(bundle, COUNT))
            count = max(self.count or 0, 1)
            return self.step_loss.scales(reduced=bundle.sums, micro_batches=count)
        if self.scales is None:
            self.scales = self.step_loss.scales(self.totals)
        return self.scales

    def _scaled(self, objective: Tensor) -> Tensor:
        """The objective times the scale of the GradScaler, if there is one."""
        if not objective.requires_grad:
            raise not_trainable(self.parameters)
        if self.runner.scaler is None:
            return objective
        self.scale = self.runner.scaler.scale(objective.detach().new_ones(()))
        scaled: Tensor = self.runner.scaler.scale(objective)
        return scaled

    def _gradients(self) -> list[Tensor]:
        """Gradients of the step so far."""
        if self.separate is not None:
            return self.separate.tensors
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    # Finish --------------------------------------------------------------------------------------

    def _finish(self) -> tuple[Bundle, LossValues | None]:
        """Exchange, rescale and measure the gradients; (numbers of this rank, of all ranks).

        Numbers of all ranks are exchanged later (`StepResult.reduce`) if denominators were known
        before the step and nothing here needs them: then they are None.
        """
        bundles = [*self.bundles, Bundle({}, self._measures())]
        later = self.step_loss.ahead and self.ranks.size > 1
        later = later and self.suspects is None and not self.counts_groups
        if self.separate is None:
            bundles.append(self._sum_gradients(count_labels=later))
        bundle = Bundle.merge(bundles)
        if later:
            return bundle, None
        with self.communicate:
            reduced = bundle.reduce(self.ranks)
        check_constants(reduced)
        numbers = self.step_loss.finish(self.separate or self.parameters, reduced, self.totals)
        if self.separate is not None:
            # Only now is there one gradient: sum it over ranks and measure it.
            square = self._sum_gradients(count_labels=False)
            with self.communicate:
                metrics = {**numbers.metrics, **square.reduce(self.ranks).metrics}
            numbers = replace(numbers, metrics=metrics)
        if self.counts_groups:
            most = int(numbers.metrics[GROUPS_MOST].value)
            with self.communicate:
                check_groups_on_ranks(self.ran_groups, most, self.ranks)
        return bundle, numbers

    def _measures(self) -> dict[str, Metric]:
        """Busy time and counts of this rank, reduced with the losses."""
        counts = {
            TOKENS: self.tokens, LABELS: self.labels, PREDICTED: self.predicted, SLOTS: self.slots
        }  # fmt: skip
        metrics = {
            name: Metric.sum(torch.tensor(count / self.sharers, dtype=torch.float64))
            for name, count in counts.items()
        }
        busy = torch.tensor(sum(self.compute.busy), dtype=torch.float64)
        metrics |= {BUSY: Metric.mean(busy, 1), BUSY_MOST: Metric.max(busy)}
        if self.runner.cost is not None:
            # A mean over ranks: MFU compares with the peak of one rank.
            flops = torch.tensor(self.flops / self.sharers, dtype=torch.float64)
            metrics[FLOPS] = Metric.mean(flops, 1)
        if self.counts_groups:
            metrics[GROUPS_MOST] = Metric.max(torch.tensor(float(len(self.ran_groups))))
        if self.step_loss.mode == "deferred" and self.ranks.size > 1:
            metrics |= extremes(CONSTANT, self.step_loss.constant)
        if self.scale is not None and self.ranks.size > 1:
            metrics |= extremes(SCALE, self.scale)
        return metrics

    def _sum_gradients(self, count_labels: bool) -> Bundle:
        """Sum gradients over ranks, unless the framework has; this rank's share of their norm.

        `count_labels` if ranks exchange no numbers: then those that tell whether the step has a
        loss token go along, unless the plan knows it.
        """
        counts: tuple[float, ...] = ()
        unknown = self.step_loss.mode == "known" and "loss_tokens" not in self.totals
        if count_labels and unknown:
            needed = self.step_loss.needs_labels(self.step_loss.known(self.totals))
            counts = (float(self.labels > 0), float(self.predicted > 0)) if needed else ()
        summed: Tensor | None = None
        with self.communicate:
            if self.sums:
                summed = sum_gradients(self.parameters, self.ranks, counts)
            elif counts:
                summed = self.ranks.all_reduce_sum(torch.tensor(counts))
        # A rank with a loss token knows that the step has one, and does not wait for the others.
        if counts and summed is not None and not self.labels:
            labels, predicted = summed.tolist()
            if predicted and not labels:
                raise self._without_loss()
        # Without a scaler's scale: the norm is that of the exact gradient.
        share = square_share(self.parameters, self.ranks.size, self.framework.kind == "fsdp")
        share = share if self.scale is None else share / self.scale.double().square()
        return Bundle({}, {SQUARE: Metric.sum(share)})

    def _result(self, timings: Timings, bundle: Bundle, numbers: LossValues | None) -> StepResult:
        """The result, marked as skipped if it is not finite, or an error; alike on all ranks."""
        often = "micro_batch" if self.framework.kind == "fsdp" else "step"
        costs = () if self.step is None else self.step.costs
        result = StepResult(
            timings=timings,
            tokens=self.tokens,
            slots=self.slots,
            num_micro_batches=self.position,
            planned_imbalance=self.totals.get(f"imbalance_{often}"),
            busy=tuple(self.compute.busy),
            costs=costs if len(costs) == self.position else (),
            ages=tuple(self.ages),
            peak_flops=self.runner.peak_flops,
            kept=None if self.keeper is None else self.keeper.kept(),
            bundle=bundle,
            numbers=numbers,
            known=(self.step_loss, self.totals),
        )
        if result.numbers is not None and result.without_loss:
            raise self._without_loss()
        if self.suspects is None or result.finite:
            return result
        if self.runner.on_nonfinite == "skip":
            return replace(result, skipped=True)
        source = self.suspects.source(self.ranks, self.count)
        raise MicroBatchError(
            f"step {self.number} has a loss of {result.loss:g} and a gradient of norm "
            f"{result.grad_norm:g}; the first number that is not finite is in {source}. Inspect "
            f"these samples and the learning rate, or set on_nonfinite='skip'."
        )

    # Failures ------------------------------------------------------------------------------------

    def _check_totals(self) -> None:
        """Raise if the totals of a plan say that no token of the step counts in the loss."""
        if self.step_loss.mode != "known" or self.totals.get("loss_tokens") != 0:
            return
        predicted = self.totals.get("tokens", 0) - self.totals.get("samples", 0)
        if predicted > 0 and self.step_loss.needs_labels(self.step_loss.known(self.totals)):
            raise self._without_loss()

    def _without_loss(self) -> InputError:
        why = ANY_CAUSE
        if self.example is not None:
            why = f"In one of its samples, {cause_of_no_loss(self.example)}"
        return InputError(f"no token of step {self.number} counts in the loss, on any rank. {why}")

    def _check_memory(self, failure: BaseException | None, ready: Prepared) -> None:
        """Raise if this micro-batch ran out of memory; with `split` on all ranks, if on any."""
        where = f"{self._place(self.position)} ({ready.description})"
        if self.runner.on_memory != "split":
            raise MicroBatchError(
                f"{where} ran out of memory. Lower max_tokens below "
                f"{ready.batch.rows * ready.batch.width} slots, set limits.cost, or set "
                f"on_memory='split'."
            ) from failure
        mine = None if failure is None else (len(ready.segments.sample), ready.parts)
        with self.communicate:
            failed = out_of_memory(self.ranks, self.count or 0, mine)
        if failed is None:
            return
        rank, why = failed
        if why is None:
            raise TooLargeError(self.position)
        where = where if rank == self.ranks.rank else self._place(self.position, rank)
        raise MicroBatchError(f"{where} {why}") from failure

    def _explain(self, error: Exception, ready: Prepared) -> InputError | None:
        """What to raise instead of an error, if token ids are its cause; adds where it happened."""
        token_ids = self.token_ids
        if token_ids is None:
            token_ids = TokenIds(self.runner.model)
            token_ids.note(ready.batch)
        explained = token_ids.explain(error)
        with suppress(Exception):
            (explained or error).add_note(f"in {self._place(self.position)} ({ready.description})")
        return explained

    def _name_in_preparation(self, position: int) -> str:
        """The name of the micro-batch that is prepared, for errors."""
        micro = self.fed
        if isinstance(self.items, Step) and position < len(self.items):
            micro = self.items.micro_batches[position]
        return self._place(position) + ("" if micro is None else f" ({_describe_planned(micro)})")

    def _place(self, position: int, rank: int | None = None) -> str:
        total = "" if self.count is None else f" of {self.count}"
        rank = self.ranks.rank if rank is None else rank
        return f"micro-batch {position}{total} of step {self.number} on rank {rank}"


def _describe(rows: int, width: int, sample_ids: IntArray) -> str:
    """1 x 8 slots, 3 segments of samples 4, 0, 7"""
    shown = ", ".join(map(str, sample_ids[:4])) + ("..." if len(sample_ids) > 4 else "")
    segments = f"{len(sample_ids)} segments of samples {shown}" if shown else "no segment"
    return f"{rows} x {width} slots, {segments}"


def _describe_planned(micro: MicroBatch) -> str:
    return _describe(micro.rows, micro.width, micro.segments.sample)


def _planned_groups(step: Step | None) -> dict[int, int]:
    """The group of each sample of a step in its plan; {} if it has none."""
    if step is None or step.plan is None or step.plan.groups is None or step.sample_ids is None:
        return {}
    return dict(zip(step.sample_ids.tolist(), step.plan.groups.tolist(), strict=True))
