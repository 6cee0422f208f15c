"""Restore: results of micro-batches -> results in sample order.

    work                            results                        rows of the restored tensor
    `Plan`                          all ranks', or some by key     all samples, by number
    `Step`                          this rank's                    `step.own_sample_ids`
    `MicroBatch`, `FedMicroBatch`s  one for each                   their samples, ascending by id

Works for any stream and layout, and for a step resumed in the middle. Where samples could not be
read, pass the micro-batches that were read. A result may be one tensor, or one tensor per
context- or sequence-parallel rank. Results of empty micro-batches are ignored. Split samples are
joined; tokens that did not run here (dropped, truncated, or on another rank) get the pad value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from evenstep.core.plan import place
from evenstep.core.ragged import IntArray, offsets_of, ranges_of
from evenstep.core.text import one_of
from evenstep.errors import InputError
from evenstep.tensors.batch_shard import Sharding
from evenstep.tensors.context_parallel import join_context
from evenstep.tensors.extras import RaggedTensor
from evenstep.tensors.metrics import Reduction
from evenstep.tensors.origin import Key, Origin, Work
from evenstep.tensors.sequence_parallel import join_sequence

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
    found = _Found.of(origin, results, sharding)
    longest = int(origin.lengths.max(initial=0))
    width = longest if width is None else width
    if width < longest:
        sample = int(origin.lengths.argmax())
        raise InputError(
            f"sample {origin.name_of(sample)} has {longest} tokens, more than width={width}. Set "
            f"width to {longest} or more."
        )
    count = len(origin.lengths)
    flat = _scatter(found, np.arange(count) * width, count * width, pad, shifted)
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
    found = _Found.of(origin, results, sharding)
    values = _scatter(found, offsets[:-1], int(offsets[-1]), pad, shifted)
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
    chosen, given = origin.choose(results)
    offsets, segments = origin.segment_offsets, origin.segments
    for number, result in zip(chosen.tolist(), given, strict=True):
        expected = int(offsets[number + 1] - offsets[number])
        if not isinstance(result, Tensor) or result.shape[:1] != (expected,):
            found = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise InputError(
                f"{origin.describe(number)} has {expected} segments, but its result is {found}. "
                f"Return one entry per segment, ({expected}, ...)."
            )
    values = _join(origin, chosen, given)
    at = ranges_of(offsets[chosen], np.diff(offsets)[chosen])  # the segment of each value
    sample = segments.sample[at]
    _check_split(origin, sample, combine)
    index = torch.from_numpy(sample).to(values.device)
    if combine == "mean" and not values.is_floating_point():
        values = values.float()
    restored = values.new_full((len(origin.lengths), *values.shape[1:]), pad)
    if combine is None:
        return restored.index_copy_(0, index, values)
    if combine == "sum":
        return restored.index_fill_(0, index, 0).index_add_(0, index, values)
    if combine == "mean":
        share = segments.length[at] / np.bincount(sample, segments.length[at])[sample]
        weight = torch.from_numpy(share).to(values).view(-1, *(1,) * (values.ndim - 1))
        return restored.index_fill_(0, index, 0).index_add_(0, index, values * weight)
    across = index.view(-1, *(1,) * (values.ndim - 1)).expand_as(values)
    return restored.scatter_reduce(0, across, values, f"a{combine}", include_self=False)


# Locating tokens ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Concatenated slots of the chosen micro-batches, and the segments in them."""

    values: Tensor  # (slots, ...)
    first: IntArray  # per segment, its first slot in `values`
    sample: IntArray
    start: IntArray
    length: IntArray
    continues: IntArray  # 1 where the sample was split after this segment

    @classmethod
    def of(cls, origin: Origin, results: Results, sharding: Sharding | None) -> _Found:
        if sharding is not None:
            one_of("sharding", sharding, Sharding)
        chosen, given = origin.choose(results)
        rows = origin.rows[chosen]
        checked = [
            _whole(origin, number, height, result, sharding)
            for number, height, result in zip(chosen.tolist(), rows.tolist(), given, strict=True)
        ]
        values = _join(origin, chosen, [result.flatten(0, 1) for result in checked])
        base = np.full(len(origin), -1)
        base[chosen] = offsets_of(rows * origin.widths[chosen])[:-1]
        micro = origin.micro_batch_of_segment
        kept = base[micro] >= 0
        segments = origin.segments.take(kept.nonzero()[0])
        continues = (segments.start + segments.length < origin.ends[kept]).astype(np.int64)
        first = (base[micro] + origin.first_slots)[kept]
        return cls(values, first, segments.sample, segments.start, segments.length, continues)


