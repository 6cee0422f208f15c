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

from evenstep.core.plan import MicroBatch, Plan, samples_of
from evenstep.core.ragged import IntArray, offsets_of, ranges_of, sample_name
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
    chosen = origin.choose(results)
    samples, lengths = [], []
    for key, micro, result in chosen:
        own = np.flatnonzero(micro.own)
        if not isinstance(result, Tensor) or result.shape[:1] != (len(own),):
            shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise InputError(
                f"{origin.describe(key, micro)} has {len(own)} segments, but its result is "
                f"{shape}. Return one entry per segment, ({len(own)}, ...)."
            )
        samples.append(micro.segments.sample[own])
        lengths.append(micro.segments.length[own])
    values = origin.join(chosen, [result for *_, result in chosen])
    sample, length = origin.rows_of(np.concatenate(samples)), np.concatenate(lengths)
    counts = np.bincount(sample, minlength=len(origin.lengths))
    if combine is None and counts.max(initial=0) > 1:
        split = int(counts.argmax())
        raise InputError(
            f"sample {origin.name_of(split)} was split into {counts[split]} segments with one "
            f"value each. Set combine to 'sum', 'mean', 'min' or 'max'."
        )
    entry = (-1, *(1,) * (values.ndim - 1))
    if combine == "mean":
        share = length / np.bincount(sample, length)[sample]
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


