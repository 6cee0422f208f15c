"""One try at a step: prepare, forward, loss, backward, finish."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evenstep.core.cost import Cost
from evenstep.core.plan import MicroBatch
from evenstep.core.ragged import IntArray, Segments
from evenstep.core.step import Step
from evenstep.data.feed import FedMicroBatch, Feed
from evenstep.data.source import cause_of_no_loss
from evenstep.errors import ConfigError, InputError, MicroBatchError
from evenstep.tensors.batch import IGNORE_INDEX, Batch, BatchShard
from evenstep.tensors.losses import Metric
from evenstep.train.checks import (
    TokenIds,
    check_constants,
    check_counts,
    check_groups_on_ranks,
    check_groups_planned,
    check_groups_whole,
    check_labels,
    check_none_skipped,
    check_shards,
    check_trainable,
    counts_groups,
    extremes,
    extremes_of,
    extremes_of_scale,
)
from evenstep.train.collectives import Bundle, Collective
from evenstep.train.framework import Framework, device_of, held_gradients, sum_gradients
from evenstep.train.gradients import SeparateGradients, Suspects, square_share
from evenstep.train.normalization import ByLoss, LossTerms
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
    Keeper,
    Places,
    StepResult,
    Timings,
)
from evenstep.train.step_loss import LossValues, Mode, StepLoss, power_of_two

if TYPE_CHECKING:
    from evenstep.train.runner import Runner


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """A collated micro-batch, with host-side copies of what results and errors report."""

    batch: Batch
    lengths: IntArray
    sample_ids: IntArray
    labels: int
    predicted: int
    """Tokens that are not the first of their sample."""
    born: tuple[float, ...] = ()
    moved: bool = True
    """Whether the batch is on the device. If there was no memory yet, it is moved when it runs."""
    places: Places | None = None
    """Where its segments lie, if values are kept by sample."""
    parts: int = 1
    """Number of segments, or of groups that stay together."""
    groups: frozenset[int] = frozenset()
    """Those that GroupMean counts in this batch, unless the plan keeps them in it."""


def empty_micro_batch() -> MicroBatch:
    """An empty micro-batch of one slot."""
    none = np.empty(0, np.int64)
    return MicroBatch(Segments(none, none, none), np.array([0, 0]), 1, none)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The micro-batches of one step and what is known about it."""

    items: Iterable[Batch | FedMicroBatch | tuple[MicroBatch, Mapping[int, Any] | Batch]]
    count: int | None  # None while a step is being fed
    number: int
    totals: Mapping[str, float]
    budget: int | None
    loss_tokens: Mapping[int, int] = field(default_factory=dict)
    """Loss tokens of each sample, if `totals` is computed from them."""
    groups: Mapping[int, int] = field(default_factory=dict)
    """The group of each sample in the plan, if it has groups."""
    empty: MicroBatch = field(default_factory=empty_micro_batch)
    """Empty micro-batch for ranks without work."""
    costs: tuple[float, ...] = ()
    """Planned cost of each micro-batch, if there is a plan."""
    lock_step: bool = False  # whether ranks agree before each micro-batch that is fed


def described(rows: int, width: int, sample_ids: IntArray) -> str:
    """1 x 8 slots, 3 segments of samples 4, 0, 7"""
    shown = ", ".join(map(str, sample_ids[:4])) + ("..." if len(sample_ids) > 4 else "")
    held = f"{len(sample_ids)} segments of samples {shown}" if shown else "no segment"
    return f"{rows} x {width} slots, {held}"


_DIVISIBLE, _SEGMENT, _GROUP = 1, 2, 3  # what ran out of memory; 0 if nothing did
_INDIVISIBLE = {
    _SEGMENT: "ran out of memory with a single segment, which cannot be divided. Lower max_tokens, "
    "set overflow='split', or use context parallelism.",
    _GROUP: "ran out of memory with a single group, which groups='micro_batch' keeps together. "
    "Lower max_tokens or the samples per group, or plan with groups='step'.",
}


