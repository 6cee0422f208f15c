"""Attempt: one execution of a step, one micro-batch at a time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from evenstep.core.micro_batch import MicroBatch
from evenstep.core.ragged import IntArray
from evenstep.core.segments import Segments
from evenstep.data.streams.feed import FedMicroBatch, Feed
from evenstep.errors import ConfigError, MicroBatchError
from evenstep.tensors.batch import IGNORE_INDEX, Batch
from evenstep.tensors.batch_shard import BatchShard
from evenstep.tensors.metrics import Metric
from evenstep.tensors.per_sequence import Sums
from evenstep.train.bundle import Bundle
from evenstep.train.forwards import logits_of
from evenstep.train.framework import Framework, sum_gradients
from evenstep.train.normalization import weighted
from evenstep.train.prefetch import Prefetch
from evenstep.train.result import BUSY, BUSY_MOST, FLOPS, LABELS, SLOTS, TOKENS, StepResult, Timings
from evenstep.train.step_checks import (
    check_constants,
    check_counts,
    check_groups_whole,
    check_labels,
    check_none_skipped,
    extremes,
    extremes_of,
)
from evenstep.train.step_loss import Mode, StepLoss, power_of_two
from evenstep.train.stopwatch import Busy, Stopwatch

if TYPE_CHECKING:
    from evenstep.train.runner import Runner


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """A collated micro-batch, with host-side copies of what results and errors report."""

    batch: Batch
    lengths: IntArray
    sample_ids: IntArray
    labels: int
    born: tuple[float, ...] = ()
    moved: bool = True
    """Whether the batch is on the device. If there was no memory yet, it is moved when it runs."""


def empty_micro_batch() -> MicroBatch:
    """An empty micro-batch of one slot."""
    none = np.empty(0, np.int64)
    return MicroBatch(Segments(none, none, none), np.array([0, 0]), 1, none)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The micro-batches of one step and what is known about it."""

    items: Iterable[Batch | FedMicroBatch | tuple[MicroBatch, Mapping[int, Any]]]
    count: int | None  # None while a step is being fed
    number: int
    totals: Mapping[str, float]
    budget: int | None
    loss_tokens: Mapping[int, int] = field(default_factory=dict)
    """Loss tokens of each sample, if `totals` is computed from them."""
    empty: MicroBatch = field(default_factory=empty_micro_batch)
    """Empty micro-batch for ranks without work."""


_SINGLE_SEGMENT = (
    "ran out of memory with a single segment, which cannot be divided. Lower max_tokens, set "
    "overflow='split', or use context parallelism."
)


