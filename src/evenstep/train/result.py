"""StepResult: loss, metrics and kept values of a step, on this rank and over all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from evenstep.core.cost import Cost
from evenstep.core.ragged import IntArray, offsets_of, ranges_of
from evenstep.core.text import attempt, counted, fill, line
from evenstep.errors import InputError
from evenstep.tensors.batch import IGNORE_INDEX, Batch, BatchExchange
from evenstep.tensors.losses import Sums
from evenstep.train.checks import check_same
from evenstep.train.collectives import Bundle, Collective, gather_values
from evenstep.train.compiling import Compilations
from evenstep.train.step_loss import LossValues, StepLoss

Keep: TypeAlias = Literal["samples", "tokens"]


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Loss values of the samples that this rank ran, on the host, in ascending order of id.

    Values are weighted as the normalization weights them and not divided: the sum of `samples`
    over all ranks is the loss times its denominator. Of a split sample, a rank has the values of
    its own segments. A sample that ranks share is whole, on the rank that runs its first part.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> from evenstep.demo.decoder import Decoder, DecoderShape
    >>> from evenstep.tensors import Collator, cross_entropy
    >>> from evenstep.train import run_step
    >>> samples = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    >>> plan = make_plan([3, 2], Recipe(layout=Packed(max_tokens=3)))
    >>> batches = [Collator()(micro, samples) for micro in plan[0, 0]]
    >>> model = Decoder(DecoderShape(vocab=10))
    >>> kept = run_step(batches, model, cross_entropy(), keep="tokens").kept
    >>> kept.sample_ids.tolist(), [len(values) for values in kept.tokens["loss"]]
    ([0, 1], [3, 2])
    """

    sample_ids: IntArray
    samples: dict[str, Tensor]
    """By loss: (samples), the sum of the values of each sample."""
    tokens: dict[str, list[Tensor]]
    """By loss: one tensor per sample. Entry i is the value of token i, 0 for the first token and
    for tokens that do not count or did not run here. What a loss of all tokens (`AllTokens`) has
    at the last token, which predicts none, is in `samples` only. Empty with keep="samples"."""


# Metrics of a step beside those of its losses.
BUSY, BUSY_MOST, FLOPS = "evenstep/busy", "evenstep/busy_most", "evenstep/flops"
TOKENS, SLOTS, LABELS = "evenstep/tokens", "evenstep/slots", "evenstep/labels"
PREDICTED = "evenstep/predicted"  # tokens that are not the first of their sample
SQUARE = "evenstep/gradient_square"
GROUPS_MOST = "evenstep/groups_most"  # of a rank, counted by GroupMean


class SegmentArrays(NamedTuple):
    """Where the segments of a micro-batch lie, on the host; tails are left out."""

    sample: IntArray
    start: IntArray  # in its sample
    length: IntArray
    first: IntArray  # slot
    continues: IntArray  # 1 if the last slot predicts the first token of the next segment