class TooLargeError(Exception):
    """A micro-batch ran out of memory on some rank; raised on every rank."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class OutOfMemory(NamedTuple):
    """A rank that ran out of memory, and why its micro-batch cannot be divided, if so."""

    rank: int
    why: str | None


def out_of_memory(ranks: Collective, count: int, failed: Ready | None) -> OutOfMemory | None:
    """What all ranks know after one exchange; None if no rank ran out of memory.

    `failed` is the micro-batch that this rank could not run, and `count` the number of its
    micro-batches, which must be the same on all ranks.
    """
    flags = torch.zeros(2, ranks.size)
    if failed is not None:
        whole = _SEGMENT if len(failed.sample_ids) < 2 else _GROUP
        flags[0, ranks.rank] = _DIVISIBLE if failed.parts > 1 else whole
    flags[1, ranks.rank] = count
    states, counts = ranks.all_reduce_sum(flags).tolist()
    check_counts(counts)
    alone = [rank for rank, state in enumerate(states) if state > _DIVISIBLE]
    if alone:
        rank = ranks.rank if ranks.rank in alone else alone[0]
        return OutOfMemory(rank, _INDIVISIBLE[int(states[rank])])
    return OutOfMemory(states.index(_DIVISIBLE), None) if any(states) else None


class Measures:
    """Tokens, slots, labels and FLOPs of a rank's micro-batches."""

    def __init__(self, cost: Cost | None) -> None:
        self.tokens = self.slots = self.labels = self.predicted = 0
        self._cost, self._flops = cost, 0.0
        self._share = 1.0  # 1 / number of context-parallel ranks, which share a micro-batch

    def add(self, ready: Ready, sharers: int) -> None:
        """A micro-batch that ran, shared by `sharers` context-parallel ranks."""
        self._share = 1 / sharers
        self.tokens += int(ready.lengths.sum())
        self.slots += ready.batch.rows * ready.batch.width
        self.labels += ready.labels
        self.predicted += ready.predicted
        if self._cost is not None:
            self._flops += float(self._cost.of_lengths(ready.lengths).sum())

    def metrics(self, busy: float) -> dict[str, Metric]:
        """To be reduced over ranks with the losses; `busy` are this rank's busy seconds."""
        seconds = torch.tensor(busy, dtype=torch.float64)
        metrics = {
            BUSY: Metric.mean(seconds, 1),
            BUSY_MOST: Metric.max(seconds),
            TOKENS: Metric.sum(self._mine(self.tokens)),
            LABELS: Metric.sum(self._mine(self.labels)),
            PREDICTED: Metric.sum(self._mine(self.predicted)),
            SLOTS: Metric.sum(self._mine(self.slots)),
        }
        if self._cost is not None:
            # A mean over ranks: MFU compares with the peak of one rank.
            metrics[FLOPS] = Metric.mean(self._mine(self._flops), 1)
        return metrics

    def _mine(self, count: float) -> Tensor:
        return torch.tensor(count * self._share, dtype=torch.float64)


