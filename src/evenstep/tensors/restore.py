"""Restore: results of micro-batches -> results in sample order.

    work                            results                        rows of the restored tensor
    `Plan`                          all ranks', or some by key     all samples, by number
    `Step`                          this rank's                    `step.own_sample_ids`
    `MicroBatch`, `FedMicroBatch`s  one for each                   their samples, ascending by id

Works for any stream and layout, and for a step resumed in the middle. Where samples could not be
read, pass the micro-batches that were read. A result may be one tensor, or one tensor per
context- or sequence-parallel rank. Results of empty micro-batches are ignored. Split samples are
joined, and a prefix that samples share is returned for each. Tokens that did not run here (dropped,
truncated, or on another rank) get the pad value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from evenstep.core.layout import place
from evenstep.core.plan import MicroBatch, Plan
from evenstep.core.ragged import (
    IntArray,
    Segments,
    offsets_of,
    own_segments,
    ranges_of,
    rounded_up,
    sample_name,
)
from evenstep.core.recipe import Topology
from evenstep.core.step import Step
from evenstep.core.text import one_of
from evenstep.data.feed import FedMicroBatch
from evenstep.errors import InputError
from evenstep.tensors.batch import RaggedTensor, Sharding
from evenstep.tensors.losses import Reduction
from evenstep.tensors.parallel import join_context, join_sequence
from evenstep.tensors.trees import paths_of

Key: TypeAlias = tuple[int, int, int]
"""(step, rank, position): `plan[step, rank][position]`."""
Work: TypeAlias = Plan | Step | Sequence[MicroBatch | FedMicroBatch]
"""A plan of all ranks, or the work of one rank: a step, or micro-batches in order."""


Result: TypeAlias = Tensor | Sequence[Tensor]
"""Result of one micro-batch: a tensor, or one tensor per context- or sequence-parallel rank."""
Results: TypeAlias = Sequence[Result] | Mapping[Key, Result]
"""All micro-batches' in execution order (for a plan: steps, ranks, positions), or some by key."""


def restore_tokens(
    work: Work,
    results: Results,
    *,
    width: int | None = None,
    pad: float = 0.0,
    shifted: bool = False,
    sharding: Sharding | None = None,
) -> Tensor:
    """Per-token results, (rows, width, ...) each -> (samples, width, ...).

    The rows are all samples of a plan by number, or the samples of this rank in ascending order of
    id (`step.own_sample_ids`).

    `width` is the width of the restored tensor, by default the longest sample. Set `shifted` for
    results computed from `labels`, such as log-probs, which lie one slot before their token: the
    restored position i then belongs to token i, and the first token of a sample gets 0. The first
    token of a later segment of a split sample is predicted in the segment before it; it gets 0 if
    that segment is not among the results.

    `sharding` says how results of several ranks are joined (`BatchShard.sharding`). By default, as
    the topology of the plan says; a plan without context or sequence parallelism does not say.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> plan = make_plan([1, 3, 2], Recipe(layout=Packed(max_tokens=4)))
    >>> [micro.segments.sample.tolist() for micro in plan[0, 0]]
    [[0, 1], [2]]
    >>> restore_tokens(plan, [torch.tensor([[10, 20, 21, 22]]), torch.tensor([[30, 31]])]).tolist()
    [[10, 0, 0], [20, 21, 22], [30, 31, 0]]

    The same for the micro-batches of one rank, whose samples are 9, 5 and 7:

    >>> micros = [micro.renumbered(np.array([9, 5, 7])) for micro in plan[0, 0]]
    >>> restore_tokens(micros, [torch.tensor([[10, 20, 21, 22]]), torch.tensor([[30, 31]])])
    tensor([[20, 21, 22],
            [30, 31,  0],
            [10,  0,  0]])
    """
    origin = Origin.of(work)
    longest = int(origin.lengths.max(initial=0))
    width = longest if width is None else width
    if width < longest:
        sample = int(origin.lengths.argmax())
        raise InputError(
            f"sample {origin.name_of(sample)} has {longest} tokens, more than width={width}. Set "
            f"width to {longest} or more."
        )
    firsts, count = np.arange(len(origin.lengths)) * width, len(origin.lengths)
    flat = origin.scatter(results, firsts, count * width, pad, shifted, sharding)
    return flat.view(count, width, *flat.shape[1:])


