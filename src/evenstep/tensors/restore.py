"""Restore: results of micro-batches -> the caller's samples, in the caller's order.

The plan alone says where every token went, so results may come from any layout, from some or all
ranks, and from context-parallel ranks as the parts that they are. Dummies vanish, split samples
are whole again, and what never ran (dropped, truncated, another rank's) is the pad value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from evenstep.core.placement import place
from evenstep.core.plan import Plan
from evenstep.core.ragged import IntArray, offsets_of
from evenstep.errors import InputError
from evenstep.tensors.context import join_context
from evenstep.tensors.extras import RaggedTensor
from evenstep.tensors.metrics import Reduction

Key: TypeAlias = tuple[int, int, int]
"""(step, rank, position): `plan[step, rank][position]`."""
Result: TypeAlias = Tensor | Sequence[Tensor]
"""One micro-batch's, or one part of it per context-parallel rank."""
Results: TypeAlias = Sequence[Result] | Mapping[Key, Result]
"""Of all micro-batches in execution order (steps, then ranks, then positions), or of some."""


def restore_tokens(
    plan: Plan,
    results: Results,
    *,
    width: int | None = None,
    pad: float = 0.0,
    shifted: bool = False,
) -> Tensor:
    """Per-token results, (rows, width, ...) each -> (samples, width, ...) in sample order.

    `width` is that of the caller's padded input, the longest sample by default. `shifted` says
    that results were computed from `labels` and sit one slot early, as log-probs do: then position
    i holds token i's value, and the first token of a sample, which nothing predicts, holds 0. The
    first token of a later piece of a split sample was predicted by the piece before it, and holds
    0 if that is not among the results.

    >>> from evenstep import Packed, Recipe, make_plan
    >>> plan = make_plan([1, 3, 2], Recipe(layout=Packed(max_tokens=4)))
    >>> [micro.segments.sample.tolist() for micro in plan[0, 0]]
    [[0, 1], [2]]
    >>> restore_tokens(plan, [torch.tensor([[10, 20, 21, 22]]), torch.tensor([[30, 31]])]).tolist()
    [[10, 0, 0], [20, 21, 22], [30, 31, 0]]
    """
    found = _Found.of(plan, results)
    longest = int(plan.lengths.max(initial=0))
    width = longest if width is None else width
    if width < longest:
        sample = int(plan.lengths.argmax())
        raise InputError(
            f"sample {sample} has {longest} tokens but the width to restore to is {width}, so it "
            f"would lose some. Pass the width of the padded input, {longest} or more."
        )
    firsts = np.arange(len(plan.lengths)) * width
    flat = _scatter(found, firsts, len(plan.lengths) * width, pad, shifted)
    return flat.view(len(plan.lengths), width, *flat.shape[1:])


def restore_ragged(
    plan: Plan, results: Results, *, pad: float = 0.0, shifted: bool = False
) -> RaggedTensor:
    """As `restore_tokens`, without padding: sample i is `values[offsets[i]:offsets[i + 1]]`."""
    offsets = offsets_of(plan.lengths)
    values = _scatter(_Found.of(plan, results), offsets[:-1], int(offsets[-1]), pad, shifted)
    return RaggedTensor(values, torch.from_numpy(offsets).to(values.device))


