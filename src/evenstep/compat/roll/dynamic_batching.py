"""The dynamic batching of ROLL, planned by `make_plan` with `Padded(cut="greedy")`.

Arguments, order, cuts, `meta_info` and metrics are as documented there. Unlike there, a batch need
not be divisible by the number of ranks, micro-batches are split as often as a pipeline needs and
are as narrow as their rows allow, and inputs that would be cut off (padding on the left) are an
error.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from evenstep.compat.roll.data_proto import BatchError, DataProto
from evenstep.core.layout import Padded
from evenstep.core.ragged import IntArray, rounded_up
from evenstep.core.recipe import Recipe, Topology
from evenstep.core.text import whole_number
from evenstep.errors import ConfigError, PlanError
from evenstep.planning.planner import make_plan
from evenstep.planning.policies import divide_cuts
from evenstep.train.rollouts import Spans


class _Cut(NamedTuple):
    """Rows `start` up to `end` of a rank, as one micro-batch of this width."""

    start: int
    end: int
    width: int


def dynamic_batching_shard(
    origin_batch: DataProto,
    dp_size: int,
    max_tokens_per_microbatch: int,
    sequence_length_round: int,
    pipeline_model_parallel_size: int | None = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    log_prefix: str | None = None,
) -> tuple[Any, dict[str, float]]:
    """Sort rows by length, deal them to ranks in turn, and cut all ranks at the same rows.

    Returns the rows of rank 0, then those of rank 1 and so on, with the micro-batches of a rank in
    `meta_info`, and metrics under `dynamic_batching/<log_prefix>/`. The input is not changed. If
    ranks do not divide the rows, the first ones have one row more; in the last micro-batch, other
    ranks may then have no row.

        batch, metrics = dynamic_batching_shard(rollouts, 8, 8192, 128, log_prefix="actor_train")
    """
    mask = origin_batch.batch["attention_mask"]
    spans = Spans.of_mask(mask.reshape(len(mask), mask.shape[-1]), "right")
    by_length = np.argsort(spans.lengths, kind="stable")
    layout = Padded(
        max_tokens=max_tokens_per_microbatch, round_to=sequence_length_round, cut="greedy"
    )
    pp, vpp = pipeline_model_parallel_size or 1, virtual_pipeline_model_parallel_size
    topology = Topology(
        dp=dp_size, pp=pp, vpp=2 if pp > 1 and vpp else 1, variable_seq_lengths=pp > 1
    )
    recipe = Recipe(layout=layout, topology=topology)
    try:
        plan = make_plan(spans.run_lengths[by_length], recipe, names=by_length)
    except PlanError as error:
        raise BatchError(str(error)) from None
    held = np.diff(plan.segment_offsets)
    cuts = _cuts_of(held, plan.widths, int(plan.cell_offsets[min(1, plan.num_steps)]), pp)
    widest = max((cut.width for cut in cuts), default=0)
    if widest > spans.width:
        raise BatchError(
            f"a micro-batch would be {widest} wide, a multiple of sequence_length_round="
            f"{sequence_length_round}, but rows have {spans.width} columns. Pad rows to a multiple "
            f"of {sequence_length_round}."
        )
    batch = origin_batch.slice()
    batch.reorder(torch.from_numpy(by_length[plan.segments.sample]))
    indices, lengths = _listed(cuts)
    batch.meta_info = {
        **origin_batch.meta_info,
        "global_micro_batch_indices": indices,
        "global_micro_batch_lengths": lengths,
        **_about(cuts, 0),
    }
    slots = int((held * plan.widths).sum())
    return batch, _metrics(spans, slots, log_prefix)


def make_mini_batch_iter_for_dynamic_batching(
    data: DataProto,
    epochs: int,
    ga_steps: int = 1,
    keep_mini_batch: bool = False,
    mini_batch_size: int | None = None,
    pipeline_model_parallel_size: int | None = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
) -> Iterator[Any]:
    """The mini-batches of one rank: `ga_steps` micro-batches each, in the same order every epoch.

    With `keep_mini_batch`, a mini-batch has `mini_batch_size` rows whatever the budget, and
    micro-batches that cross a boundary are divided there. Every mini-batch has a `meta_info` of its
    own; that of `data` describes the current one.

        for mini_batch in make_mini_batch_iter_for_dynamic_batching(batch, epochs=1, ga_steps=4):
            for micro_batch in make_micro_batch_iter_for_dynamic_batching(mini_batch):
                ...
    """
    cuts, steps = _held_cuts(data), whole_number("ga_steps", ga_steps)
    groups = [cuts[at : at + steps] for at in range(0, len(cuts), steps)]
    if keep_mini_batch:
        pp = pipeline_model_parallel_size or 1
        multiple = pp if virtual_pipeline_model_parallel_size else 1
        groups = _fixed_groups(cuts, len(data), mini_batch_size, multiple)
    for _ in range(whole_number("epochs", epochs, least=0)):
        for group in groups:
            mini_batch = data.slice(group[0].start, group[-1].end)
            about = {**_about(group, group[0].start), "mini_batch_size": len(mini_batch)}
            data.meta_info.update(about)
            mini_batch.meta_info = {**data.meta_info, **_about(group, group[0].start)}
            yield mini_batch


def make_micro_batch_iter_for_dynamic_batching(mini_batch: DataProto) -> Iterator[Any]:
    """The micro-batches of a mini-batch, with token-aligned tensors cut to their width.

    Token-aligned are `position_ids` and tensors with as many dimensions as `input_ids` whose last
    one has its size, or one less.

        for micro_batch in make_micro_batch_iter_for_dynamic_batching(mini_batch):
            loss = model(micro_batch.batch["input_ids"])
    """
    about, ids = mini_batch.meta_info, mini_batch.batch["input_ids"]
    whole = ids.shape[-1]
    ranges = zip(about["micro_batch_indices"], about["micro_batch_lengths"], strict=True)
    for (start, end), width in ranges:
        micro_batch = mini_batch.slice(start, end)
        for name in list(mini_batch.batch.keys()):
            value = micro_batch.batch[name]
            short = whole - value.shape[-1] if value.ndim else -1
            if short in (0, 1) and (value.ndim == ids.ndim or name == "position_ids"):
                micro_batch.batch[name] = value.narrow(-1, 0, width - short)
        yield micro_batch


# Cuts --------------------------------------------------------------------------------------------


def _cuts_of(held: IntArray, widths: IntArray, count: int, pp: int) -> list[_Cut]:
    """The micro-batches of the first rank, which has the most rows."""
    if not held[:count].all():
        raise BatchError(
            f"a rank has {int(held[:count].sum())} rows, which cannot be split into a multiple of "
            f"pipeline_model_parallel_size={pp} micro-batches. Pass more rows, or use fewer ranks."
        )
    ends = np.cumsum(held[:count]).tolist()
    return [
        _Cut(start, end, width)
        for (start, end), width in zip(pairwise([0, *ends]), widths[:count].tolist(), strict=True)
    ]


def _held_cuts(data: DataProto) -> list[_Cut]:
    """The micro-batches of this rank, which may have one row less than the first."""
    indices = data.meta_info["global_micro_batch_indices"]
    lengths = data.meta_info["global_micro_batch_lengths"]
    rows, end = len(data), 0
    for start, following in indices:
        if start != end or following <= start:
            raise BatchError(
                f"the micro-batches {indices} are not contiguous. Pass the batch that "
                f"dynamic_batching_shard returned, or the rows of one rank."
            )
        end = following
    if end - rows not in (0, 1):
        raise BatchError(
            f"the micro-batches have {end} rows, but the batch has {rows}; they must cover the "
            f"complete local batch. Pass the rows of one rank."
        )
    return [
        _Cut(min(start, rows), min(end, rows), width)
        for (start, end), width in zip(indices, lengths, strict=True)
    ]


def _fixed_groups(cuts: list[_Cut], rows: int, size: int | None, multiple: int) -> list[list[_Cut]]:
    """The micro-batches of every `size` rows; each group has a multiple of `multiple`."""
    if size is None or size < 1 or rows % size:
        raise ConfigError(
            f"keep_mini_batch needs a mini_batch_size that divides the {rows} rows, got {size}."
        )
    widths = np.repeat([cut.width for cut in cuts], [cut.end - cut.start for cut in cuts])
    ends = np.union1d([cut.end for cut in cuts], np.arange(size, rows + 1, size)).astype(np.int64)
    groups = []
    for first in range(0, rows, size):
        inside = ends[(ends > first) & (ends <= first + size)] - first
        wanted = rounded_up(len(inside), multiple)
        inside = divide_cuts(inside, widths[first : first + size], wanted)
        if len(inside) < wanted:
            raise BatchError(
                f"mini-batch {first // size} has {size} rows, which cannot be split into a "
                f"multiple of {multiple} micro-batches. Raise mini_batch_size."
            )
        bounds = pairwise([first, *(inside + first).tolist()])
        groups.append([_Cut(a, b, int(widths[b - 1])) for a, b in bounds])
    return groups


# What is reported --------------------------------------------------------------------------------


def _listed(cuts: list[_Cut], first: int = 0) -> tuple[list[list[int]], list[int]]:
    """(rows, widths) of micro-batches as lists, rows counted from `first`."""
    rows = [[cut.start - first, cut.end - first] for cut in cuts]
    return rows, [cut.width for cut in cuts]


def _about(cuts: list[_Cut], first: int) -> dict[str, Any]:
    indices, lengths = _listed(cuts, first)
    return {
        "micro_batch_indices": indices,
        "micro_batch_lengths": lengths,
        "num_micro_batchs": len(cuts),
    }


def _metrics(spans: Spans, slots: int, log_prefix: str | None) -> dict[str, float]:
    prefix = f"dynamic_batching/{log_prefix}" if log_prefix else "dynamic_batching"
    before = len(spans.lengths) * spans.width
    return {
        f"{prefix}/valid_tokens": int(spans.lengths.sum()),
        f"{prefix}/actual_tokens_origin": before,
        f"{prefix}/actual_tokens": slots,
        f"{prefix}/removed_padding_tokens": before - slots,
        f"{prefix}/removed_padding_ratio": (before - slots) / before if before else 0.0,
    }
