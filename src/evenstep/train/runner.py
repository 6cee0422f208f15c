"""Runner: run a step one micro-batch at a time and leave its exact gradient."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import starmap
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from evenstep.core.cost import Cost
from evenstep.core.plan import MicroBatch
from evenstep.core.ragged import IntArray
from evenstep.core.recipe import SyncEvery
from evenstep.core.step import Step
from evenstep.core.text import one_of, short_repr, whole_number
from evenstep.data.feed import FedMicroBatch, Feed
from evenstep.data.source import cause_of_no_loss
from evenstep.errors import ConfigError, InputError, MicroBatchError
from evenstep.tensors.batch import Batch, BatchShard
from evenstep.tensors.collate import Collator
from evenstep.tensors.losses import Metric, Sums
from evenstep.train import checks, result
from evenstep.train.collectives import Alone, Bundle, Collective, gather_values
from evenstep.train.compiling import Compilations
from evenstep.train.framework import Forward, Framework, device_of, forward_of
from evenstep.train.gradients import Gradients, set_aside, square_share, sum_gradients
from evenstep.train.model_head import Heads
from evenstep.train.normalization import (
    ByLoss,
    GroupMean,
    Normalization,
    TokenMean,
    with_group_tokens,
)
from evenstep.train.prefetch import Prefetch
from evenstep.train.result import (
    BatchSegments,
    ComputeTime,
    Keep,
    Keeper,
    StepResult,
    Stopwatch,
    counts_of,
)
from evenstep.train.sharing import check_sharing
from evenstep.train.step_loss import (
    Loss,
    LossFunction,
    LossValues,
    Mode,
    StepLoss,
    compute_losses,
    power_of_two,
)

if TYPE_CHECKING:
    from evenstep.train.scoring import Evaluation

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
    shard         for attention of your own: Batch -> BatchShard of this context- or
                  sequence-parallel rank, e.g. `lambda batch: shard_context(batch, rank, size)`.
                  Without it, the runner divides samples if the collective holds all data- and
                  context-parallel ranks of the plan
    preprocess    Batch -> Batch, without gradient, on the device and just before the micro-batch
                  runs; for example adds the log-probs of a reference model as an extra
    device        where batches are moved before they run; None: where the model's first parameter
                  is
    prefetch      number of micro-batches prepared ahead; prefetch + 1 are alive. If the device has
                  no memory for the next one yet, it is copied when it runs
    cost          model FLOPs of a segment (`Cost.of_model`), for MFU with `peak_flops` per second
    reduce_every  `micro_batch`, for fully_shard: scatter gradients in every backward, so that they
                  are never held whole. Saves up to 4 bytes per weight in steps of several
                  micro-batches, and sends as many once more per micro-batch. `step`: sum them over
                  micro-batches first. The gradient is the same
    on_memory     `split`: if a micro-batch runs out of memory, divide it in two on all ranks and
                  run the step again; groups stay whole if the plan keeps them in one micro-batch.
                  Later micro-batches of as many slots are divided before they run. Needs a small
                  all-reduce per micro-batch
    on_nonfinite  what to do if the loss or gradient of a step is inf or NaN, on all ranks alike.
                  `raise`: an error that names the micro-batch and the samples. `skip`: discard
                  the gradient of the step; `StepResult.skipped` is True. None leaves the gradient
                  as it is; see `StepResult.finite`
    scaler        a `torch.amp.GradScaler`: gradients are scaled, ready for its `unscale_`, `step`
                  and `update`, which skips steps that are not finite
    keep          `samples` or `tokens`: return the loss values of each sample, or also of each
                  token, in `StepResult.kept`
    check_prefixes  before the first step whose samples share prefixes, compare two of them with
                  the same samples whole, without gradients. Not for batches that are collated
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
    reduce_every: SyncEvery = "step"
    on_memory: OnMemory = "raise"
    on_nonfinite: OnNonfinite | None = None
    scaler: Any = None
    keep: Keep | None = None
    check_prefixes: bool = True
    _compared: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    """The fingerprint of the first step, once ranks have compared it."""
    _inside: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)
    """True once a loss was seen to depend on parameters of the model alone."""
    _ran_out: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    """The fewest slots that ran out of memory, once any have; equal on all ranks."""

    def __post_init__(self) -> None:
        if not hasattr(self.model, "parameters") or isinstance(self.model, type):
            raise ConfigError(
                f"model must be a torch.nn.Module, got {short_repr(self.model)}. Load the model "
                f"first, for example with AutoModelForCausalLM.from_pretrained(...)."
            )
        if self.forward is None:
            object.__setattr__(self, "forward", forward_of(self.model))
        checks.check_kind(
            "collective", self.collective, "all_reduce_sum", "Distributed() or Alone()"
        )
        checks.check_kind("cost", self.cost, "of_lengths", "Cost.named('llama-3-8b')")
        for name, each in self.losses.items():
            checks.check_loss(name, each.function, each.normalization)
        whole_number("prefetch", self.prefetch, least=0)
        one_of("on_memory", self.on_memory, OnMemory)
        one_of("reduce_every", self.reduce_every, SyncEvery)
        for name, words in (("mode", Mode), ("on_nonfinite", OnNonfinite), ("keep", Keep)):
            if getattr(self, name) is not None:
                one_of(name, getattr(self, name), words)
        if self.on_nonfinite and self.scaler is not None and self.scaler.is_enabled():
            raise ConfigError(
                f"on_nonfinite={self.on_nonfinite!r} and a scaler exclude each other: the scaler "
                f"has to see gradients that are not finite, to skip the step and lower its scale. "
                f"Set on_nonfinite=None."
            )
        if self.on_memory == "split" and self.mode == "per_micro_batch":
            raise ConfigError(
                "on_memory='split' changes the number of micro-batches, on which the loss of "
                "mode='per_micro_batch' depends. Use mode='deferred'."
            )
        if self.reduce_every == "micro_batch" and not Framework.of(self.model).locks_step:
            raise ConfigError(
                "reduce_every='micro_batch' scatters gradients of fully_shard, but the model is "
                "not wrapped by it. Leave it out."
            )
        if self.on_memory == "split" and Framework.of(self.model).locks_step:
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
        if not torch.is_grad_enabled():
            raise ConfigError(
                "a runner computes gradients, but torch.no_grad or inference_mode is on. Leave it "
                "out, or use compute_log_probs for values without gradients."
            )
        step = step if self.shard else checks.context_step(step, self.collective)
        split = self.on_memory == "split"
        if split and (not isinstance(step, Step) or step.batches is not None):
            raise ConfigError(
                "on_memory='split' needs samples, but the step holds collated batches. Pass a Step "
                "whose samples the runner collates."
            )
        digests = checks.exchange_digests(step)
        if split and digests:
            raise ConfigError(
                "on_memory='split' divides micro-batches, but this step shares samples between "
                "ranks. Use on_memory='raise', or plan without sharing and context parallelism."
            )
        if checks.compare_plans(step, self.collective, always=not self._compared):
            self._compared[:] = [getattr(step, "fingerprint", "")]
        budget = getattr(step, "budget", None)
        if not isinstance(step, Step):
            return StepRun(self, step, len(step), budget=budget).run()
        checks.check_collective(step.ranks, self.collective)
        if split and step.plan is not None and step.plan.recipe.equal_tokens:
            raise ConfigError(
                "on_memory='split' divides micro-batches without regard to other ranks, but "
                "equal_tokens makes those of a wave equally wide. Leave one of them out."
            )
        if step.batches is None and self.shard is None:
            check_sharing(self, step, step.plan, self.collective)
        while True:
            step = self._divided(step) if self._ran_out else step
            items = step if step.batches is None else step.batches
            try:
                return StepRun(self, items, len(items), step=step, budget=budget).run()
            except TooLargeError as error:
                self._ran_out[:] = [min([*error.args, *self._ran_out])]

    def _divided(self, step: Step) -> Step:
        """The step without micro-batches that would run out of memory on any rank, as others of as
        many slots have."""
        micros = list(step.micro_batches)
        checks.out_of_memory(self.collective, len(micros), checks.FITS)  # equally many
        while True:
            mine = [
                each.slots * (each.slots >= self._ran_out[0] and _parts(each) > 1)
                for each in micros
            ]
            too_large = [
                max(slots) for slots in zip(*gather_values(self.collective, mine), strict=True)
            ]
            if not any(too_large):
                return replace(step, micro_batches=tuple(micros))
            pairs = zip(micros, too_large, strict=True)
            micros = [half for each, over in pairs for half in (each.halves() if over else (each,))]

    def evaluate(self, stream: Iterable[Step], sources: ArrayLike | None = None) -> Evaluation:
        """The loss of held-out samples by forward passes, in eval mode, over all steps and ranks.

        The mean over the whole stream, exact for any number of ranks and any layout. `sources` has
        the number of the source of each sample, by sample id; each then gets a loss of its own. All
        ranks call it, each with its steps.

            held_out = PlannedStream(samples, recipe, shuffle=False)
            print(runner.evaluate(held_out).loss)
        """
        from evenstep.train.scoring import evaluate  # stands on this module

        return evaluate(self, stream, sources)

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
        needed = Framework.of(self.model).locks_step
        if needed and lock_step is False:
            raise ConfigError(
                "lock_step=False does not support fully_shard, whose ranks synchronise inside a "
                "micro-batch. Leave it out."
            )
        lock_step = needed if lock_step is None else lock_step
        feed = feed if self.shard else checks.context_step(feed, self.collective)
        budget = feed.budget if isinstance(feed, Feed) else None
        return StepRun(self, feed, None, number=number, budget=budget, lock_step=lock_step).run()


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


# One run of a step ------------------------------------------------------------------------------


@cache
def copy_stream(device: torch.device) -> Any:
    """The stream of a GPU on which batches are copied, so that copies wait for no forward."""
    return torch.cuda.Stream(device)


_TO_PREDICT = (result.LABELS, result.PREDICTED)  # what tells whether a step has a loss


class TooLargeError(Exception):
    """A micro-batch of so many slots ran out of memory and can be divided; on every rank."""


@dataclass(slots=True, eq=False)
class Prepared:
    """A collated micro-batch, and what results and errors report of it."""

    batch: Batch
    here: bool
    """Whether it is on the device. If that had no memory for it yet, it is copied when it runs."""
    copied: Any
    """The event of its copy, for which the model waits; None if there is nothing to wait for."""
    segments: BatchSegments
    micro: MicroBatch | None
    born: Collection[float]
    """When each of its samples was created, if they are fed."""


Collated: TypeAlias = tuple[Batch, MicroBatch | None, Collection[float]]
"""A batch, what it was made of if that is planned, and when its samples were created, if fed."""


class StepRun:
    """One run of a step: prepare, forward, loss, backward, finish.

    The methods stand in the order in which a micro-batch passes through them. A step of
    `on_memory="split"` takes several runs if a micro-batch is too large.

    count      number of micro-batches; None while a step is being fed
    lock_step  whether ranks agree before each micro-batch that is fed
    """

    def __init__(
        self,
        runner: Runner,
        items: Iterable[Batch | FedMicroBatch | tuple[MicroBatch, Any]],
        count: int | None,
        *,
        step: Step | None = None,
        number: int = 0,
        budget: int | None = None,
        lock_step: bool = False,
    ) -> None:
        self.runner, self.items, self.count, self.step = runner, items, count, step
        self.number, self.lock_step = number if step is None else step.number, lock_step
        self.totals: Mapping[str, float] = {} if step is None else step.totals
        self.ranks, self.losses = runner.collective, runner.losses
        assert runner.forward is not None
        functions = [loss.function for loss in self.losses.values()]
        self.heads = Heads.of_losses(runner.model, runner.forward, functions)
        self.framework = Framework.of(runner.model)  # reshards, which changes the parameters
        self.parameters = list(runner.model.parameters())
        self.gradients = Gradients(self.parameters)
        device = device_of(runner.model) if runner.device is None else runner.device
        self.device = None if device is None else torch.device(device)
        on_host = self.device is None or self.device.type == "cpu"
        # Ids are noted before they are moved to another device, where they may be lost.
        self.token_ids = None if on_host else checks.TokenIds(runner.model)
        cuda = self.device is not None and self.device.type == "cuda"
        self.copies = copy_stream(self.device) if cuda else None
        self.compute, self.communicate = ComputeTime(cuda), Stopwatch()
        self.preprocessing = ComputeTime(cuda)
        self.step_loss, self.sums = self._make_step_loss(budget)
        # Whether every backward exchanges gradients: sharded accumulators of several denominators
        # hold exchanged ones only.
        self.each = self.step_loss.separate or runner.reduce_every == "micro_batch"
        self.scales: Mapping[str, float] | None = None  # of every micro-batch, if they are equal
        self.scale: Tensor | None = None  # of the GradScaler in this step
        self.suspects = checks.Suspects() if runner.on_nonfinite else None
        self.keeper = Keeper(runner.keep) if runner.keep else None
        norms = self.step_loss.denominators.values()
        by_group = any(isinstance(each, GroupMean) for each in norms)
        self.groups = checks.Groups(step, runner.on_memory == "split") if by_group else None
        self.position = 0  # of the micro-batch that runs
        self.fed: MicroBatch | None = None  # being prepared
        self.example: Any = None  # one of this rank's samples, for errors
        self.compiled = Compilations.so_far()
        self.ages: list[float] = []
        self.busy: list[float] = []  # seconds of each micro-batch
        self.ran: list[BatchSegments] = []
        self.counts: Mapping[str, float] = {}  # of all that ran, by the name of their metrics
        self.sharers = 1  # context-parallel ranks that share a micro-batch
        self.bundles: list[Bundle] = []

    def _make_step_loss(self, budget: int | None) -> tuple[StepLoss, bool]:
        """(the losses of this step, whether the runner sums gradients over ranks)."""
        losses = {name: (loss.normalization, loss.weight) for name, loss in self.losses.items()}
        norms = {norm.name: norm for norm, _ in losses.values()}
        mode = self.runner.mode
        if mode is None:
            # The totals are equal on all ranks.
            known = all(norm.known(self.totals) is not None for norm in norms.values())
            by_loss = any(isinstance(norm, ByLoss) for norm in norms.values())
            counted = len(norms) > 1 and self.count is not None and not by_loss
            mode = "known" if known else "counted" if counted else "deferred"
        elif mode in ("per_micro_batch", "counted") and self.count is None:
            raise ConfigError(
                f"mode={mode!r} needs all micro-batches, which are unknown while a step is being "
                f"fed. Use mode='deferred'."
            )
        sums = not self.framework.exchanges or self.runner.on_memory == "split"
        if mode == "deferred" and len(norms) > 1:
            sums = sums or not self.framework.locks_step  # DDP exchanges what is in `.grad`
        if sums and self.ranks.size > 1:
            checks.check_shards(self.runner.model.named_parameters(), self.ranks)
        averaged_over = 1 if sums else self.framework.averaged_over(self.ranks)
        constant = power_of_two(budget) if budget else 1.0
        return StepLoss(losses, mode, averaged_over, constant, self.totals), sums

    def run(self) -> StepResult:
        """Run the step and leave its gradient; if it fails, gradients and model are as before."""
        framework = self.framework
        with set_aside(self.parameters, framework.owns_gradients, framework.recover) as discard:
            began = time.perf_counter()
            if self.step_loss.mode == "known" and "loss_tokens" in self.totals:
                predicted = self.totals.get("tokens", 0) - self.totals.get("samples", 0)
                self._check_loss_tokens([self.totals["loss_tokens"], predicted])
            collated: Iterable[Collated] = self._collate_all()
            if self.step_loss.mode == "counted":
                collated = list(Prefetch(collated, 0, name=self._place))
                self._count([batch for batch, *_ in collated])
            if self.step_loss.mode != "per_micro_batch":
                self.scales = self.step_loss.scales()
            counting = time.perf_counter() - began
            abandon = self.items.abandon if isinstance(self.items, Feed) else lambda: None
            ahead = 0 if self._nothing_to_prepare() else self.runner.prefetch
            ready_batches = starmap(self._prepare, collated)  # keeps none of them
            prepared = Prefetch(ready_batches, ahead, abandon, self._place)
            first = 0.0  # seconds to the first forward
            with closing(iter(prepared)) as items:
                for ready in self._in_lock_step(items) if self.lock_step else items:
                    first = first or time.perf_counter() - began
                    self._run_micro_batch(ready, last=self.position + 1 == self.count)
                    del ready  # before requesting the next one: prefetch + 1 are alive
            if self.position == 0 or (self.count is None and not (self.sums or self.each)):
                # The last micro-batch was not known in advance: an empty one exchanges gradients.
                self._run_micro_batch(self._prepare(self._empty()), last=True)
            self.busy = self.compute.busy()
            self.preprocessing.busy()  # which are all its seconds on a GPU
            self.heads.check()  # which waits for nothing: the device has ended the step
            self.counts = counts_of(self.ran, self.runner.cost)
            bundle, numbers = self._finish()
            timings = result.Timings(
                wait=counting + prepared.waited,
                prepare=counting + prepared.preparing,
                compute=self.preprocessing.seconds + self.compute.seconds,
                communicate=self.communicate.seconds,
                total=time.perf_counter() - began,
                first=first,
            )
            ran = self._result(timings, bundle, numbers)
            if ran.skipped:
                discard()
        return ran

    # Prepare, in the prefetching thread ----------------------------------------------------------

    def _collate_all(self) -> Iterator[Collated]:
        for item in self.items:
            if isinstance(item, Batch):
                yield item, None, ()
                continue
            born: Collection[float] | None = None
            if isinstance(item, FedMicroBatch):
                micro, samples, born = item.micro, item.samples, item.born.values()
                self.fed = micro
            else:
                micro, samples = item
                if self.step_loss.mode == "known":
                    checks.check_none_skipped(samples, self.step_loss)
            self.example = next(iter(samples.values()), self.example)
            try:
                batch = self.runner.collate(micro, samples)
            except torch.OutOfMemoryError as error:
                raise MicroBatchError(
                    f"a micro-batch of step {self.number} on rank {self.ranks.rank} "
                    f"({_describe(micro, micro.segments.sample)}) ran out of memory while it was "
                    f"collated. Collate on the CPU and pass Runner(device=...), lower prefetch, or "
                    f"lower max_tokens."
                ) from error
            yield (batch, micro, ()) if born is None else (batch, None, born)
            self.fed = None
            del batch  # before the next one is made: prefetch + 1 are alive

    def _prepare(
        self, batch: Batch, micro: MicroBatch | None = None, born: Collection[float] = ()
    ) -> Prepared:
        """Check a batch, count what it holds and move it to the device, if that has memory."""
        if batch.tree is not None:
            checks.check_tree(self.runner.preprocess)
        if batch.exchange is not None:
            checks.check_exchange(batch.exchange, self.ranks, self.count is not None)
            batch = batch.between(self.ranks)
        if self.groups is not None:
            self.groups.check(batch.unshared, micro)
            if self.runner.preprocess is None:
                batch = with_group_tokens(batch)
        if self.step_loss.mode == "known" and self.step is not None and self.step.loss_tokens:
            checks.check_labels(batch.unshared, self.step.loss_tokens)
        if self.token_ids is not None:
            self.token_ids.note(batch)
        # Without a named device, batches may be where the model is already.
        here = self.device is None or (self.runner.device is None and self.device == batch.device)
        ready = Prepared(batch, here, None, BatchSegments(batch), micro, born)
        if not here:
            # If the micro-batch that runs now holds the memory, this one is moved in its turn.
            with suppress(torch.OutOfMemoryError):
                self._move(ready)
        return ready

    def _move(self, ready: Prepared) -> None:
        """Copy a batch to the device, beside what runs there."""
        assert self.device is not None
        if self.copies is None:
            ready.batch, ready.here = ready.batch.to(self.device), True
            return
        with torch.cuda.stream(self.copies):
            batch = ready.batch.pin_memory() if ready.batch.device.type == "cpu" else ready.batch
            ready.batch, ready.here = batch.to(self.device, non_blocking=True), True
            ready.copied = self.copies.record_event()

    def _nothing_to_prepare(self) -> bool:
        """Whether a thread would have nothing to do beside the model: the only micro-batch, or
        batches that are collated and on the model's device."""
        if self.count == 1:
            return True
        batches = self.items if isinstance(self.items, list | tuple) else ()
        return bool(batches) and all(
            isinstance(each, Batch) and self.device in (None, each.device) for each in batches
        )

    def _empty(self) -> Batch:
        """An empty micro-batch, for a rank without work."""
        empty = MicroBatch.one_row([])
        if isinstance(self.items, Feed):
            empty = self.items.empty_micro_batch
        return self.runner.collate(empty, {})

    def _in_lock_step(self, items: Iterator[Prepared]) -> Iterator[Prepared]:
        """Yield micro-batches until all ranks are done; ranks without one get empty ones."""
        while True:
            item = next(items, None)
            with self.communicate:
                have = torch.tensor([float(item is not None)])
                anyone = bool(self.ranks.all_reduce_sum(have).item())
            if not anyone:
                return
            yield self._prepare(self._empty()) if item is None else item
            del item

    def _count(self, batches: list[Batch]) -> None:
        """Counted mode: sum over ranks what each micro-batch adds to denominators."""
        batches = batches or [self._empty()]  # which a rank without micro-batches runs
        shard = self.runner.shard
        first = shard is None or getattr(shard(batches[0]), "rank", 0) == 0
        bundles = []
        for batch in batches:
            amounts = self.step_loss.amounts(batch, first).items()
            bundles.append(Bundle({f"amount/{name}": amount for name, amount in amounts}))
        counts = counts_of([BatchSegments(batch) for batch in batches])
        bundles.append(Bundle({name: torch.tensor(counts[name]) for name in _TO_PREDICT}))
        with self.communicate:
            reduced = Bundle.merge(bundles).reduce(self.ranks)
        self.step_loss = self.step_loss.counted(reduced)
        self._check_loss_tokens([float(reduced.sums[name]) for name in _TO_PREDICT])

    # Forward, loss and backward of one micro-batch -----------------------------------------------

    def _run_micro_batch(self, ready: Prepared, last: bool) -> None:
        failure = None
        if ready.born:
            now = time.time()
            self.ages += [now - born for born in ready.born]
        exchange = (last or self.each) and not self.sums
        try:
            if not ready.here:
                self._move(ready)
            batch = ready.batch
            if ready.copied is not None:
                stream = torch.cuda.current_stream(self.device)
                stream.wait_event(ready.copied)
                batch.record_stream(stream)
            if self.runner.preprocess is not None:
                torch.clear_autocast_cache()  # casts of weights before the last update
                with self.preprocessing, torch.no_grad():
                    batch = self.runner.preprocess(batch)
            shard: Batch | BatchShard = batch
            first = True
            if self.runner.shard is not None:
                shard = self.runner.shard(batch)
                self.sharers = getattr(shard, "size", 1)
                first = getattr(shard, "rank", 0) == 0  # of the ranks that share the batch
            amounts = self.step_loss.amounts(batch, first)
            if self.groups is not None:
                self.groups.here = first
            with self.compute, self.framework.exchange(exchange):
                self._forward_and_backward(ready, batch, shard, amounts, exchange)
            if self.suspects is not None:
                gradients = [*self.gradients.tensors, *self.framework.pending()]
                self.suspects.after_backward(gradients)
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)  # its frames keep the memory alive
        except Exception as error:
            explained = self._explain(error, ready)
            if explained is None:
                raise
            raise explained from error
        if failure is not None or self.runner.on_memory == "split":
            self._check_memory(failure, ready)
        self.ran.append(ready.segments)
        self.position += 1

    def _forward_and_backward(
        self,
        ready: Prepared,
        batch: Batch,
        shard: Batch | BatchShard,
        amounts: dict[str, Tensor],
        exchange: bool,
    ) -> None:
        # An autocast around the step keeps the casts of weights. Their part of the graph would be
        # older than this micro-batch, so that fully_shard reduces gradients before they have
        # arrived, and their values those of before the last update.
        torch.clear_autocast_cache()
        runner = self.runner
        outputs, losses, metrics = compute_losses(
            runner, self.heads, self.losses, batch, shard, amounts
        )
        sums = {
            name: each.loss if isinstance(each, Sums) else each for name, each in losses.items()
        }
        if self.keeper is not None:
            self.keeper.add(ready.segments, losses, batch.exchange)
        if self.suspects is not None:
            mixed = exchange or batch.exchange is not None
            self.suspects.before_backward(ready.segments, mixed, outputs, shard, losses)

        scales = self._exchange_scales(amounts) if self.scales is None else self.scales
        objectives = self.step_loss.objectives(sums, scales)
        if not all(objectives.values()):
            raise checks.not_trainable(self.parameters)
        if not runner._inside and (self.step_loss.mode == "deferred" or self.ranks.size > 1):
            values = [value for roots in objectives.values() for value, _ in roots]
            checks.check_inside(values, self.framework.leaves())
            runner._inside.append(True)
        if runner.scaler is not None:
            scale = runner.scaler.scale
            self.scale = scale(next(iter(sums.values())).detach().new_ones(()))
            objectives = {
                name: [(value, scale(seed)) for value, seed in roots]
                for name, roots in objectives.items()
            }
        # fully_shard adds up what it exchanges: `.grad` does not tell in which backward.
        notes = self.each and self.framework.locks_step
        with self.gradients.noting() if notes else nullcontext():
            self.gradients.backward(objectives)
        self.bundles.append(self.step_loss.bundle(sums, amounts, scales, metrics))

    def _exchange_scales(self, amounts: Mapping[str, Tensor]) -> Mapping[str, float]:
        """per_micro_batch mode: the factors of this micro-batch's loss sums before backward."""
        count = self.count or 0
        with self.communicate:
            bundle = Bundle(amounts, checks.same_on_ranks("count", count)).reduce(self.ranks)
        checks.check_same(bundle)
        return self.step_loss.scales(bundle.sums, max(count, 1))

    # Finish --------------------------------------------------------------------------------------

    def _finish(self) -> tuple[Bundle, LossValues | None]:
        """Exchange, rescale and measure the gradients; (numbers of this rank, of all ranks).

        Numbers of all ranks are exchanged later (`StepResult.reduce`) if denominators were known
        before the step and nothing here needs them: then they are None.
        """
        separate = self.step_loss.separate
        later = self.step_loss.expected is not None and self.ranks.size > 1
        later = later and self.suspects is None and self.groups is None
        later = later and self.runner.preprocess is None  # it may change what counts: compare now
        # Whether the step has a loss token, unless that was known before it.
        if self.step_loss.mode == "known" and "loss_tokens" not in self.totals:
            later = later and not self.step_loss.without_loss(0, 1)
        metrics = self._measures() | ({} if separate else self._sum_gradients())
        merged = Bundle.merge(self.bundles)
        bundle = Bundle(merged.sums, {**merged.metrics, **metrics})
        if later:
            return bundle, None
        with self.communicate:
            reduced = bundle.reduce(self.ranks)
        if self.ranks.size > 1:
            checks.check_same(reduced)
        numbers = self.step_loss.finish(reduced)
        self.gradients.combine(numbers.factors)
        if separate:
            # Only now is there one gradient: sum it over ranks and measure it.
            square = Bundle({}, self._sum_gradients())
            with self.communicate:
                every = {**numbers.metrics, **square.reduce(self.ranks).metrics}
            numbers = replace(numbers, metrics=every)
        if self.groups is not None:
            with self.communicate:
                most = int(numbers.metrics[result.GROUPS_MOST].value)
                self.groups.check_ranks(most, self.ranks)
        return bundle, numbers

    def _measures(self) -> dict[str, Metric]:
        """Busy time and counts of this rank, reduced with the losses."""
        busy = torch.tensor(sum(self.busy), dtype=torch.float64)
        metrics = {result.BUSY: Metric.mean(busy, 1), result.BUSY_MOST: Metric("max", busy)}
        for name, count in self.counts.items():
            share = torch.tensor(count / self.sharers, dtype=torch.float64)
            # FLOPs are a mean over ranks: MFU compares with the peak of one rank.
            metrics[name] = Metric.mean(share, 1) if name == result.FLOPS else Metric.sum(share)
        if self.groups is not None:
            count = torch.tensor(float(self.groups.count))
            metrics[result.GROUPS_MOST] = Metric("max", count)
        if self.ranks.size > 1:
            if self.step_loss.mode == "deferred":
                metrics |= checks.same_on_ranks("constant", self.step_loss.constant)
            if self.scale is not None:
                metrics |= checks.same_on_ranks("scale", self.scale)
            if self.framework.locks_step:
                metrics |= checks.same_on_ranks("used", self.gradients.used)
        return metrics

    def _sum_gradients(self) -> dict[str, Metric]:
        """Sum gradients over ranks, unless the framework has; this rank's share of their norm."""
        if self.sums and self.ranks.size > 1:
            with self.communicate:
                sum_gradients(self.parameters, self.ranks)
        # Without a scaler's scale: the norm is that of the exact gradient.
        share = square_share(self.parameters, self.ranks.size, self.framework.locks_step)
        share = share if self.scale is None else share / self.scale.double().square()
        return {result.SQUARE: Metric.sum(share)}

    def _result(
        self, timings: result.Timings, bundle: Bundle, numbers: LossValues | None
    ) -> StepResult:
        """The result, marked as skipped if it is not finite, or an error; alike on all ranks."""
        often = "micro_batch" if self.framework.locks_step else "step"
        costs = () if self.step is None else self.step.costs
        ran = StepResult(
            timings=timings,
            tokens=int(self.counts[result.TOKENS]),
            slots=int(self.counts[result.SLOTS]),
            num_micro_batches=self.position,
            planned_imbalance=self.totals.get(f"imbalance_{often}"),
            busy=tuple(self.busy),
            costs=costs if len(costs) == self.position else (),
            ages=tuple(self.ages),
            peak_flops=self.runner.peak_flops,
            ran=tuple(self.ran),
            compiled=Compilations.so_far().since(self.compiled),
            kept=None if self.keeper is None else self.keeper.kept(self.ranks),
            bundle=bundle,
            numbers=numbers,
            known=self.step_loss,
        )
        if numbers is not None:
            counts = [float(numbers.metrics[name].value) for name in _TO_PREDICT]
            self._check_loss_tokens(counts, numbers.denominators)
        if self.suspects is None or ran.finite:
            return ran
        if self.runner.on_nonfinite == "skip":
            return replace(ran, skipped=True)
        source = self.suspects.source(self.ranks, self.count)
        raise MicroBatchError(
            f"step {self.number} has a loss of {ran.loss:g} and a gradient of norm "
            f"{ran.grad_norm:g}; the first number that is not finite is in {source}. Inspect "
            f"these samples and the learning rate, or set on_nonfinite='skip'."
        )

    # Failures ------------------------------------------------------------------------------------

    def _check_loss_tokens(
        self, counts: list[float], over: Mapping[str, float] | None = None
    ) -> None:
        """Raise if `counts` of loss tokens and of tokens to predict say that there is no loss."""
        if self.step_loss.without_loss(counts[0], counts[1], over):
            why = result.ANY_CAUSE
            if self.example is not None:
                why = f"In one of its samples, {cause_of_no_loss(self.example)}"
            raise InputError(
                f"no token of step {self.number} counts in the loss, on any rank. {why}"
            )

    def _check_memory(self, failure: BaseException | None, ready: Prepared) -> None:
        """Raise if this micro-batch ran out of memory; with `split` on all ranks, if on any."""
        where = self._place(self.position, ready)
        if self.runner.on_memory != "split":
            raise MicroBatchError(
                f"{where} ran out of memory. Lower max_tokens below "
                f"{ready.batch.rows * ready.batch.width} slots, set limits.cost, or set "
                f"on_memory='split'."
            ) from failure
        state = checks.FITS
        if failure is not None:
            parts = 1 if ready.micro is None else _parts(ready.micro)
            whole = checks.SEGMENT if len(ready.segments.arrays.sample) < 2 else checks.GROUP
            state = checks.DIVISIBLE if parts > 1 else whole
        with self.communicate:
            slots = ready.batch.rows * ready.batch.width
            rank, worst, slots = checks.out_of_memory(self.ranks, self.count or 0, state, slots)
        if worst == checks.DIVISIBLE:
            raise TooLargeError(slots)
        if worst != checks.FITS:
            where = where if rank == self.ranks.rank else self._name(self.position, rank)
            raise MicroBatchError(f"{where} {checks.INDIVISIBLE[worst]}") from failure

    def _explain(self, error: Exception, ready: Prepared) -> InputError | None:
        """What to raise instead of an error, if token ids are its cause; adds where it happened."""
        token_ids = self.token_ids
        if token_ids is None:
            token_ids = checks.TokenIds(self.runner.model)
            token_ids.note(ready.batch)
        explained = token_ids.explain(error)
        with suppress(Exception):
            (explained or error).add_note(f"in {self._place(self.position, ready)}")
        return explained

    def _place(self, position: int, ready: Prepared | None = None) -> str:
        """The name of a micro-batch that runs or, without `ready`, is prepared; what it holds."""
        name, micro = self._name(position, self.ranks.rank), self.fed
        if ready is not None:
            return f"{name} ({_describe(ready.batch, ready.segments.arrays.sample)})"
        if isinstance(self.items, Step) and position < len(self.items):
            micro = self.items.micro_batches[position]
        return name if micro is None else f"{name} ({_describe(micro, micro.segments.sample)})"

    def _name(self, position: int, rank: int) -> str:
        of_all = "" if self.count is None else f" of {self.count}"
        return f"micro-batch {position}{of_all} of step {self.number} on rank {rank}"


def _parts(micro: MicroBatch) -> int:
    """The number of segments or groups that a micro-batch can be divided into."""
    return int(micro.parts.max(initial=0)) + 1


def _describe(shape: Batch | MicroBatch, sample_ids: IntArray) -> str:
    """1 x 8 slots, 3 segments of samples 4, 0, 7"""
    shown = ", ".join(map(str, sample_ids[:4])) + ("..." if len(sample_ids) > 4 else "")
    segments = f"{len(sample_ids)} segments of samples {shown}" if shown else "no segment"
    return f"{shape.rows} x {shape.width} slots, {segments}"