def restore_sequences(
    plan: Plan,
    results: Mapping[Key, Tensor] | Sequence[Tensor],
    *,
    pad: float = 0.0,
    combine: Reduction | None = None,
) -> Tensor:
    """Per-sequence results, one entry per segment of a micro-batch -> (samples, ...) in order.

    A split sample has several entries, and `combine` says what becomes of them; a mean weighs
    each by its tokens. Without it, a split sample is an error.
    """
    chosen, given = _choose(plan, results)
    offsets = plan.segment_offsets
    for number, result in zip(chosen.tolist(), given, strict=True):
        expected = int(offsets[number + 1] - offsets[number])
        if not isinstance(result, Tensor) or result.shape[:1] != (expected,):
            found = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise InputError(
                f"{_describe(plan, number)} has {expected} segments but its result is {found}, so "
                f"values cannot be matched. Return one entry per real segment, ({expected}, ...)."
            )
    values = _join(plan, chosen, [result for result in given if isinstance(result, Tensor)])
    at = _runs(offsets[chosen], np.diff(offsets)[chosen])  # the segment of each value
    sample = plan.segments.sample[at]
    _check_split(plan, sample, combine)
    index = torch.from_numpy(sample).to(values.device)
    if combine == "mean" and not values.is_floating_point():
        values = values.float()
    restored = values.new_full((len(plan.lengths), *values.shape[1:]), pad)
    if combine is None:
        return restored.index_copy_(0, index, values)
    if combine == "sum":
        return restored.index_fill_(0, index, 0).index_add_(0, index, values)
    if combine == "mean":
        share = plan.segments.length[at] / np.bincount(sample, plan.segments.length[at])[sample]
        weight = torch.from_numpy(share).to(values).view(-1, *(1,) * (values.ndim - 1))
        return restored.index_fill_(0, index, 0).index_add_(0, index, values * weight)
    across = index.view(-1, *(1,) * (values.ndim - 1)).expand_as(values)
    return restored.scatter_reduce(0, across, values, f"a{combine}", include_self=False)


# Where things are ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Slots of the chosen micro-batches end to end, and the segments that lie in them."""

    values: Tensor  # (slots, ...)
    first: IntArray  # per segment, its first slot in `values`
    sample: IntArray
    start: IntArray
    length: IntArray
    continues: IntArray  # 1 where the sample was cut after this segment

    @classmethod
    def of(cls, plan: Plan, results: Results) -> _Found:
        chosen, given = _choose(plan, results)
        rows = plan.rows[chosen].tolist()
        checked = [
            _whole(plan, number, height, result)
            for number, height, result in zip(chosen.tolist(), rows, given, strict=True)
        ]
        values = _join(plan, chosen, [result.flatten(0, 1) for result in checked])
        base = np.full(plan.micro_batches, -1)
        base[chosen] = offsets_of(plan.slots[chosen])[:-1]
        row = np.repeat(np.arange(len(plan.row_offsets) - 1), np.diff(plan.row_offsets))
        micro = plan.micro_batch_of_segment
        end = offsets_of(plan.aligned_lengths)  # of segments laid end to end, over all rows
        inside = end[:-1] - end[plan.row_offsets[row]]
        first = base[micro] + (row - plan.micro_offsets[micro]) * plan.widths[micro] + inside
        kept = base[micro] >= 0
        part = plan.segments.take(kept.nonzero()[0])
        continues = (part.start + part.length < plan.ends(part.sample)).astype(np.int64)
        return cls(values, first[kept], part.sample, part.start, part.length, continues)


def _scatter(found: _Found, firsts: IntArray, total: int, pad: float, shifted: bool) -> Tensor:
    """Token j of sample i to entry `firsts[i] + j` of `total`; one copy out, one copy in."""
    values, device = found.values, found.values.device
    begin = firsts[found.sample] + found.start
    flat = values.new_full((total, *values.shape[1:]), pad)
    length = found.length
    if shifted:
        # log-probs [of b, of c, none] of tokens [a, b, c] -> [0, of b, of c]
        flat.index_fill_(0, torch.from_numpy(begin).to(device), 0)
        length, begin = length - 1 + found.continues, begin + 1
    source = torch.from_numpy(_runs(found.first, length)).to(device)
    target = torch.from_numpy(_runs(begin, length)).to(device)
    return flat.index_copy_(0, target, values.index_select(0, source))


def _runs(first: IntArray, length: IntArray) -> IntArray:
    """Counting up from each first: firsts [5, 0] with lengths [3, 2] -> [5, 6, 7, 0, 1]."""
    offsets = offsets_of(length)
    return np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], length)


# What was given --------------------------------------------------------------------------------


def _choose(plan: Plan, results: Results) -> tuple[IntArray, list[Result]]:
    """The numbers of the micro-batches that have results, and these; real ones if there are any."""
    if isinstance(results, Mapping):
        chosen = [_number(plan, key) for key in results]
        given = list(results.values())
    else:
        chosen, given = list(range(plan.micro_batches)), list(results)
        if len(given) != plan.micro_batches:
            raise InputError(
                f"{len(given)} results were given but the plan runs {plan.micro_batches} "
                f"micro-batches, so they cannot be matched. Pass one for each, dummies included, "
                f"or a mapping from (step, rank, position) to some of them."
            )
    if not given:
        raise InputError(
            "no results were given, so their type is unknown and nothing can be restored. "
            "Pass those of at least one micro-batch; a dummy's will do."
        )
    held = np.diff(plan.segment_offsets)[chosen]
    kept = [at for at, count in enumerate(held) if count] or [0]  # dummies vanish
    return np.array(chosen, np.int64)[kept], [given[at] for at in kept]