def restore_ragged(
    work: Work,
    results: Results,
    *,
    pad: float = 0.0,
    shifted: bool = False,
    sharding: Sharding | None = None,
) -> RaggedTensor:
    """Like `restore_tokens` without padding: sample i is `values[offsets[i]:offsets[i + 1]]`.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> plan = make_plan([1, 3, 2], Recipe(layout=Packed(max_tokens=4)))
    >>> results = [torch.tensor([[10, 20, 21, 22]]), torch.tensor([[30, 31]])]
    >>> restore_ragged(plan, results).values.tolist()
    [10, 20, 21, 22, 30, 31]
    """
    origin = Origin.of(work)
    offsets = offsets_of(origin.lengths)
    values = origin.scatter(results, offsets[:-1], int(offsets[-1]), pad, shifted, sharding)
    return RaggedTensor(values, torch.from_numpy(offsets).to(values.device))


def restore_sequences(
    work: Work,
    results: Mapping[Key, Tensor] | Sequence[Tensor],
    *,
    pad: float = 0.0,
    combine: Reduction | None = None,
) -> Tensor:
    """Per-sequence results, one entry per segment of a micro-batch -> (samples, ...).

    `combine` reduces the entries of a split sample; a mean weights each by its tokens. Without it,
    a split sample is an error.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> plan = make_plan([1, 3, 2], Recipe(layout=Packed(max_tokens=4)))
    >>> restore_sequences(plan, [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]).tolist()
    [1.0, 2.0, 3.0]
    """
    origin = Origin.of(work)
    numbers, chosen = origin.choose(results)
    own = own_segments(origin.parents, len(origin.segments))
    offsets = offsets_of(own.astype(np.int64))[origin.segment_offsets]
    segments = origin.segments.take(np.flatnonzero(own))
    for number, result in zip(numbers.tolist(), chosen, strict=True):
        expected = int(offsets[number + 1] - offsets[number])
        if not isinstance(result, Tensor) or result.shape[:1] != (expected,):
            shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise InputError(
                f"{origin.describe(number)} has {expected} segments, but its result is {shape}. "
                f"Return one entry per segment, ({expected}, ...)."
            )
    values = origin.join(numbers, chosen)
    at = ranges_of(offsets[numbers], np.diff(offsets)[numbers])  # the segment of each value
    sample = segments.sample[at]
    counts = np.bincount(sample, minlength=len(origin.lengths))
    if combine is None and counts.max(initial=0) > 1:
        split = int(counts.argmax())
        raise InputError(
            f"sample {origin.name_of(split)} was split into {counts[split]} segments with one "
            f"value each. Set combine to 'sum', 'mean', 'min' or 'max'."
        )
    entry = (-1, *(1,) * (values.ndim - 1))
    if combine == "mean":
        share = segments.length[at] / np.bincount(sample, segments.length[at])[sample]
        values = values if values.is_floating_point() else values.float()
        values = values * torch.from_numpy(share).to(values).view(entry)
    index = torch.from_numpy(sample).to(values.device)
    restored = values.new_full((len(origin.lengths), *values.shape[1:]), pad)
    if combine is None:
        return restored.index_copy_(0, index, values)
    one_of("combine", combine, Reduction)
    how = f"a{combine}" if combine in ("min", "max") else "sum"
    across = index.view(entry).expand_as(values)
    return restored.scatter_reduce(0, across, values, how, include_self=False)