class BatchSegments:
    """The segments of a micro-batch that runs. Holds tensors of tiles, which are small, and reads
    them when they are asked for: those of a batch on a device only at the end of the step."""

    def __init__(self, batch: Batch) -> None:
        samples = batch.unshared
        self.tiles = (samples.sample_ids, samples.starts, samples.seqlens, samples.cu_seqlens)
        self.continuation, self.rows, self.width = samples.continuation, batch.rows, batch.width
        self._ids, self._lengths, self._ends = batch.sample_ids, batch.seqlens, batch.cu_seqlens
        self._ends_of_keys = batch.cu_seqlens if batch.keys is None else batch.keys.cu_seqlens
        labels = samples.labels  # large, so not kept
        self.labels: Any = (
            int(np.count_nonzero(labels.numpy() != IGNORE_INDEX))
            if labels.device.type == "cpu"
            else (labels != IGNORE_INDEX).sum()
        )

    @cached_property
    def arrays(self) -> SegmentArrays:
        """Read from the tensors. Waits for the device."""
        sample, start, length, ends = (tensor.cpu().numpy() for tensor in self.tiles)
        more = np.zeros(len(sample), np.int64)
        if self.continuation is not None:
            more[:] = (self.continuation.counts > 0).cpu().numpy()
        real = sample >= 0
        return SegmentArrays(*(each[real] for each in (sample, start, length, ends[:-1], more)))

    @property
    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the tiles that run: their samples, lengths, and the tokens that they see in front."""
        return self._ids, self._lengths, self._ends_of_keys.diff() - self._ends.diff()

    @property
    def work(self) -> tuple[float, float, float]:
        """(tokens, squared lengths, segments) that run. Padded rows run at their full width."""
        sample, run, in_front = (tensor.cpu().numpy() for tensor in self.run)
        length, in_front = run[sample >= 0].astype(np.float64), in_front[sample >= 0]
        if self.rows > 1 and 0 < len(length) <= self.rows and not in_front.any():
            length, in_front = np.full(self.rows, float(self.width)), np.zeros(self.rows)
        return float(length.sum()), float((length * (length + 2 * in_front)).sum()), len(length)


def counts_of(ran: Sequence[BatchSegments], cost: Cost | None = None) -> dict[str, float]:
    """What micro-batches hold together, by the names of metrics; FLOPs if `cost` gives them.

    Where samples share a prefix: the samples, but the tokens, slots and FLOPs that run.
    """
    tiles: Any = zip(*(each.tiles[:3] for each in ran), strict=True)
    sample, start, length = (torch.cat(column).cpu().numpy() for column in tiles)
    predicted = int(length.sum()) - int(np.count_nonzero((start == 0) & (sample >= 0)))
    tiles = zip(*(each.run for each in ran), strict=True)
    sample, length, in_front = (torch.cat(column).cpu().numpy() for column in tiles)
    counts: dict[str, float] = {
        TOKENS: int(length.sum()),
        SLOTS: sum(each.rows * each.width for each in ran),
        LABELS: int(sum(each.labels for each in ran)),
        PREDICTED: predicted,
    }
    if cost is None:
        return counts
    real = sample >= 0
    return counts | {FLOPS: float(cost.of_lengths(length[real], in_front[real]).sum())}


class Keeper:
    """Collects the values of micro-batches as they run, on the device."""

    def __init__(self, keep: Keep) -> None:
        self.keep = keep
        self._segments: list[BatchSegments] = []
        self._by_tile: dict[str, list[tuple[Tensor, Tensor | None]]] = {}
        self._by_slot: dict[str, list[Tensor]] = {}
        self._shared: dict[int, int] = {}  # lengths of the samples that ranks share, by id

    def add(
        self,
        segments: BatchSegments,
        losses: Mapping[str, Sums | Tensor],
        exchange: BatchExchange | None = None,
    ) -> None:
        """The values of one micro-batch, by loss."""
        self._segments.append(segments)
        if exchange is not None:
            self._shared |= dict(zip(exchange.sample_ids, exchange.lengths, strict=True))
        for name, sums in losses.items():
            if not isinstance(sums, Sums) or sums.by_tile is None:
                raise InputError(
                    f"keep={self.keep!r} needs the loss of each sequence, but the loss {name!r} "
                    f"returned {'sums of a shard' if isinstance(sums, Sums) else 'a scalar'}. "
                    f"Return Sums of whole sequences (`PerSequence`), or set keep=None."
                )
            self._by_tile.setdefault(name, []).append((sums.by_tile.detach(), sums.real))
            if self.keep == "samples":
                continue
            if sums.by_slot is None:
                raise InputError(
                    f"keep='tokens' needs one value per token, but the loss {name!r} returns "
                    f"one per sequence. Return values per slot, or set keep='samples'."
                )
            self._by_slot.setdefault(name, []).append(sums.by_slot.detach().flatten())

    def kept(self, ranks: Collective) -> Kept:
        """All values in the order of samples."""
        columns = zip(*(segments.arrays for segments in self._segments), strict=True)
        sample, start, length, _, more = map(np.concatenate, columns)
        ids, row = np.unique(sample, return_inverse=True)
        ends = np.zeros(len(ids), np.int64)
        np.maximum.at(ends, row, start + length + more)
        shared = np.array(sorted(self._shared), np.int64)  # alike on all ranks
        sizes = np.array([self._shared[each] for each in shared.tolist()], np.int64)
        parts = np.flatnonzero(np.isin(ids, shared))
        number = np.searchsorted(shared, ids[parts])
        ends[parts] = sizes[number]
        offsets = offsets_of(ends)
        samples = {
            name: torch.zeros(len(ids), dtype=torch.float64).index_add_(
                0,
                torch.from_numpy(row),
                torch.cat([v if real is None else v[real] for v, real in values]).double().cpu(),
            )
            for name, values in self._by_tile.items()
        }
        # Slot j of a segment predicts token start + j + 1 of its sample.
        count = length - 1 + more
        target = torch.from_numpy(ranges_of(offsets[row] + start + 1, count))
        by_token = {}
        for name, values in self._by_slot.items():
            before = offsets_of(np.array([len(each) for each in values], np.int64))
            first = [
                each.arrays.first + at for each, at in zip(self._segments, before, strict=False)
            ]
            source = torch.from_numpy(ranges_of(np.concatenate(first), count))
            by_slot = torch.cat(values).cpu()
            by_token[name] = by_slot.new_zeros(int(offsets[-1]))
            by_token[name][target] = by_slot[source]
        here = np.ones(len(ids), bool)
        if len(shared):
            mine = ranges_of(offsets[parts], ends[parts])
            places = ranges_of(offsets_of(sizes)[number], ends[parts])
            for name in sorted(samples):
                _sum_over_ranks(samples[name], parts, number, len(shared), ranks)
                if by_token:
                    _sum_over_ranks(by_token[name], mine, places, int(sizes.sum()), ranks)
            here[parts] = np.isin(parts, row[start == 0])
        chosen = np.flatnonzero(here).tolist()
        tokens = {name: values.split(ends.tolist()) for name, values in by_token.items()}
        return Kept(
            ids[here],
            {name: values[chosen] for name, values in samples.items()},
            {name: [values[at] for at in chosen] for name, values in tokens.items()},
        )


def _sum_over_ranks(
    values: Tensor, entries: IntArray, places: IntArray, count: int, ranks: Collective
) -> None:
    """Sum these entries over ranks, in place; `places` are theirs among the `count` of all."""
    every = torch.zeros(count, dtype=torch.float64)
    every[places] = values[entries].double()
    values[entries] = ranks.all_reduce_sum(every).cpu()[places].to(values.dtype)


ANY_CAUSE = (
    "Labels are -100 or loss masks 0 for every token. A chat template without {% generation %} "
    "marks gives assistant_masks of zeros: encode chats with evenstep.data.ChatEncoder."
)


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one rank's step.

    wait         waiting for the next micro-batch to be prepared
    prepare      reading, collating and copying, mostly while the model runs
    compute      preprocess, forwards and backwards, including the communication of DDP or FSDP in
                 them
    communicate  the runner's own sums over ranks
    total        from the call to its end
    first        from the call to the first forward
    """

    wait: float = 0.0
    prepare: float = 0.0
    compute: float = 0.0
    communicate: float = 0.0
    total: float = 0.0
    first: float = 0.0


