"""Attempt: one try at one step, micro-batch by micro-batch."""

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
from evenstep.train.framework import Framework, sum_gradients
from evenstep.train.step_loss import Mode, StepLoss, power_of_two
from evenstep.train.normalization import weighted
from evenstep.train.prefetch import Prefetch
from evenstep.train.step_checks import (
    check_constants,
    check_counts,
    check_labels,
    extremes,
    extremes_of,
    check_groups_whole,
    check_none_skipped,
)
from evenstep.train.result import BUSY, BUSY_MOST, FLOPS, LABELS, SLOTS, TOKENS, StepResult, Timings
from evenstep.train.stopwatch import Busy, Stopwatch

if TYPE_CHECKING:
    from evenstep.train.runner import Runner


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """A micro-batch that is ready to run, with what is to be said of it without asking a GPU."""

    batch: Batch
    lengths: IntArray
    samples: IntArray
    labels: int
    born: tuple[float, ...] = ()
    moved: bool = True
    """Whether it is on its device. Where that had no room yet, it is moved in its turn."""


def nothing() -> MicroBatch:
    """A micro-batch of one slot with nothing in it."""
    none = np.empty(0, np.int64)
    return MicroBatch(Segments(none, none, none), np.array([0, 0]), 1, none)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a step is, to an attempt at it. `count` is None where nobody knows it yet."""

    items: Iterable[Batch | FedMicroBatch | tuple[MicroBatch, Mapping[int, Any]]]
    count: int | None
    number: int
    totals: Mapping[str, float]
    budget: int | None
    loss_tokens: Mapping[int, int] = field(default_factory=dict)
    """The labels that each sample trains, where `totals` counts on it."""
    dummy: MicroBatch = field(default_factory=nothing)
    """What a rank runs that has nothing to run."""


_HOPELESS = (
    "ran out of memory with a single segment, which cannot be split. Lower max_tokens, split "
    "over-long samples, or use context parallelism."
)


class TooLargeError(Exception):
    """A micro-batch ran out of memory on some rank, and every rank knows."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class Attempt:
    """Runs a step once."""

    def __init__(self, runner: Runner, work: Work) -> None:
        self.runner, self.work = runner, work
        self.framework = Framework.of(runner.model)
        self.losses = runner.losses
        self.compute, self.communicate, self.busy = Stopwatch(), Stopwatch(), Busy(runner.device)
        self.tokens = self.slots = self.labels = self.position = 0
        self.flops = 0.0
        self.share = 1.0  # of each micro-batch, where context-parallel ranks share it
        self.stream = _stream(runner.device)
        self.ages: list[float] = []
        self.groups: set[int] = set()  # that GroupMean counted on this rank
        self.bundles: list[Bundle] = []
        self.step_loss = StepLoss(
            losses={name: (loss.normalization, loss.weight) for name, loss in self.losses.items()},
            mode=runner.mode or self._mode(),
            averaged_over=1 if self._by_hand else self.framework.averaged_over(runner.collective),
            constant=power_of_two(work.budget) if work.budget else 1.0,
        )
        if self.step_loss.mode == "per_micro_batch" and work.count is None:
            raise ConfigError(
                "mode='per_micro_batch' divides by the number of micro-batches, which is unknown "
                "while a step is being fed. Use mode='deferred'."
            )

    def _mode(self) -> Mode:
        """Known if the plan says enough, by what every rank knows alike."""
        known = (loss.normalization.known(self.work.totals) for loss in self.losses.values())
        return "known" if all(value is not None for value in known) else "deferred"

    @property
    def _by_hand(self) -> bool:
        """Whether we sum gradients over ranks ourselves."""
        return self.framework.kind == "plain" or self.runner.on_memory == "split"

    def result(self) -> StepResult:
        """Run all micro-batches and conclude."""
        runner, work, began = self.runner, self.work, time.perf_counter()
        first = 0.0
        prefetch = Prefetch(self._prepared(), runner.prefetch)
        if isinstance(work.items, Feed):
            prefetch = Prefetch(self._prepared(), runner.prefetch, work.items.abandon)
        with closing(iter(prefetch)) as items:
            for ready in items if work.count is not None else self._in_lock_step(items):
                first = first or time.perf_counter() - began
                self._micro_batch(ready, exchange=self.position + 1 == work.count)
                del ready  # before the next is asked for: prefetch + 1 are alive, not one more
        if self.position == 0 or (work.count is None and not self._by_hand):
            # Nobody knew which was the last, so one more, with nothing in it, exchanges gradients.
            self._micro_batch(self._empty(), exchange=True)
        parameters = list(runner.model.parameters())
        if self._by_hand:
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
        check_groups_whole(
            batch, self.step_loss, self.groups, self.runner.on_memory == "split"
        )
        if self.step_loss.mode == "known":
            check_labels(batch, self.work.loss_tokens)
        real = batch.sample_ids >= 0
        lengths, samples = batch.seqlens[real].cpu().numpy(), batch.sample_ids[real].cpu().numpy()
        labels = int((batch.labels != IGNORE_INDEX).sum())
        try:
            return Ready(self._moved(batch), lengths, samples, labels, born)
        except torch.OutOfMemoryError:
            # What runs now takes the room; when its turn has come, that has been given back.
            return Ready(batch, lengths, samples, labels, born, moved=False)

    def _moved(self, batch: Batch) -> Batch:
        if self.stream is not None:
            # Where the model runs, whose stream another thread does not have by itself.
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
                f"({held}) ran out of memory while it was collated, ahead of its turn, so the step "
                f"cannot go on. Collate on the CPU and name the `device` to the runner, lower "
                f"`prefetch`, or lower the budget."
            ) from error

    def _empty(self) -> Ready:
        return self._ready(self.runner.collate(self.work.empty, {}))

    def _in_lock_step(self, items: Iterator[Ready]) -> Iterator[Ready]:
        """As many micro-batches as the rank with most has; empty micro-batches on the others."""
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

    def _micro_batch(self, ready: Ready, exchange: bool) -> None:
        failure: BaseException | None = None
        now = time.time()
        self.ages += [now - born for born in ready.born]
        try:
            batch = ready.batch if ready.moved else self._moved(ready.batch)
            shard = (self.runner.cut or _whole)(batch)
            amounts = self.step_loss.amounts(batch, getattr(shard, "rank", 0) == 0)
            scales = self._scales(amounts)
            with self.compute, self.busy, self.framework.exchange(exchange and not self._by_hand):
                self._forward_backward(batch, shard, amounts, scales)
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)  # its frames would keep the memory alive
        except Exception as error:
            with suppress(Exception):
                error.add_note(f"in {self._where(ready)}")
            raise
        if self.runner.on_memory == "split":
            self._agree(failure, ready)
        elif failure is not None:
            raise MicroBatchError(
                f"{self._where(ready)} ran out of memory, so the step cannot go on. Lower the "
                f"budget below {ready.batch.rows * ready.batch.width} slots, limit the cost of a "
                f"micro-batch, or set on_memory='split'."
            ) from failure
        self.share = 1 / getattr(shard, "size", 1)
        self.tokens += int(ready.lengths.sum())
        self.slots += ready.batch.rows * ready.batch.width
        self.labels += ready.labels
        if self.runner.cost is not None:
            self.flops += float(self.runner.cost.of_lengths(ready.lengths).sum())
        self.position += 1

    def _scales(self, amounts: Mapping[str, Tensor]) -> dict[str, float]:
        """By what this micro-batch's sums are multiplied before backward."""
        reduced: Mapping[str, Tensor] | None = None
        if self.step_loss.mode == "per_micro_batch":
            with self.communicate:
                bundle = Bundle(amounts, extremes(self.work.count or 0)).reduce(
                    self.runner.collective
                )
            check_counts(extremes_of(bundle))
            reduced = bundle.sums
        micro_batches = max(self.work.count or 0, 1)
        return self.step_loss.scales(
            self.work.totals, reduced=reduced, micro_batches=micro_batches
        )

    def _forward_backward(
        self,
        batch: Batch,
        shard: Batch | BatchShard,
        amounts: Mapping[str, Tensor],
        scales: Mapping[str, float],
    ) -> None:
        outputs = self.runner.forward(self.runner.model, shard)
        sums: dict[str, Tensor] = {}
        metrics: dict[str, Metric] = {}
        for name, loss in self.losses.items():
            cut = self.runner.cut or _whole
            found = loss.function(outputs, cut(weighted(batch, loss.normalization)))
            sums[name] = found.loss if isinstance(found, Sums) else found
            if isinstance(found, Sums):
                prefix = f"{name}/" if len(self.losses) > 1 else ""
                metrics |= {prefix + key: metric for key, metric in found.metrics.items()}
        self.step_loss.objective(sums, scales).backward()
        self.bundles.append(self.step_loss.bundle(sums, amounts, scales, metrics))

    def _agree(self, failure: BaseException | None, ready: Ready) -> None:
        """Whether this micro-batch ran on every rank; raised on all of them if it did not."""
        ranks = self.runner.collective
        # Per rank: 0 it ran, 1 it did not, 2 and cannot be split; and how many it has in all.
        flags = torch.zeros(2, ranks.size)
        if failure is not None:
            flags[0, ranks.rank] = 1 if len(ready.samples) > 1 else 2
        flags[1, ranks.rank] = self.work.count or 0
        with self.communicate:
            found, counts = ranks.all_reduce_sum(flags).tolist()
        check_counts(counts)
        if 2 in found and failure is not None:
            raise MicroBatchError(f"{self._where(ready)} {_HOPELESS}") from failure
        if 2 in found:
            where = f"micro-batch {self.position} of step {self.work.number}"
            raise MicroBatchError(f"{where} on rank {found.index(2)} {_HOPELESS}")
        if any(found):
            raise TooLargeError(self.position)

    def _where(self, ready: Ready) -> str:
        total = "" if self.work.count is None else f" of {self.work.count}"
        return (
            f"micro-batch {self.position}{total} of step {self.work.number} on rank "
            f"{self.runner.collective.rank} "
            f"({_described(ready.batch.rows, ready.batch.width, ready.samples)})"
        )

    def _measures(self) -> Bundle:
        """How busy this rank was and with what, to travel with the bundle."""
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
            # A mean over ranks, as MFU compares with what one rank could have done.
            mine = torch.tensor(self.flops * self.share, dtype=torch.float64)
            metrics[FLOPS] = Metric.mean(mine, 1)
        return Bundle({}, metrics)


def _whole(batch: Batch) -> Batch:
    return batch


def _described(rows: int, width: int, samples: IntArray) -> str:
    """1 x 8 slots, 3 segments of samples 4, 0, 7"""
    shown = ", ".join(map(str, samples[:4])) + ("..." if len(samples) > 4 else "")
    held = f"{len(samples)} segments of samples {shown}" if shown else "no segment"
    return f"{rows} x {width} slots, {held}"


def _stream(device: torch.device | str | None) -> Any:
    """The stream that the model runs on, None where there are none."""
    if device is None or torch.device(device).type != "cuda":
        return None
    return torch.cuda.current_stream(device)