class TooLargeError(Exception):
    """A micro-batch ran out of memory on some rank; raised on every rank."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class Attempt:
    """Runs a step once and returns its result."""

    def __init__(self, runner: Runner, work: Work) -> None:
        self.runner, self.work = runner, work
        self.framework = Framework.of(runner.model)
        self.losses = runner.losses
        self.compute, self.communicate, self.busy = Stopwatch(), Stopwatch(), Busy(runner.device)
        self.tokens = self.slots = self.labels = self.position = 0
        self.flops = 0.0
        self.share = 1.0  # 1 / number of context-parallel ranks
        self.stream = _stream(runner.device)
        self.ages: list[float] = []
        self.groups: set[int] = set()  # counted by GroupMean on this rank
        self.bundles: list[Bundle] = []
        self.step_loss = StepLoss(
            losses={name: (loss.normalization, loss.weight) for name, loss in self.losses.items()},
            mode=runner.mode or self._mode(),
            averaged_over=1
            if self._sums_gradients
            else self.framework.averaged_over(runner.collective),
            constant=power_of_two(work.budget) if work.budget else 1.0,
        )
        if self.step_loss.mode == "per_micro_batch" and work.count is None:
            raise ConfigError(
                "mode='per_micro_batch' needs the number of micro-batches, which is unknown while "
                "a step is being fed. Use mode='deferred'."
            )

    def _mode(self) -> Mode:
        """'known' if the totals, which are equal on all ranks, give every denominator."""
        known = (loss.normalization.known(self.work.totals) for loss in self.losses.values())
        return "known" if all(value is not None for value in known) else "deferred"

    @property
    def _sums_gradients(self) -> bool:
        """Whether the runner, not the framework, sums gradients over ranks."""
        return self.framework.kind == "plain" or self.runner.on_memory == "split"

    def result(self) -> StepResult:
        """Run all micro-batches and finish the gradients."""
        runner, work, began = self.runner, self.work, time.perf_counter()
        prefetch = Prefetch(self._prepared(), runner.prefetch)
        if isinstance(work.items, Feed):
            prefetch = Prefetch(self._prepared(), runner.prefetch, work.items.abandon)
        first = self._run(prefetch, began)
        parameters = list(runner.model.parameters())
        if self._sums_gradients:
            with self.communicate:
                sum_gradients(parameters, runner.collective)
        bundle = Bundle.merge([*self.bundles, self._measures()])
        numbers = None
        if self.step_loss.mode != "known" or runner.collective.size == 1:
            with self.communicate:
                reduced = bundle.reduce(runner.collective)
            check_constants(reduced)
            numbers = self.step_loss.finish(parameters, reduced, work.totals)
        often = "micro_batch" if self.framework.kind == "fsdp" else "step"
        return StepResult(
            timings=Timings(
                wait=prefetch.waited,
                prepare=prefetch.preparing,
                compute=self.compute.seconds if self.stream is None else self.busy.seconds,
                communicate=self.communicate.seconds,
                total=time.perf_counter() - began,
                first=first,
            ),
            tokens=self.tokens,
            slots=self.slots,
            num_micro_batches=self.position,
            planned_imbalance=work.totals.get(f"imbalance_{often}"),
            ages=tuple(self.ages),
            peak_flops=runner.peak_flops,
            bundle=bundle,
            numbers=numbers,
            known=(self.step_loss, work.totals),
        )

    # Preparing, in the prefetching thread --------------------------------------------------------

    def _prepared(self) -> Iterator[Ready]:
        for item in self.work.items:
            if isinstance(item, FedMicroBatch):
                yield self._ready(
                    self._collated(item.micro, item.samples), tuple(item.born.values())
                )
            elif isinstance(item, tuple):
                check_none_skipped(item[1], self.step_loss)
                yield self._ready(self._collated(*item))
            else:
                yield self._ready(item)

    def _ready(self, batch: Batch, born: tuple[float, ...] = ()) -> Ready:
        check_groups_whole(batch, self.step_loss, self.groups, self.runner.on_memory == "split")
        if self.step_loss.mode == "known":
            check_labels(batch, self.work.loss_tokens)
        real = batch.sample_ids >= 0
        lengths, ids = batch.seqlens[real].cpu().numpy(), batch.sample_ids[real].cpu().numpy()
        labels = int((batch.labels != IGNORE_INDEX).sum())
        try:
            return Ready(self._moved(batch), lengths, ids, labels, born)
        except torch.OutOfMemoryError:
            # The micro-batch that runs now holds the memory; move this one when it is its turn.
            return Ready(batch, lengths, ids, labels, born, moved=False)

    def _moved(self, batch: Batch) -> Batch:
        if self.stream is not None:
            # Use the model's stream; this thread has another current stream.
            with torch.cuda.stream(self.stream):
                batch = batch.pin_memory() if batch.device.type == "cpu" else batch
                return batch.to(self.runner.device, non_blocking=True)
        return batch if self.runner.device is None else batch.to(self.runner.device)

    def _collated(self, micro: MicroBatch, samples: Mapping[int, Any]) -> Batch:
        try:
            return self.runner.collate(micro, samples)
        except torch.OutOfMemoryError as error:
            held = _described(micro.rows, micro.width, micro.segments.sample)
            raise MicroBatchError(
                f"a micro-batch of step {self.work.number} on rank {self.runner.collective.rank} "
                f"({held}) ran out of memory while it was collated. Collate on the CPU and pass "
                f"Runner(device=...), lower prefetch, or lower max_tokens."
            ) from error

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
            for ready in items if work.count is not None else self._in_lock_step(items):
                first = first or time.perf_counter() - began
                self._micro_batch(ready, exchange=self.position + 1 == work.count)
                del ready  # before requesting the next one: prefetch + 1 are alive
        if self.position == 0 or (work.count is None and not self._sums_gradients):
            # The last micro-batch was not known in advance: an empty one exchanges gradients.
            self._micro_batch(self._empty(), exchange=True)
        return first

    def _micro_batch(self, ready: Ready, exchange: bool) -> None:
        failure: BaseException | None = None
        now = time.time()
        self.ages += [now - born for born in ready.born]
        try:
            batch = ready.batch if ready.moved else self._moved(ready.batch)
            shard = (self.runner.shard or _whole)(batch)
            amounts = self.step_loss.amounts(batch, getattr(shard, "rank", 0) == 0)
            scales = self._scales(amounts)
            with (
                self.compute,
                self.busy,
                self.framework.exchange(exchange and not self._sums_gradients),
            ):
                self._forward_backward(batch, shard, amounts, scales)
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)  # its frames keep the memory alive
        except Exception as error:
            with suppress(Exception):
                error.add_note(f"in {self._where(ready)}")
            raise
        if self.runner.on_memory == "split":
            self._agree(failure, ready)
        elif failure is not None:
            raise MicroBatchError(
                f"{self._where(ready)} ran out of memory. Lower max_tokens below "
                f"{ready.batch.rows * ready.batch.width} slots, set limits.cost, or set "
                f"on_memory='split'."
            ) from failure
        self.share = 1 / getattr(shard, "size", 1)
        self.tokens += int(ready.lengths.sum())
        self.slots += ready.batch.rows * ready.batch.width
        self.labels += ready.labels
        if self.runner.cost is not None:
            self.flops += float(self.runner.cost.of_lengths(ready.lengths).sum())
        self.position += 1

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
        batch: Batch,
        shard: Batch | BatchShard,
        amounts: Mapping[str, Tensor],
        scales: Mapping[str, float],
    ) -> None:
        assert self.runner.forward is not None
        outputs = logits_of(self.runner.forward(self.runner.model, shard))
        sums: dict[str, Tensor] = {}
        metrics: dict[str, Metric] = {}
        for name, loss in self.losses.items():
            take = self.runner.shard or _whole
            found = loss.function(outputs, take(weighted(batch, loss.normalization)))
            sums[name] = found.loss if isinstance(found, Sums) else found
            if isinstance(found, Sums):
                prefix = f"{name}/" if len(self.losses) > 1 else ""
                metrics |= {prefix + key: metric for key, metric in found.metrics.items()}
        self.step_loss.objective(sums, scales).backward()
        self.bundles.append(self.step_loss.bundle(sums, amounts, scales, metrics))

    def _agree(self, failure: BaseException | None, ready: Ready) -> None:
        """Raise on all ranks if this micro-batch ran out of memory on any of them."""
        ranks = self.runner.collective
        # Per rank: 0 ran, 1 out of memory, 2 out of memory with one segment; and its count.
        flags = torch.zeros(2, ranks.size)
        if failure is not None:
            flags[0, ranks.rank] = 1 if len(ready.sample_ids) > 1 else 2
        flags[1, ranks.rank] = self.work.count or 0
        with self.communicate:
            found, counts = ranks.all_reduce_sum(flags).tolist()
        check_counts(counts)
        if 2 in found and failure is not None:
            raise MicroBatchError(f"{self._where(ready)} {_SINGLE_SEGMENT}") from failure
        if 2 in found:
            where = f"micro-batch {self.position} of step {self.work.number}"
            raise MicroBatchError(f"{where} on rank {found.index(2)} {_SINGLE_SEGMENT}")
        if any(found):
            raise TooLargeError(self.position)

    def _where(self, ready: Ready) -> str:
        total = "" if self.work.count is None else f" of {self.work.count}"
        return (
            f"micro-batch {self.position}{total} of step {self.work.number} on rank "
            f"{self.runner.collective.rank} "
            f"({_described(ready.batch.rows, ready.batch.width, ready.sample_ids)})"
        )

    def _measures(self) -> Bundle:
        """Busy time and counts of this rank, reduced with the bundle."""
        busy = torch.tensor(self.busy.seconds, dtype=torch.float64)
        metrics = {
            BUSY: Metric.mean(busy, 1),
            BUSY_MOST: Metric.max(busy),
            TOKENS: Metric.sum(torch.tensor(self.tokens * self.share, dtype=torch.float64)),
            LABELS: Metric.sum(torch.tensor(self.labels * self.share, dtype=torch.float64)),
            SLOTS: Metric.sum(torch.tensor(self.slots * self.share, dtype=torch.float64)),
        }
        if self.step_loss.mode == "deferred":
            metrics |= extremes(self.step_loss.constant)
        if self.runner.cost is not None:
            # A mean over ranks: MFU compares with the peak of one rank.
            mine = torch.tensor(self.flops * self.share, dtype=torch.float64)
            metrics[FLOPS] = Metric.mean(mine, 1)
        return Bundle({}, metrics)


def _whole(batch: Batch) -> Batch:
    return batch


def _described(rows: int, width: int, sample_ids: IntArray) -> str:
    """1 x 8 slots, 3 segments of samples 4, 0, 7"""
    shown = ", ".join(map(str, sample_ids[:4])) + ("..." if len(sample_ids) > 4 else "")
    held = f"{len(sample_ids)} segments of samples {shown}" if shown else "no segment"
    return f"{rows} x {width} slots, {held}"


def _stream(device: torch.device | str | None) -> Any:
    """The current CUDA stream of the device; None on other devices."""
    if device is None or torch.device(device).type != "cuda":
        return None
    return torch.cuda.current_stream(device)