class Stopwatch:
    """Elapsed seconds inside `with` blocks, accumulated."""

    seconds = _began = 0.0
    _mark: Callable[[], Any] | None = None  # called at the begin and the end of each block
    _marks: list[Any]

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        if self._mark is not None:
            self._marks.append(self._mark())
        return self

    def __exit__(self, *_: object) -> None:
        if self._mark is not None:
            self._marks.append(self._mark())
        self.seconds += time.perf_counter() - self._began


class ComputeTime(Stopwatch):
    """A stopwatch of forwards and backwards that also knows the busy seconds of each block.

    Busy seconds are those of this rank without waiting for other ranks. On a CPU, the CPU time of
    this thread. On a GPU, the time between two events of the stream; only reading them
    synchronises with the device.
    """

    def __init__(self, cuda: bool) -> None:
        self._cuda, self._mark = cuda, _recorded_event if cuda else time.thread_time
        self._marks = []

    def busy(self) -> list[float]:
        """Busy seconds of each block. On a GPU, which runs behind, they are all its seconds."""
        blocks = zip(self._marks[::2], self._marks[1::2], strict=True)
        if not self._cuda:
            return [end - begin for begin, end in blocks]
        if self._marks:
            self._marks[-1].synchronize()
        busy = [begin.elapsed_time(end) / 1e3 for begin, end in blocks]
        self.seconds = sum(busy)
        return busy