class Stopwatch:
    """Elapsed seconds inside `with` blocks, accumulated."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> Stopwatch:
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


class Busy:
    """Seconds that this rank was busy inside `with` blocks, without waiting for other ranks.

    On a CPU, the CPU time of this thread. On a GPU, the time between two events of the stream;
    only reading `seconds` synchronises with the device.
    """

    def __init__(self, device: torch.device | str | None) -> None:
        self._events: list[tuple[Any, Any]] = []
        self._each: list[float] = []
        self._began = 0.0
        self._cuda = device is not None and torch.device(device).type == "cuda"

    def __enter__(self) -> Busy:
        if self._cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._events.append((begin, end))
        else:
            self._began = time.thread_time()
        return self

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            self._events[-1][1].record()
        else:
            self._each.append(time.thread_time() - self._began)

    @property
    def each(self) -> tuple[float, ...]:
        """Busy seconds of each block."""
        if self._events:
            self._events[-1][1].synchronize()
            self._each += [begin.elapsed_time(end) / 1e3 for begin, end in self._events]
            self._events.clear()
        return tuple(self._each)

    @property
    def seconds(self) -> float:
        """Busy seconds so far."""
        return sum(self.each)


class Finished(NamedTuple):
    """The numbers of a step after its last backward."""

    bundle: Bundle
    """Of this rank."""
    numbers: LossValues | None
    """Of all ranks; None if they are exchanged later."""
    counts: Tensor
    """The sums of `counts` over ranks, maybe on a device that has not computed them yet."""


class Backward:
    """Runs the backwards of a step; `finish` exchanges, rescales and measures their gradients.

    `sums` if the runner, not the framework, sums gradients over ranks. `scaler` is a GradScaler.
    """

    def __init__(
        self,
        framework: Framework,
        parameters: list[Tensor],
        step_loss: StepLoss,
        ranks: Collective,
        sums: bool,
        scaler: Any = None,
    ) -> None:
        self.framework, self.parameters, self.ranks = framework, parameters, ranks
        self.step_loss, self.sums, self.scaler = step_loss, sums, scaler
        self.separate = SeparateGradients(parameters) if step_loss.separate else None
        self.scale: Tensor | None = None
        """Of the GradScaler in this step."""

    def exchanges(self, last: bool) -> bool:
        """Whether the framework exchanges gradients in a micro-batch, which is the last or not."""
        # Sharded accumulators of several denominators hold exchanged gradients only.
        return (last or self.separate is not None) and not self.sums

    def run(self, sums: Mapping[str, Tensor], scales: Mapping[str, float]) -> None:
        """The backward of a micro-batch."""
        if self.separate is None:
            objective = self.step_loss.objective(sums, scales)
            check_trainable(objective, self.parameters)
            self._scaled(objective).backward()
            return
        objectives = self.step_loss.objectives(sums, scales)
        for objective in objectives.values():
            check_trainable(objective, self.parameters)
        self.separate.backward({name: self._scaled(each) for name, each in objectives.items()})

    def gradients(self) -> list[Tensor]:
        """All gradients of the step so far, exchanged or not."""
        if self.separate is not None:
            return self.separate.tensors
        own = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return [*own, *held_gradients(self.framework)]

    def finish(
        self,
        measured: Sequence[Bundle],
        totals: Mapping[str, float],
        communicate: Stopwatch,
        later: bool,
        counts: Sequence[float] = (),
    ) -> Finished:
        """The gradients become those of the step; `counts` are small numbers to sum over ranks.

        `later` leaves the exchange of numbers to `StepResult.reduce`, if denominators were known
        before the step.
        """
        summed = torch.tensor(counts)
        if self.separate is None:
            summed = self._sum_gradients(communicate, counts)
            measured = [*measured, self._square()]
        bundle = Bundle.merge(measured)
        if later and self.step_loss.ahead and self.ranks.size > 1:
            return Finished(bundle, None, summed)
        with communicate:
            reduced = bundle.reduce(self.ranks)
        check_constants(reduced)
        numbers = self.step_loss.finish(self.separate or self.parameters, reduced, totals)
        if self.separate is not None:
            self._sum_gradients(communicate)
            with communicate:
                square = self._square().reduce(self.ranks).metrics
            numbers = replace(numbers, metrics={**numbers.metrics, **square})
        return Finished(bundle, numbers, summed)

    def _scaled(self, objective: Tensor) -> Tensor:
        if self.scaler is None:
            return objective
        self.scale = self.scaler.scale(objective.detach().new_ones(()))
        scaled: Tensor = self.scaler.scale(objective)
        return scaled

    def _sum_gradients(self, communicate: Stopwatch, counts: Sequence[float] = ()) -> Tensor:
        """Sum gradients, unless the framework has, and `counts` over ranks."""
        with communicate:
            if self.sums:
                return sum_gradients(self.parameters, self.ranks, counts)
            summed = torch.tensor(counts)
            return self.ranks.all_reduce_sum(summed) if counts else summed

    def _square(self) -> Bundle:
        """This rank's share of the squared norm of the gradient, without a scaler's scale."""
        share = square_share(self.parameters, self.ranks.size, self.framework.kind == "fsdp")
        if self.scale is not None:
            share = share / self.scale.double().square()
        return Bundle({}, {SQUARE: Metric.sum(share)})


class Attempt:
    """Runs a step once and returns its result."""

    def __init__(self, runner: Runner, work: Work) -> None:
        self.runner, self.work = runner, work
        self.framework = Framework.of(runner.model)
        self.losses = runner.losses
        self.device = runner.device if runner.device is not None else device_of(runner.model)
        self.compute, self.communicate, self.busy = Stopwatch(), Stopwatch(), Busy(self.device)
        self.position = 0
        self.measures = Measures(runner.cost)
        self.stream = _stream(self.device)
        self.ages: list[float] = []
        self.groups: set[int] = set()  # counted by GroupMean on this rank
        self.ran: set[int] = set()  # those of them that ran
        self.fed: MicroBatch | None = None  # being prepared
        self.token_ids = TokenIds(runner.model)

        self.example: Any = None  # one of this rank's samples, for errors
        self.bundles: list[Bundle] = []
        self.backward = self._make_backward()
        self.suspects = Suspects() if runner.on_nonfinite else None
        self.keeper = Keeper(runner.keep) if runner.keep else None
        if self.step_loss.mode in ("per_micro_batch", "counted") and work.count is None:
            raise ConfigError(
                f"mode={self.step_loss.mode!r} needs all micro-batches, which are unknown while a "
                f"step is being fed. Use mode='deferred'."
            )

    def _make_backward(self) -> Backward:
        runner, budget, mode = self.runner, self.work.budget, self.runner.mode or self._mode()
        losses = {name: (loss.normalization, loss.weight) for name, loss in self.losses.items()}
        separate = mode == "deferred" and len({n.name for n, _ in losses.values()}) > 1
        kind, ranks = self.framework.kind, runner.collective
        sums = kind == "plain" or runner.on_memory == "split" or (kind == "ddp" and separate)
        step_loss = StepLoss(
            losses=losses,
            mode=mode,
            averaged_over=1 if sums else self.framework.averaged_over(ranks),
            constant=power_of_two(budget) if budget else 1.0,
            separate=separate,
        )
        if sums:
            check_shards(runner.model.named_parameters(), ranks)
        parameters = list(runner.model.parameters())
        return Backward(self.framework, parameters, step_loss, ranks, sums, runner.scaler)

    @property
    def step_loss(self) -> StepLoss:
        """The losses of the step and their denominators."""
        return self.backward.step_loss

    def _mode(self) -> Mode:
        """'known' if the totals, which are equal on all ranks, give every denominator."""
        norms = {loss.normalization.name: loss.normalization for loss in self.losses.values()}
        if all(each.known(self.work.totals) is not None for each in norms.values()):
            return "known"
        counts = len(norms) > 1 and self.work.count is not None
        counts = counts and not any(isinstance(each, ByLoss) for each in norms.values())
        return "counted" if counts else "deferred"

    def result(self) -> StepResult:
        """Run all micro-batches and finish the gradients."""
        runner, began = self.runner, time.perf_counter()
        self._check_totals()
        if self.step_loss.mode == "counted":
            self._count()
        counted, work = time.perf_counter() - began, self.work
        abandon = work.items.abandon if isinstance(work.items, Feed) else lambda: None
        prefetch = Prefetch(self._prepared(), runner.prefetch, abandon, self._in_preparation)
        first = self._run(prefetch, began)
        groups = counts_groups(self.step_loss)
        later = self.suspects is None and not groups
        present = (float(self.measures.labels > 0), float(self.measures.predicted > 0))
        bundle, numbers, counts = self.backward.finish(
            [*self.bundles, self._measures()],
            work.totals,
            self.communicate,
            later=later,
            counts=present if later and self._labels_unknown() else (),
        )
        # A rank with a loss token knows that the step has one, and does not wait for the others.
        if len(counts) and not self.measures.labels:
            labels, predicted = counts.tolist()
            if predicted and not labels:
                raise self._without_loss()
        if numbers is not None and groups:
            most = int(numbers.metrics[GROUPS_MOST].value)
            with self.communicate:
                check_groups_on_ranks(self.ran, most, runner.collective)
        often = "micro_batch" if self.framework.kind == "fsdp" else "step"
        result = StepResult(
            timings=Timings(
                wait=counted + prefetch.waited,
                prepare=counted + prefetch.preparing,
                compute=self.compute.seconds if self.stream is None else self.busy.seconds,
                communicate=self.communicate.seconds,
                total=time.perf_counter() - began,
                first=first,
            ),
            tokens=self.measures.tokens,
            slots=self.measures.slots,
            num_micro_batches=self.position,
            planned_imbalance=work.totals.get(f"imbalance_{often}"),
            busy=self.busy.each,
            costs=work.costs if len(work.costs) == self.position else (),
            ages=tuple(self.ages),
            peak_flops=runner.peak_flops,
            kept=None if self.keeper is None else self.keeper.kept(),
            bundle=bundle,
            numbers=numbers,
            known=(self.step_loss, work.totals),
        )
        if result.reduced and result.without_loss:
            raise self._without_loss()
        return result if self.suspects is None else self._judged(result, self.suspects)

    def _check_totals(self) -> None:
        """Raise if the totals of a plan say that no token of the step counts in the loss."""
        totals, step_loss = self.work.totals, self.step_loss
        predicted = totals.get("tokens", 0) - totals.get("samples", 0)
        none = step_loss.mode == "known" and totals.get("loss_tokens") == 0 and predicted > 0
        if none and step_loss.needs_labels(step_loss.known(totals)):
            raise self._without_loss()

    def _labels_unknown(self) -> bool:
        """Whether ranks exchange no numbers that tell if the step has a loss token, and need one:
        denominators are constants, or known without the loss tokens of the plan."""
        totals, step_loss = self.work.totals, self.step_loss
        if step_loss.mode != "known" or "loss_tokens" in totals or self.runner.collective.size == 1:
            return False
        return step_loss.needs_labels(step_loss.known(totals))

    def _without_loss(self) -> InputError:
        why = ANY_CAUSE
        if self.example is not None:
            why = f"In one of its samples, {cause_of_no_loss(self.example)}"
        return InputError(
            f"no token of step {self.work.number} counts in the loss, on any rank. {why}"
        )

    # Preparing, in the prefetching thread --------------------------------------------------------

    def _prepared(self) -> Iterator[Ready]:
        for item in self.work.items:
            if isinstance(item, FedMicroBatch):
                self.fed, born = item.micro, tuple(item.born.values())
                self._note(item.samples)
                yield self._ready(self._collated(item.micro, item.samples), born)
                self.fed = None
            elif isinstance(item, Batch):
                yield self._ready(item)
            elif isinstance(item[1], Batch):  # collated when it was counted
                yield self._ready(item[1], micro=item[0])
            else:
                check_none_skipped(item[1], self.step_loss)
                self._note(item[1])
                yield self._ready(self._collated(item[0], item[1]), micro=item[0])

    def _note(self, samples: Mapping[int, Any]) -> None:
        self.example = next(iter(samples.values()), self.example)

    def _in_preparation(self, position: int) -> str:
        items, micro = self.work.items, self.fed
        if isinstance(items, Step) and position < len(items):
            micro = items.micro_batches[position]
        held = "" if micro is None else described(micro.rows, micro.width, micro.segments.sample)
        return self._place(position) + (held and f" ({held})")

    def _ready(
        self, batch: Batch, born: tuple[float, ...] = (), micro: MicroBatch | None = None
    ) -> Ready:
        whole = micro is not None and micro.groups is not None
        split = self.runner.on_memory == "split" and not whole
        groups = check_groups_whole(batch, self.step_loss, self.groups, split)
        planned = self.work.groups
        if micro is not None and micro.groups is not None:
            planned = dict(zip(micro.segments.sample.tolist(), micro.groups.tolist(), strict=True))
        if groups and planned:
            check_groups_planned(batch, planned)
        if self.step_loss.mode == "known":
            check_labels(batch, self.work.loss_tokens)
        self.token_ids.note(batch)
        real = batch.sample_ids >= 0
        ids = batch.sample_ids[real].cpu().numpy()
        ready = Ready(
            batch,
            batch.seqlens[real].cpu().numpy(),
            ids,
            *_counts(batch),
            born,
            moved=False,
            places=None if self.keeper is None else Places.of(batch),
            parts=len(ids) if micro is None else int(micro.parts.max(initial=0)) + 1,
            groups=frozenset(groups),
        )
        # If the micro-batch that runs now holds the memory, this one is moved when it is its turn.
        with suppress(torch.OutOfMemoryError):
            return replace(ready, batch=self._moved(batch), moved=True)
        return ready

    def _moved(self, batch: Batch) -> Batch:
        if self.stream is not None:
            # Use the model's stream; this thread has another current stream.
            with torch.cuda.stream(self.stream):
                batch = batch.pin_memory() if batch.device.type == "cpu" else batch
                return batch.to(self.device, non_blocking=True)
        return batch if self.device is None else batch.to(self.device)

    def _collated(self, micro: MicroBatch, samples: Mapping[int, Any]) -> Batch:
        try:
            return self.runner.collate(micro, samples)
        except torch.OutOfMemoryError as error:
            held = described(micro.rows, micro.width, micro.segments.sample)
            raise MicroBatchError(
                f"a micro-batch of step {self.work.number} on rank {self.runner.collective.rank} "
                f"({held}) ran out of memory while it was collated. Collate on the CPU and pass "
                f"Runner(device=...), lower prefetch, or lower max_tokens."
            ) from error

    def _count(self) -> None:
        """Collate all micro-batches, and sum what they add to each denominator over ranks."""
        items: list[Batch | tuple[MicroBatch, Batch]] = []
        for position, item in enumerate(self.work.items):
            assert not isinstance(item, FedMicroBatch)
            if isinstance(item, Batch):
                items.append(item)
                continue
            assert not isinstance(item[1], Batch)
            self._note(item[1])
            try:
                items.append((item[0], self._collated(item[0], item[1])))
            except Exception as error:
                with suppress(Exception):
                    error.add_note(f"while preparing {self._in_preparation(position)}")
                raise
        batches = [item[1] if isinstance(item, tuple) else item for item in items]
        # A rank without micro-batches runs an empty one.
        counted = batches or [self.runner.collate(self.work.empty, {})]
        first = getattr((self.runner.shard or _whole)(counted[0]), "rank", 0) == 0
        found = [self.step_loss.amounts(batch, first) for batch in counted]
        named = [{f"amount/{name}": value for name, value in each.items()} for each in found]
        for sums, batch in zip(named, counted, strict=True):
            labels, predicted = _counts(batch)
            sums |= {LABELS: torch.tensor(labels), PREDICTED: torch.tensor(predicted)}
        with self.communicate:
            reduced = Bundle.merge(map(Bundle, named)).reduce(self.runner.collective)
        self.backward.step_loss = self.step_loss.counted(reduced)
        none = float(reduced.sums[LABELS]) == 0 and float(reduced.sums[PREDICTED]) > 0
        if none and self.step_loss.needs_labels(self.step_loss.known({})):
            raise self._without_loss()
        self.work = replace(self.work, items=items)

    def _empty(self) -> Ready:
        return self._ready(self.runner.collate(self.work.empty, {}))

    def _in_lock_step(self, items: Iterator[Ready]) -> Iterator[Ready]:
        """Yield micro-batches until all ranks are done; ranks without one get empty ones."""
        while True:
            item = next(items, None)
            with self.communicate:
                have = torch.tensor([float(item is not None)])
                anyone = bool(self.runner.collective.all_reduce_sum(have).item())
            if not anyone:
                return
            yield self._empty() if item is None else item
            del item

    # Running --------------------------------------------------------------------------------------

    def _run(self, prefetch: Prefetch[Ready], began: float) -> float:
        """Run all micro-batches; returns the seconds from `began` to the first forward."""
        work, first = self.work, 0.0
        with closing(iter(prefetch)) as items:
            for ready in self._in_lock_step(items) if work.lock_step else items:
                first = first or time.perf_counter() - began
                self._micro_batch(ready, exchange=self.position + 1 == work.count)
                del ready  # before requesting the next one: prefetch + 1 are alive
        exchanged = self.backward.sums or self.backward.separate is not None
        if self.position == 0 or (work.count is None and not exchanged):
            # The last micro-batch was not known in advance: an empty one exchanges gradients.
            self._micro_batch(self._empty(), exchange=True)
        return first

    def _micro_batch(self, ready: Ready, exchange: bool) -> None:
        failure: BaseException | None = None
        now = time.time()
        self.ages += [now - born for born in ready.born]
        exchange = self.backward.exchanges(last=exchange)
        try:
            batch = ready.batch if ready.moved else self._moved(ready.batch)
            batch = self._preprocessed(batch)
            shard = (self.runner.shard or _whole)(batch)
            first = getattr(shard, "rank", 0) == 0  # of the ranks that share the batch
            amounts = self.step_loss.amounts(batch, first)
            self.ran |= ready.groups if first else frozenset()
            if self.suspects is not None:
                self.suspects.begin(ready.sample_ids, exchange)
            with self.compute, self.busy, self.framework.exchange(exchange):
                self._forward_backward(ready, batch, shard, amounts)
            if self.suspects is not None:
                self.suspects.gradients(self.backward.gradients())
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)  # its frames keep the memory alive
        except Exception as error:
            explained = self.token_ids.explain(error)
            with suppress(Exception):
                (explained or error).add_note(f"in {self._where(ready)}")
            if explained is not None:
                raise explained from error
            raise
        if self.runner.on_memory == "split":
            self._agree(failure, ready)
        elif failure is not None:
            raise MicroBatchError(
                f"{self._where(ready)} ran out of memory. Lower max_tokens below "
                f"{ready.batch.rows * ready.batch.width} slots, set limits.cost, or set "
                f"on_memory='split'."
            ) from failure
        self.measures.add(ready, getattr(shard, "size", 1))
        self.position += 1

    def _preprocessed(self, batch: Batch) -> Batch:
        if self.runner.preprocess is None:
            return batch
        torch.clear_autocast_cache()  # casts of weights before the last update
        with self.compute, torch.no_grad():
            return self.runner.preprocess(batch)

    def _scales(self, amounts: Mapping[str, Tensor]) -> dict[str, float]:
        """Factors of this micro-batch's loss sums before backward."""
        reduced: Mapping[str, Tensor] | None = None
        if self.step_loss.mode == "per_micro_batch":
            with self.communicate:
                bundle = Bundle(amounts, extremes(self.work.count or 0)).reduce(
                    self.runner.collective
                )
            check_counts(extremes_of(bundle))
            reduced = bundle.sums
        micro_batches = max(self.work.count or 0, 1)
        return self.step_loss.scales(self.work.totals, reduced=reduced, micro_batches=micro_batches)

    def _forward_backward(
        self,
        ready: Ready,
        batch: Batch,
        shard: Batch | BatchShard,
        amounts: Mapping[str, Tensor],
    ) -> None:
        assert self.runner.forward is not None
        # An autocast around the step keeps the casts of weights. Their part of the graph would be
        # older than this micro-batch, so that fully_shard reduces gradients before they have
        # arrived, and their values those of before the last update.
        torch.clear_autocast_cache()
        outputs = self.runner.forward(self.runner.model, shard)
        terms = LossTerms.of(self.losses, outputs, batch, self.runner.shard or _whole)
        amounts = {**amounts, **terms.divisors}
        if self.suspects is not None:
            self.suspects.watch(outputs, shard)
            self.suspects.losses(terms.found.values())
        if self.keeper is not None and ready.places is not None:
            self.keeper.add(ready.places, terms.found)
        scales = self._scales(amounts)
        self.backward.run(terms.sums, scales)
        self.bundles.append(self.step_loss.bundle(terms.sums, amounts, scales, terms.metrics))

    def _agree(self, failure: BaseException | None, ready: Ready) -> None:
        """Raise on all ranks if this micro-batch ran out of memory on any of them."""
        with self.communicate:
            found = out_of_memory(
                self.runner.collective, self.work.count or 0, None if failure is None else ready
            )
        if found is None:
            return
        if found.why is None:
            raise TooLargeError(self.position)
        mine = found.rank == self.runner.collective.rank
        where = self._where(ready) if mine else self._place(self.position, found.rank)
        raise MicroBatchError(f"{where} {found.why}") from failure

    def _place(self, position: int, rank: int | None = None) -> str:
        total = "" if self.work.count is None else f" of {self.work.count}"
        rank = self.runner.collective.rank if rank is None else rank
        return f"micro-batch {position}{total} of step {self.work.number} on rank {rank}"

    def _where(self, ready: Ready) -> str:
        held = described(ready.batch.rows, ready.batch.width, ready.sample_ids)
        return f"{self._place(self.position)} ({held})"

    # The end of the step --------------------------------------------------------------------------

    def _measures(self) -> Bundle:
        """Busy time and counts of this rank, reduced with the bundle."""
        metrics = self.measures.metrics(self.busy.seconds)
        if counts_groups(self.step_loss):
            metrics[GROUPS_MOST] = Metric.max(torch.tensor(float(len(self.ran))))
        if self.step_loss.mode == "deferred":
            metrics |= extremes(self.step_loss.constant)
        if self.backward.scale is not None:
            metrics |= extremes_of_scale(self.backward.scale)
        return Bundle({}, metrics)

    def _judged(self, result: StepResult, suspects: Suspects) -> StepResult:
        """The result, marked as skipped, or an error, if it is not finite; alike on all ranks."""
        if result.finite:
            return result
        if self.runner.on_nonfinite == "skip":
            return replace(result, skipped=True)
        source = suspects.source(self.runner.collective, self.work.count)
        raise MicroBatchError(
            f"step {self.work.number} has a loss of {result.loss:g} and a gradient of norm "
            f"{result.grad_norm:g}; the first number that is not finite is in {source}. Inspect "
            f"these samples and the learning rate, or set on_nonfinite='skip'."
        )


def _whole(batch: Batch) -> Batch:
    return batch


def _counts(batch: Batch) -> tuple[int, int]:
    """(labels, tokens that are not the first of their sample)."""
    real = batch.sample_ids >= 0
    predicted = batch.seqlens[real].sum() - (batch.starts[real] == 0).sum()
    return int((batch.labels != IGNORE_INDEX).sum()), int(predicted)


def _stream(device: torch.device | str | None) -> Any:
    """The current CUDA stream of the device; None on other devices."""
    if device is None or torch.device(device).type != "cuda":
        return None
    return torch.cuda.current_stream(device)