Chosen: TypeAlias = tuple[Key | int, MicroBatch, Any]
"""The key of a micro-batch of a plan or its number among others, the micro-batch, its result."""


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The micro-batches that results come from, and the samples that are restored.

    Row i of the restored tensor is sample `sample_ids[i]`: all samples of a plan, or those of one
    rank.
    """

    work: Work
    plan: Plan | None  # of the work, if known
    micros: Sequence[MicroBatch]  # empty for a plan, which makes those that it is asked for
    sample_ids: IntArray  # ascending
    lengths: IntArray  # of whole samples

    @classmethod
    def of(cls, work: Work) -> Origin:
        """The origin of the results of a plan, a step or micro-batches."""
        if isinstance(work, Plan):
            return cls(work, work, (), np.arange(len(work.lengths)), work.lengths)
        items: Sequence[Any] = work.read_micro_batches if isinstance(work, Step) else work
        micros = [item.micro if isinstance(item, FedMicroBatch) else item for item in items]
        for item in micros:
            if not isinstance(item, MicroBatch):
                raise InputError(
                    f"expected a Plan, a Step or a sequence of micro-batches, got a sequence with "
                    f"a {type(item).__name__}."
                )
        ids = samples_of(micros)
        lengths = np.zeros(len(ids), np.int64)
        for micro in micros:
            lengths[np.searchsorted(ids, micro.segments.sample)] = micro.sample_lengths
        return cls(work, work.plan if isinstance(work, Step) else None, micros, ids, lengths)

    def rows_of(self, samples: IntArray) -> IntArray:
        """The row of each of these samples."""
        return np.searchsorted(self.sample_ids, samples)

    def scatter(
        self, results: Results, firsts: IntArray, total: int, pad: float, shifted: bool,
        sharding: Sharding | None,
    ) -> Tensor:  # fmt: skip
        """Copy the result of token j of sample i to entry `firsts[i] + j` of `total`."""
        if sharding is not None:
            one_of("sharding", sharding, Sharding)
        chosen = self.choose(results)
        whole = [self._whole(*each, sharding).flatten(0, 1) for each in chosen]
        values = self.join(chosen, whole)
        columns = [entries_of(micro) for _, micro, _ in chosen]
        slot, sample, start, length, end = np.concatenate(columns, axis=1)
        before = offsets_of(np.array([len(each) for each in whole]))[:-1]
        source = slot + np.repeat(before, [column.shape[1] for column in columns])
        target = firsts[self.rows_of(sample)] + start
        flat = values.new_full((total, *values.shape[1:]), pad)
        if shifted:
            # log-probs [of b, of c, none] of tokens [a, b, c] -> [0, of b, of c]
            flat.index_fill_(0, torch.from_numpy(target).to(values.device), 0)
            target, length = target + 1, length - 1 + (start + length < end)
        read, written = (
            torch.from_numpy(ranges_of(first, length)).to(values.device)
            for first in (source, target)
        )
        return flat.index_copy_(0, written, values.index_select(0, read))

    def _whole(
        self, key: Key | int, micro: MicroBatch, result: Result, sharding: Sharding | None
    ) -> Tensor:
        """Result of one micro-batch, (rows, width, ...), joined over ranks."""
        rows, width = shape = micro.rows, micro.width
        if isinstance(result, Tensor):
            if result.shape[:2] != shape:
                raise InputError(
                    f"{self.describe(key, micro)} has shape {shape}, but its result has shape "
                    f"{tuple(result.shape)}. Return (rows, width, ...), padding included."
                )
            return result
        size = max(len(result), 1)
        share = (rows, width // size)
        if not len(result) or width % size or any(each.shape[:2] != share for each in result):
            raise InputError(
                f"{self.describe(key, micro)} has shape {shape}, but its results per rank have "
                f"shapes {[tuple(each.shape) for each in result]}. Pass {share} from each context- "
                f"or sequence-parallel rank."
            )
        if size == 1:
            return result[0]
        sharding = sharding or self._planned_sharding(size)
        if sharding is None:
            raise InputError(
                f"the results of {self.describe(key, micro)} come from {size} ranks, and its plan "
                f"does not say how they share a batch. Set sharding='context' or 'sequence' "
                f"(`shard.sharding`)."
            )
        if sharding == "sequence":
            return join_sequence(result)
        return join_context(result, torch.from_numpy(micro.placement.offsets))

    def _planned_sharding(self, size: int) -> Sharding | None:
        """How the topology of the plan shards a batch over `size` ranks, if it says so."""
        planned: dict[Sharding, int] = {}
        if self.plan is not None:
            topology = self.plan.recipe.topology
            sequence = topology.tp if topology.sequence_parallel else 1
            planned = {"context": topology.cp, "sequence": sequence}
        possible: list[Sharding] = [name for name, ranks in planned.items() if ranks == size]
        return possible[0] if len(possible) == 1 else None

    def join(self, chosen: Sequence[Chosen], results: Sequence[Tensor]) -> Tensor:
        """The results end to end; raises if their entries differ."""
        first = results[0]
        kind = first.dtype, first.device, first.shape[1:]
        for (key, micro, _), result in zip(chosen, results, strict=True):
            if (result.dtype, result.device, result.shape[1:]) != kind:
                raise InputError(
                    f"the result of {self.describe(key, micro)} has {result.dtype} entries of "
                    f"shape {tuple(result.shape[1:])} on {result.device}, but the first result has "
                    f"{first.dtype} entries of shape {tuple(first.shape[1:])} on {first.device}. "
                    f"All results must have the same dtype, device and entry shape."
                )
        return torch.cat(list(results))

    def choose(self, results: Sequence[Any] | Mapping[Key, Any]) -> list[Chosen]:
        """The micro-batches to restore from and their results; empty ones are skipped."""
        if isinstance(results, Mapping):
            micros, values = self._of_keys(results), list(results.values())
        else:
            micros, values = self._every(), list(results)
            if len(values) != len(micros):
                keyed = ", or a mapping from (step, rank, position) to some of them"
                raise InputError(
                    f"expected {len(micros)} results, one for each micro-batch of {self._name}, "
                    f"got {len(values)}. Pass one for each, empty ones "
                    f"included{keyed if isinstance(self.work, Plan) else ''}."
                )
        if not values:
            raise InputError(
                "no results were given, so their dtype is unknown. Pass the result of at least "
                "one micro-batch, which may be empty."
            )
        chosen = [(key, micro, each) for (key, micro), each in zip(micros, values, strict=True)]
        return [each for each in chosen if not each[1].is_empty] or chosen[:1]

    def _every(self) -> list[tuple[Key | int, MicroBatch]]:
        """All micro-batches with their keys or numbers, in order."""
        if not isinstance(self.work, Plan):
            return list(enumerate(self.micros))
        return [
            ((step, rank, position), micro)
            for step, cells in enumerate(self.work)
            for rank, cell in enumerate(cells)
            for position, micro in enumerate(cell)
        ]

    def _of_keys(self, keys: Iterable[Key]) -> list[tuple[Key | int, MicroBatch]]:
        """The micro-batches of a plan with these keys."""
        plan = self.work
        if not isinstance(plan, Plan):
            raise InputError(
                f"results of {self._name} were passed as a mapping, which requires a Plan. Pass a "
                f"sequence with one result for each micro-batch."
            )
        cells: dict[tuple[int, int], list[MicroBatch]] = {}
        for step, rank, position in keys:
            if 0 <= step < plan.num_steps and 0 <= rank < plan.num_ranks:
                cells[step, rank] = cells.get((step, rank)) or plan[step, rank]
            if not 0 <= position < len(cells.get((step, rank), ())):
                raise InputError(
                    f"the key (step {step}, rank {rank}, position {position}) is not in the plan "
                    f"of {plan.num_steps} steps on {plan.num_ranks} ranks. Position p is "
                    f"plan[step, rank][p]."
                )
        return [
            ((step, rank, position), cells[step, rank][position]) for step, rank, position in keys
        ]

    @property
    def _name(self) -> str:
        if isinstance(self.work, Step):
            return f"step {self.work.number}"
        return "the plan" if isinstance(self.work, Plan) else "the rank"

    def describe(self, key: Key | int, micro: MicroBatch) -> str:
        """'micro-batch 2 of step 0 on rank 1 (samples 4, 7, ...)'"""
        if isinstance(key, tuple):
            where = "micro-batch {2} of step {0} on rank {1}".format(*key)
        else:
            where = f"micro-batch {key}"
            where += f" of {self._name}" if isinstance(self.work, Step) else ""
        samples = micro.segments.sample.tolist()
        names = [sample_name(sample) for sample in samples[:4]] + ["..."] * (len(samples) > 4)
        return f"{where} ({'samples ' + ', '.join(names) if names else 'empty'})"

    def name_of(self, row: int) -> str:
        """The sample of a row, as errors name it."""
        return sample_name(int(self.sample_ids[row]))


def entries_of(micro: MicroBatch) -> IntArray:
    """(5, segments): the slot, sample, start and length of each segment, and the end of its sample.

    A segment that samples share appears once for each of them.
    """
    segments, placement = micro.segments, micro.placement
    slot = placement.offsets[:-1][placement.segment >= 0]
    here = owner = np.arange(len(segments))
    if segments.parent is not None and segments.shares_slots:
        owner, here = paths_of(np.maximum(segments.parent, -1))
        own = micro.own[owner]
        owner, here = owner[own], here[own]
    sample, end = segments.sample[owner], micro.sample_ends[owner]
    return np.stack((slot[here], sample, segments.start[here], segments.length[here], end))