def _recorded_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The loss, metrics and measurements of a step.

    If denominators were known before the step, ranks have exchanged gradients only and `reduced`
    is False. Call `reduce` on every rank (one all-reduce) before reading values of all ranks.

        result = runner.run(step).reduce(runner.collective)
        log(result.to_dict())
    """

    timings: Timings
    tokens: int
    """Real tokens of this rank."""
    slots: int
    """Real tokens and padding of this rank."""
    num_micro_batches: int
    planned_imbalance: float | None
    """Planned cost of the slowest rank over the mean: per wave with fully_shard, else per step."""
    busy: tuple[float, ...] = ()
    """Busy seconds of each micro-batch of this rank, without waiting for other ranks."""
    costs: tuple[float, ...] = ()
    """Planned cost of each of them; empty if the step has no plan."""
    ages: tuple[float, ...] = ()
    """Seconds from the creation of each fed sample to its forward."""
    peak_flops: float | None = None
    skipped: bool = False
    """Whether the step was not finite and its gradient was discarded (`on_nonfinite="skip"`)."""
    ran: tuple[BatchSegments, ...] = field(default=(), repr=False)
    """The segments of each micro-batch of this rank."""
    compiled: Compilations = field(default_factory=Compilations)
    """What torch.compile did in this step; see `compile_layers`."""
    kept: Kept | None = field(default=None, repr=False)
    """Loss values of this rank's samples, with `Runner(keep=...)`."""
    bundle: Bundle = field(repr=False)
    numbers: LossValues | None = None
    known: StepLoss | None = field(default=None, repr=False)
    """What `reduce` needs, if values were not exchanged yet."""

    def __repr__(self) -> str:
        """The loss and what this rank ran, in one line."""
        planned = self.planned_imbalance
        parts = (
            attempt(lambda: f"loss {self.loss:.6g}" if self.reduced else "not reduced"),
            counted(self.num_micro_batches, "micro-batch"),
            counted(self.tokens, "token"),
            fill(self.tokens, self.slots),
            "" if planned is None else f"imbalance {planned:.3f} planned",
            attempt(lambda: f"imbalance {self.measured_imbalance:.3f} measured"),
            "skipped" if self.skipped else "",
            f"{counted(graphs, 'graph')} compiled" if (graphs := self.compiled.graphs) else "",
            f"{self.timings.total:.3g} s",
        )
        return line("StepResult", parts)

    @property
    def work(self) -> list[tuple[float, float, float]]:
        """Tokens, squared lengths and segments of each micro-batch of this rank, for `fit_cost`."""
        return [each.work for each in self.ran]

    @property
    def reduced(self) -> bool:
        """Whether the values of all ranks are available."""
        return self.numbers is not None

    def reduce(self, collective: Collective) -> StepResult:
        """The result with the values of all ranks. Every rank must call it, or none."""
        if self.reduced:
            return self
        assert self.known is not None
        reduced = self.bundle.reduce(collective)
        check_same(reduced)
        numbers = self.known.finish(reduced)
        return replace(self, numbers=numbers)

    @property
    def _numbers(self) -> LossValues:
        if self.numbers is None:
            raise InputError(
                "this result is not reduced over ranks. Call result.reduce(collective) on every "
                "rank first."
            )
        return self.numbers

    def _metric(self, name: str) -> float:
        return float(self._numbers.metrics[name].value)

    @property
    def loss(self) -> float:
        """The exact loss of the step, over all micro-batches and ranks."""
        return self._numbers.loss

    @property
    def losses(self) -> dict[str, float]:
        """Each loss by name, not weighted."""
        return self._numbers.losses

    @property
    def grad_norm(self) -> float:
        """The norm of this step's gradient, over all parameters, ranks and shards.

        Of the exact gradient: before clipping, without a scaler's scale, and without gradients
        that were in `.grad` before the step.
        """
        factors = self._numbers.factors
        # Gradients of several denominators are measured after they were multiplied.
        factor = next(iter(factors.values())) if len(factors) == 1 else 1.0
        return math.sqrt(self._metric(SQUARE)) * factor if factor else 0.0

    @property
    def finite(self) -> bool:
        """Whether the loss and all gradients of the step are finite, on all ranks."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def empty(self) -> bool:
        """Whether the step has no loss tokens, or all weights are 0; loss and gradients are 0."""
        return self._numbers.empty or self._metric(LABELS) == 0

    @property
    def without_loss(self) -> bool:
        """Whether labels are needed and all of them are ignored, although there are tokens to
        predict. A step without samples, or with samples of one token only, is just empty."""
        assert self.known is not None
        over = self._numbers.denominators
        return self.known.without_loss(self._metric(LABELS), self._metric(PREDICTED), over)

    @property
    def deviation(self) -> float:
        """The loss whose gradient was taken minus the exact loss.

        0, except with mode="per_micro_batch".
        """
        return self._numbers.reported - self._numbers.loss

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the loss functions, by name."""
        return {
            name: float(metric.value)
            for name, metric in self._numbers.metrics.items()
            if not name.startswith("evenstep/")
        }

    @property
    def measured_imbalance(self) -> float:
        """Busy time of the slowest rank over the mean, without waiting for other ranks."""
        mean = self._metric(BUSY)
        return self._metric(BUSY_MOST) / mean if mean > 0 else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Real tokens per second, over all ranks."""
        return self._metric(TOKENS) / self.timings.total

    @property
    def padding(self) -> float:
        """Share of padding in the slots of all ranks."""
        return 1 - self._metric(TOKENS) / self._metric(SLOTS)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: FLOPs of real tokens over peak FLOPs in the same time."""
        if FLOPS not in self._numbers.metrics or self.peak_flops is None:
            return None
        return self._metric(FLOPS) / (self.timings.total * self.peak_flops)

    def to_dict(self) -> dict[str, float]:
        """Plain numbers for a logger."""
        numbers: dict[str, float | None] = {
            **self.metrics,
            "loss": self.loss,
            **{f"loss/{name}": value for name, value in self.losses.items()},
            "grad_norm": self.grad_norm,
            "tokens_per_second": self.tokens_per_second,
            "padding": self.padding,
            "imbalance/planned": self.planned_imbalance,
            "imbalance/measured": self.measured_imbalance,
            "mfu": self.mfu,
            "age": sum(self.ages) / len(self.ages) if self.ages else None,
            "graphs_compiled": self.compiled.graphs or None,
            **{f"seconds/{name}": getattr(self.timings, name) for name in Timings.__slots__},
        }
        return {name: value for name, value in numbers.items() if value is not None}


def gathered(result: StepResult, collective: Collective) -> dict[str, object]:
    """What a log keeps of a step: planned cost, busy seconds and work of every micro-batch, as
    lists of ranks × micro-batches. Every rank calls it; all have equally many micro-batches."""
    mine = [result.costs or [0.0] * len(result.busy), result.busy, *zip(*result.work, strict=True)]
    of_ranks = gather_values(collective, torch.tensor(mine, dtype=torch.float64))
    costs, busy, *sums = zip(*of_ranks, strict=True)
    work = [[*zip(*of_rank, strict=True)] for of_rank in zip(*sums, strict=True)]
    return {
        "micro_batches/cost": [*costs], "micro_batches/busy": [*busy], "micro_batches/work": work
    }  # fmt: skip
