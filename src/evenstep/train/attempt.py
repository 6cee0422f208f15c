"""Attempt: one try at one step, micro-batch by micro-batch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from evenstep.core.micro_batch import MicroBatch
from evenstep.core.ragged import IntArray
from evenstep.core.segments import Segments
from evenstep.data.feed import Fed, Feed
from evenstep.errors import ConfigError, InputError, MicroBatchError
from evenstep.tensors.batch import IGNORE_INDEX, Batch
from evenstep.tensors.metrics import Metric
from evenstep.tensors.sequences import Sums
from evenstep.tensors.shard import Shard
from evenstep.train.bundle import Bundle
from evenstep.train.framework import Framework, sum_gradients
from evenstep.train.loss import GroupMean, weighted
from evenstep.train.normalizer import Mode, Normalizer, power_of_two
from evenstep.train.pieces import groups_of
from evenstep.train.prefetch import Prefetch
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


def nothing() -> MicroBatch:
    """A micro-batch of one slot with nothing in it."""
    none = np.empty(0, np.int64)
    return MicroBatch(Segments(none, none, none), np.array([0, 0]), 1, none)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a step is, to an attempt at it. `count` is None where nobody knows it yet."""

    items: Iterable[Batch | Fed | tuple[MicroBatch, Mapping[int, Any]]]
    count: int | None
    number: int
    totals: Mapping[str, float]
    budget: int | None
    dummy: MicroBatch = field(default_factory=nothing)
    """What a rank runs that has nothing to run."""