# Where results come from -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Micro-batches as flat arrays, in the order of their results.

    Row i of the restored tensor is sample `sample_ids[i]`; `segments.sample` holds row numbers.
    The rows are all samples of a plan, or the samples of one rank in ascending order of id.
    """

    work: Work
    sample_ids: IntArray  # per sample, ascending
    lengths: IntArray  # per sample, its whole length
    segments: Segments
    ends: IntArray  # per segment, the end of its sample after truncation
    row_offsets: IntArray
    micro_offsets: IntArray
    widths: IntArray  # per micro-batch
    alignments: IntArray  # per micro-batch
    topology: Topology | None  # that the micro-batches were planned for, if known
    parents: IntArray | None  # per segment, as in `Plan.parents`

    @classmethod
    def of(cls, work: Work) -> Origin:
        """The origin of the results of a plan, a step or micro-batches."""
        if isinstance(work, Plan):
            return cls(
                work,
                np.arange(len(work.lengths)),
                work.lengths,
                work.segments,
                work.ends(work.segments.sample),
                work.row_offsets,
                work.micro_offsets,
                work.widths,
                np.full(work.num_micro_batches, work.recipe.topology.alignment),
                work.recipe.topology,
                work.parents,
            )
        items: Sequence[Any] = work.read_micro_batches if isinstance(work, Step) else work
        micros = [item.micro if isinstance(item, FedMicroBatch) else item for item in items]
        for item in micros:
            if not isinstance(item, MicroBatch):
                raise InputError(
                    f"expected a Plan, a Step or a sequence of micro-batches, got a sequence with "
                    f"a {type(item).__name__}."
                )
        segments = [micro.segments for micro in micros]
        ids, sample = np.unique(_join(s.sample for s in segments), return_inverse=True)
        lengths = np.zeros(len(ids), np.int64)
        lengths[sample] = _join(micro.sample_lengths for micro in micros)
        start, length = _join(s.start for s in segments), _join(s.length for s in segments)
        numbers = [(micro.rows, micro.width, micro.alignment) for micro in micros]
        rows, widths, alignments = np.array(numbers, np.int64).reshape(-1, 3).T
        return cls(
            work,
            ids,
            lengths,
            Segments(sample, start, length),
            _join(micro.sample_ends for micro in micros),
            offsets_of(_join(micro.row_offsets[1:] - micro.row_offsets[:-1] for micro in micros)),
            offsets_of(rows),
            widths,
            alignments,
            work.plan.recipe.topology if isinstance(work, Step) and work.plan else None,
            _parents_of(segments),
        )

    def __len__(self) -> int:
        return len(self.widths)

    @property
    def segment_offsets(self) -> IntArray:
        """First segment of each micro-batch, followed by the number of segments."""
        return self.row_offsets[self.micro_offsets]

    def scatter(
        self, results: Results, firsts: IntArray, total: int, pad: float, shifted: bool,
        sharding: Sharding | None,
    ) -> Tensor:  # fmt: skip
        """Copy the result of token j of sample i to entry `firsts[i] + j` of `total`."""
        if sharding is not None:
            one_of("sharding", sharding, Sharding)
        numbers, chosen = self.choose(results)
        rows, widths = np.diff(self.micro_offsets)[numbers], self.widths[numbers]
        shapes = zip(rows.tolist(), widths.tolist(), strict=True)
        whole = [
            self._whole(number, shape, result, sharding).flatten(0, 1)
            for number, shape, result in zip(numbers.tolist(), shapes, chosen, strict=True)
        ]
        values = self.join(numbers, whole)
        source, here, sample = self._first_entries(numbers, rows * widths)
        segments, device = self.segments.take(here), values.device
        segments = Segments(sample, segments.start, segments.length)
        target, length = firsts[segments.sample] + segments.start, segments.length
        flat = values.new_full((total, *values.shape[1:]), pad)
        if shifted:
            # log-probs [of b, of c, none] of tokens [a, b, c] -> [0, of b, of c]
            flat.index_fill_(0, torch.from_numpy(target).to(device), 0)
            continues = segments.start + length < self.ends[here]
            target, length = target + 1, length - 1 + continues
        read, written = (
            torch.from_numpy(ranges_of(first, length)).to(device) for first in (source, target)
        )
        return flat.index_copy_(0, written, values.index_select(0, read))

    def _first_entries(
        self, numbers: IntArray, slots: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Where segments begin in the results of these micro-batches, end to end, which they are,
        and of which sample: a segment that samples share appears once for each of them.

        Two micro-batches of 8 and 4 slots: the first segment of the second one begins at entry 8.
        """
        before = np.full(len(self), -1)
        before[numbers] = offsets_of(slots)[:-1]
        micro = np.repeat(np.arange(len(self)), np.diff(self.segment_offsets))  # of each segment
        row = np.repeat(np.arange(len(self.row_offsets) - 1), np.diff(self.row_offsets))
        # Segments laid end to end over all rows; in its row, one begins where those before it end.
        end = offsets_of(rounded_up(self.segments.length, self.alignments[micro]))
        in_row = end[:-1] - end[self.row_offsets[row]]
        first = before[micro] + (row - self.micro_offsets[micro]) * self.widths[micro] + in_row
        here = owner = np.flatnonzero(before[micro] >= 0)
        if self.parents is not None:
            owner, path = paths_of(self.parents)
            chosen = (own_segments(self.parents, len(row)) & (before[micro] >= 0))[owner]
            owner, here = owner[chosen], path[chosen]
        return first[here], here, self.segments.sample[owner]

    def _whole(
        self, number: int, shape: tuple[int, int], result: Result, sharding: Sharding | None
    ) -> Tensor:
        """Result of one micro-batch, (rows, width, ...), joined over ranks."""
        if isinstance(result, Tensor):
            if result.shape[:2] != shape:
                raise InputError(
                    f"{self.describe(number)} has shape {shape}, but its result has shape "
                    f"{tuple(result.shape)}. Return (rows, width, ...), padding included."
                )
            return result
        rows, width = shape
        size = max(len(result), 1)
        share = (rows, width // size)
        if not len(result) or width % size or any(each.shape[:2] != share for each in result):
            raise InputError(
                f"{self.describe(number)} has shape {shape}, but its results per rank have shapes "
                f"{[tuple(each.shape) for each in result]}. Pass {share} from each context- "
                f"or sequence-parallel rank."
            )
        if size == 1:
            return result[0]
        if (sharding or self._planned_sharding(number, size)) == "sequence":
            return join_sequence(result)
        offsets = self.row_offsets[self.micro_offsets[number] :][: rows + 1]
        lengths = self.segments.length[offsets[0] : offsets[-1]]
        placed = place(lengths, offsets - offsets[0], width, int(self.alignments[number]))
        return join_context(result, torch.from_numpy(placed.offsets))

    def _planned_sharding(self, number: int, size: int) -> Sharding:
        """How the topology of the plan shards a batch over `size` ranks."""
        planned: dict[Sharding, int] = {}
        if self.topology is not None:
            sequence = self.topology.tp if self.topology.sequence_parallel else 1
            planned = {"context": self.topology.cp, "sequence": sequence}
        possible: list[Sharding] = [name for name, ranks in planned.items() if ranks == size]
        if len(possible) == 1:
            return possible[0]
        raise InputError(
            f"the results of {self.describe(number)} come from {size} ranks, and its plan does not "
            f"say how they share a batch. Set sharding='context' or 'sequence' (`shard.sharding`)."
        )

    def join(self, numbers: IntArray, results: Sequence[Tensor]) -> Tensor:
        """The results end to end; raises if their entries differ."""
        first = results[0]
        kind = first.dtype, first.device, first.shape[1:]
        for number, result in zip(numbers.tolist(), results, strict=True):
            if (result.dtype, result.device, result.shape[1:]) != kind:
                raise InputError(
                    f"the result of {self.describe(number)} has {result.dtype} entries of shape "
                    f"{tuple(result.shape[1:])} on {result.device}, but the first result has "
                    f"{first.dtype} entries of shape {tuple(first.shape[1:])} on {first.device}. "
                    f"All results must have the same dtype, device and entry shape."
                )
        return torch.cat(list(results))

    def choose(self, results: Sequence[Any] | Mapping[Key, Any]) -> tuple[IntArray, list[Any]]:
        """The micro-batch numbers and results to restore from; empty micro-batches are skipped."""
        if isinstance(results, Mapping):
            numbers, values = [self._number(key) for key in results], list(results.values())
        else:
            numbers, values = list(range(len(self))), list(results)
            if len(values) != len(self):
                keyed = ", or a mapping from (step, rank, position) to some of them"
                raise InputError(
                    f"expected {len(self)} results, one for each micro-batch of {self._name}, got "
                    f"{len(values)}. Pass one for each, empty ones "
                    f"included{keyed if isinstance(self.work, Plan) else ''}."
                )
        if not values:
            raise InputError(
                "no results were given, so their dtype is unknown. Pass the result of at least "
                "one micro-batch, which may be empty."
            )
        counts = np.diff(self.segment_offsets)[numbers]
        kept = np.flatnonzero(counts).tolist() or [0]
        return np.array(numbers, np.int64)[kept], [values[at] for at in kept]

    def _number(self, key: Key) -> int:
        """The micro-batch with this key."""
        plan = self.work
        if not isinstance(plan, Plan):
            raise InputError(
                f"results of {self._name} were passed as a mapping, which requires a Plan. Pass a "
                f"sequence with one result for each micro-batch."
            )
        step, rank, position = key
        if 0 <= step < plan.num_steps and 0 <= rank < plan.num_ranks:
            first, end = plan.cell_offsets[step * plan.num_ranks + rank :][:2].tolist()
            if 0 <= position < end - first:
                return int(first + position)
        raise InputError(
            f"the key (step {step}, rank {rank}, position {position}) is not in the plan of "
            f"{plan.num_steps} steps on {plan.num_ranks} ranks. Position p is "
            f"plan[step, rank][p]."
        )

    @property
    def _name(self) -> str:
        if isinstance(self.work, Step):
            return f"step {self.work.number}"
        return "the plan" if isinstance(self.work, Plan) else "the rank"

    def describe(self, number: int) -> str:
        """'micro-batch 2 of step 0 on rank 1 (samples 4, 7, ...)'"""
        where = f"micro-batch {number}"
        if isinstance(self.work, Plan):
            plan = self.work
            cell = int(np.searchsorted(plan.cell_offsets, number, side="right")) - 1
            step, rank = divmod(cell, plan.num_ranks)
            where = f"micro-batch {number - plan.cell_offsets[cell]} of step {step} on rank {rank}"
        elif isinstance(self.work, Step):
            where += f" of {self._name}"
        first, end = self.segment_offsets[number : number + 2].tolist()
        names = [self.name_of(row) for row in self.segments.sample[first:end][:4]]
        names += ["..."] if end - first > 4 else []
        return f"{where} ({'samples ' + ', '.join(names) if names else 'empty'})"

    def name_of(self, row: int) -> str:
        """The sample of a row, as errors name it."""
        return sample_name(int(self.sample_ids[row]))


def _parents_of(segments: list[Segments]) -> IntArray | None:
    """The parents of the segments of several micro-batches, counted from the first of all."""
    if not any(each.shares_slots for each in segments):
        return None
    first = offsets_of(np.array([len(each) for each in segments]))[:-1]
    parents = [np.full(len(s), -1) if s.parent is None else s.parent for s in segments]
    return _join(np.where(p < 0, -1, p + at) for p, at in zip(parents, first, strict=True))


def _join(arrays: Iterable[IntArray]) -> IntArray:
    return np.concatenate([np.empty(0, np.int64), *arrays])