def _scatter(found: _Found, firsts: IntArray, total: int, pad: float, shifted: bool) -> Tensor:
    """Copy token j of sample i to entry `firsts[i] + j` of `total`."""
    values, device = found.values, found.values.device
    begin = firsts[found.sample] + found.start
    flat = values.new_full((total, *values.shape[1:]), pad)
    length = found.length
    if shifted:
        # log-probs [of b, of c, none] of tokens [a, b, c] -> [0, of b, of c]
        flat.index_fill_(0, torch.from_numpy(begin).to(device), 0)
        length, begin = length - 1 + found.continues, begin + 1
    source = torch.from_numpy(ranges_of(found.first, length)).to(device)
    target = torch.from_numpy(ranges_of(begin, length)).to(device)
    return flat.index_copy_(0, target, values.index_select(0, source))


# Checking results --------------------------------------------------------------------------------


def _whole(
    origin: Origin, number: int, rows: int, result: Result, sharding: Sharding | None
) -> Tensor:
    """Result of one micro-batch, (rows, width, ...), joined over ranks."""
    expected = (rows, int(origin.widths[number]))
    if not isinstance(result, Tensor):
        found, size = [tuple(shard.shape) for shard in result], max(len(result), 1)
        share = (expected[0], expected[1] // size)
        if not found or any(shape[:2] != share for shape in found) or expected[1] % size:
            raise InputError(
                f"{origin.describe(number)} has shape {expected}, but its results per rank have "
                f"shapes {found}. Pass {share} from each context- or sequence-parallel rank."
            )
        if size == 1:
            return result[0]
        if (sharding or _planned_sharding(origin, number, size)) == "sequence":
            return join_sequence(result)
        return join_context(result, _boundaries(origin, number))
    if tuple(result.shape[:2]) != expected:
        raise InputError(
            f"{origin.describe(number)} has shape {expected}, but its result has shape "
            f"{tuple(result.shape)}. Return (rows, width, ...), padding included."
        )
    return result


def _planned_sharding(origin: Origin, number: int, size: int) -> Sharding:
    """How the topology of the plan shards a batch over `size` ranks."""
    planned: dict[Sharding, int] = {}
    if origin.topology is not None:
        sequence = origin.topology.tp if origin.topology.sequence_parallel else 1
        planned = {"context": origin.topology.cp, "sequence": sequence}
    possible: list[Sharding] = [name for name, ranks in planned.items() if ranks == size]
    if len(possible) == 1:
        return possible[0]
    raise InputError(
        f"the results of {origin.describe(number)} come from {size} ranks, and its plan does not "
        f"say how they share a batch. Set sharding='context' or 'sequence' (`shard.sharding`)."
    )


def _boundaries(origin: Origin, number: int) -> Tensor:
    """`Batch.cu_seqlens` of a micro-batch."""
    first, end = origin.micro_offsets[number : number + 2].tolist()
    rows = origin.row_offsets[first : end + 1]
    lengths = origin.segments.length[rows[0] : rows[-1]]
    width, alignment = int(origin.widths[number]), int(origin.alignments[number])
    return torch.from_numpy(place(lengths, rows - rows[0], width, alignment).offsets)


def _join(origin: Origin, chosen: IntArray, given: Sequence[Tensor]) -> Tensor:
    first = given[0]
    for number, result in zip(chosen.tolist(), given, strict=True):
        if (result.dtype, result.device, result.shape[1:]) != (
            first.dtype,
            first.device,
            first.shape[1:],
        ):
            raise InputError(
                f"the result of {origin.describe(number)} has {result.dtype} entries of shape "
                f"{tuple(result.shape[1:])} on {result.device}, but the first result has "
                f"{first.dtype} entries of shape {tuple(first.shape[1:])} on {first.device}. All "
                f"results must have the same dtype, device and entry shape."
            )
    return torch.cat(list(given))


def _check_split(origin: Origin, sample: IntArray, combine: Reduction | None) -> None:
    counts = np.bincount(sample, minlength=len(origin.lengths))
    if combine is None and counts.max(initial=0) > 1:
        at = int(counts.argmax())
        raise InputError(
            f"sample {origin.name_of(at)} was split into {counts[at]} segments with one value "
            f"each. Set combine to 'sum', 'mean', 'min' or 'max'."
        )