LEAST, MOST = "evenstep/least", "evenstep/most"
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
        self.normalizer = Normalizer(
            losses={name: (loss.normalization, loss.weight) for name, loss in self.losses.items()},
            mode=runner.mode or self._mode(),
            averaged_over=1 if self._by_hand else self.framework.averaged_over(runner.collective),
            constant=power_of_two(work.budget) if work.budget else 1.0,
        )
        if self.normalizer.mode == "per_micro_batch" and work.count is None:
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
            self._micro_batch(self._dummy(), exchange=True)
        parameters = list(runner.model.parameters())
        if self._by_hand:
            with self.communicate:
                sum_gradients(parameters, runner.collective)
        bundle = Bundle.merge([*self.bundles, self._measures()])
        numbers = None
        if self.normalizer.mode != "known" or runner.collective.size == 1:
            with self.communicate:
                reduced = bundle.reduce(runner.collective)
            _check_constant(reduced)
            numbers = self.normalizer.finish(parameters, reduced, work.totals)
        clock = "micro_batch" if self.framework.kind == "fsdp" else "step"
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
            micro_batches=self.position,
            planned_imbalance=work.totals.get(f"imbalance_{clock}"),
            ages=tuple(self.ages),
            peak_flops=runner.peak_flops,
            bundle=bundle,
            numbers=numbers,
            known=(self.normalizer, work.totals),
        )

    # Preparing, in the prefetching thread --------------------------------------------------------

    def _prepared(self) -> Iterator[Ready]:
        for item in self.work.items:
            if isinstance(item, Fed):
                yield self._ready(
                    self.runner.collate(item.micro, item.samples), tuple(item.born.values())
                )
            elif isinstance(item, tuple):
                self._refuse_skipped(item[1])
                yield self._ready(self.runner.collate(*item))
            else:
                yield self._ready(item)

    def _ready(self, batch: Batch, born: tuple[float, ...] = ()) -> Ready:
        self._check_groups(batch)
        real = batch.sample_ids >= 0
        lengths, samples = batch.seqlens[real].cpu().numpy(), batch.sample_ids[real].cpu().numpy()
        labels = int((batch.labels != IGNORE_INDEX).sum())
        if self.stream is not None:
            # Where the model runs, whose stream this thread does not have by itself.
            with torch.cuda.stream(self.stream):
                batch = batch.pin_memory() if batch.device.type == "cpu" else batch
                batch = batch.to(self.runner.device, non_blocking=True)
        elif self.runner.device is not None:
            batch = batch.to(self.runner.device)
        return Ready(batch, lengths, samples, labels, born)

    def _refuse_skipped(self, samples: Mapping[int, Any]) -> None:
        """Whoever skips samples breaks what was promised, which the others would not notice."""
        skipped = [number for number, sample in samples.items() if sample is None]
        promised = [n for n in self.normalizer.denominators.values() if n.known({}) is None]
        if skipped and promised and self.normalizer.mode == "known":
            raise InputError(
                f"sample {skipped[0]} was skipped, but {promised[0].name!r} was known before the "
                f"step and counts it, so the gradients would be off. Set mode='deferred' where "
                f"samples may be skipped."
            )

    def _check_groups(self, batch: Batch) -> None:
        """Where GroupMean counts groups by itself, each must lie in one micro-batch."""
        means = (isinstance(loss.normalization, GroupMean) for loss in self.losses.values())
        if "group_tokens" in batch.aligned or not any(means):
            return
        if self.runner.on_memory == "split":
            raise ConfigError(
                "on_memory='split' may divide a group between two micro-batches, but GroupMean "
                "counts each group's tokens in its micro-batch, so the group would count twice. "
                "Give samples the sequence-aligned extra 'group_tokens'."
            )
        groups = groups_of(batch)[batch.trained > 0].unique().tolist()
        again = sorted(self.groups.intersection(groups))
        if again:
            raise InputError(
                f"group {again[0]} lies in two micro-batches of this rank, but GroupMean counts "
                f"each group's tokens in its micro-batch, so the group would count twice. Plan "
                f"with groups='micro_batch', or give samples the sequence-aligned extra "
                f"'group_tokens'."
            )
        self.groups.update(groups)

    def _dummy(self) -> Ready:
        return self._ready(self.runner.collate(self.work.dummy, {}))

    def _in_lock_step(self, items: Iterator[Ready]) -> Iterator[Ready]:
        """As many micro-batches as the rank with most has; dummies on the others."""
        while True:
            item = next(items, None)
            with self.communicate:
                have = torch.tensor([float(item is not None)])
                anyone = bool(self.runner.collective.all_reduce_sum(have).item())
            if not anyone:
                return
            yield self._dummy() if item is None else item
            del item

    # Running --------------------------------------------------------------------------------------

    def _micro_batch(self, ready: Ready, exchange: bool) -> None:
        failure: BaseException | None = None
        now = time.time()
        self.ages += [now - born for born in ready.born]
        try:
            shard = (self.runner.cut or _whole)(ready.batch)
            amounts = self.normalizer.amounts(ready.batch, getattr(shard, "rank", 0) == 0)
            scales = self._scales(amounts)
            with self.compute, self.busy, self.framework.exchange(exchange and not self._by_hand):
                self._forward_backward(ready.batch, shard, amounts, scales)
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
        if self.normalizer.mode == "per_micro_batch":
            count = torch.tensor(float(self.work.count or 0))
            counts = {LEAST: Metric.min(count), MOST: Metric.max(count)}
            with self.communicate:
                bundle = Bundle(amounts, counts).reduce(self.runner.collective)
            _check_counts([float(bundle.metrics[name].value) for name in (LEAST, MOST)])
            reduced = bundle.sums
        micro_batches = max(self.work.count or 0, 1)
        return self.normalizer.scales(
            self.work.totals, reduced=reduced, micro_batches=micro_batches
        )

    def _forward_backward(
        self,
        batch: Batch,
        shard: Batch | Shard,
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
        self.normalizer.objective(sums, scales).backward()
        self.bundles.append(self.normalizer.bundle(sums, amounts, scales, metrics))

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
        _check_counts(counts)
        if 2 in found and failure is not None:
            raise MicroBatchError(f"{self._where(ready)} {_HOPELESS}") from failure
        if 2 in found:
            where = f"micro-batch {self.position} of step {self.work.number}"
            raise MicroBatchError(f"{where} on rank {found.index(2)} {_HOPELESS}")
        if any(found):
            raise TooLargeError(self.position)

    def _where(self, ready: Ready) -> str:
        shown = ", ".join(map(str, ready.samples[:4])) + ("..." if len(ready.samples) > 4 else "")
        held = f"{len(ready.samples)} segments of samples {shown}" if shown else "no segment"
        total = "" if self.work.count is None else f" of {self.work.count}"
        shape = f"{ready.batch.rows} x {ready.batch.width} slots"
        return (
            f"micro-batch {self.position}{total} of step {self.work.number} on rank "
            f"{self.runner.collective.rank} ({shape}, {held})"
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
        if self.normalizer.mode == "deferred":
            constant = torch.tensor(self.normalizer.constant, dtype=torch.float64)
            metrics |= {LEAST: Metric.min(constant), MOST: Metric.max(constant)}
        if self.runner.cost is not None:
            # A mean over ranks, as MFU compares with what one rank could have done.
            mine = torch.tensor(self.flops * self.share, dtype=torch.float64)
            metrics[FLOPS] = Metric.mean(mine, 1)
        return Bundle({}, metrics)


def _whole(batch: Batch) -> Batch:
    return batch


def _check_counts(counts: Sequence[float]) -> None:
    """Where ranks meet at every micro-batch, they need as many."""
    if min(counts) != max(counts):
        raise InputError(
            f"ranks have from {min(counts):.0f} to {max(counts):.0f} micro-batches but meet at "
            f"each, so some would wait for ever. Give every rank its step of one plan, which has "
            f"as many on each."
        )


def _check_constant(reduced: Bundle) -> None:
    if LEAST not in reduced.metrics:
        return
    least, most = (float(reduced.metrics[name].value) for name in (LEAST, MOST))
    if least != most:
        raise InputError(
            f"ranks scaled their losses by constants from {least:g} to {most:g}, because their "
            f"steps have other budgets, so the sum of their gradients means nothing. Give every "
            f"rank a step of the same stream (`until_all_end` for those that ended)."
        )


def _stream(device: torch.device | str | None) -> Any:
    """The stream that the model runs on, None where there are none."""
    if device is None or torch.device(device).type != "cuda":
        return None
    return torch.cuda.current_stream(device)