def _number(plan: Plan, key: Key) -> int:
    step, rank, position = key
    if 0 <= step < plan.steps and 0 <= rank < plan.ranks:
        first, end = plan.cell_offsets[step * plan.ranks + rank :][:2].tolist()
        if 0 <= position < end - first:
            return int(first + position)
    raise InputError(
        f"a result is named (step {step}, rank {rank}, position {position}), which the plan of "
        f"{plan.steps} steps on {plan.ranks} ranks does not run. Name it as plan[step, rank] does."
    )


def _whole(plan: Plan, number: int, rows: int, result: Result) -> Tensor:
    """One micro-batch's result, (rows, width, ...), its parts joined."""
    expected = (rows, int(plan.widths[number]))
    if not isinstance(result, Tensor):
        found = [tuple(part.shape) for part in result]
        share = (expected[0], expected[1] // max(len(found), 1))
        if any(shape[:2] != share for shape in found) or expected[1] % max(len(found), 1):
            raise InputError(
                f"{_describe(plan, number)} is {expected} but the parts of its result are {found}, "
                f"so tokens cannot be matched. Pass each context-parallel rank's {share} part."
            )
        return join_context(result, _boundaries(plan, number))
    if tuple(result.shape[:2]) != expected:
        raise InputError(
            f"{_describe(plan, number)} is {expected} but its result is {tuple(result.shape)}, so "
            f"tokens cannot be matched. Return (rows, width, ...), padding included."
        )
    return result


def _boundaries(plan: Plan, number: int) -> Tensor:
    """cu_seqlens of a micro-batch, as its Batch has them."""
    first, end = plan.micro_offsets[number : number + 2].tolist()
    rows = plan.row_offsets[first : end + 1]
    lengths = plan.segments.length[rows[0] : rows[-1]]
    width, alignment = int(plan.widths[number]), plan.recipe.topology.alignment
    return torch.from_numpy(place(lengths, rows - rows[0], width, alignment).offsets)


def _join(plan: Plan, chosen: IntArray, given: Sequence[Tensor]) -> Tensor:
    first = given[0]
    for number, result in zip(chosen.tolist(), given, strict=True):
        if (result.dtype, result.device, result.shape[1:]) != (
            first.dtype,
            first.device,
            first.shape[1:],
        ):
            raise InputError(
                f"the result of {_describe(plan, number)} has entries of {result.dtype} "
                f"{tuple(result.shape[1:])} on {result.device}, the first one's are {first.dtype} "
                f"{tuple(first.shape[1:])} on {first.device}; one tensor cannot hold both. Make "
                f"them alike."
            )
    return torch.cat(list(given))


def _check_split(plan: Plan, sample: IntArray, combine: Reduction | None) -> None:
    counts = np.bincount(sample, minlength=len(plan.lengths))
    if combine is None and counts.max(initial=0) > 1:
        at = int(counts.argmax())
        raise InputError(
            f"sample {at} was split into {counts[at]} segments, so it has as many values and no "
            f"single one. Say how they combine: sum, mean, min or max."
        )


def _describe(plan: Plan, number: int) -> str:
    """'micro-batch 2 of step 0 on rank 1 (samples 4, 7, ...)'"""
    cell = int(np.searchsorted(plan.cell_offsets, number, side="right")) - 1
    samples = plan.segments.sample[slice(*plan.segment_offsets[number : number + 2].tolist())]
    named = ", ".join(map(str, samples[:4])) + (", ..." if len(samples) > 4 else "")
    return (
        f"micro-batch {number - plan.cell_offsets[cell]} of step {cell // plan.ranks} on rank "
        f"{cell % plan.ranks} ({f'samples {named}' if named else 'a dummy'})"
    )
