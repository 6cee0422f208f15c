"""separate_lengths: a step whose micro-batches hold short or long segments, never both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenstep.core.plan import MicroBatch, Plan
from evenstep.core.ragged import offsets_of, rounded_up
from evenstep.core.step import Step
from evenstep.core.text import whole_number
from evenstep.errors import ConfigError, PlanError


def separate_lengths(step: Step, limit: int) -> Step:
    """The same step; no micro-batch holds both segments of up to `limit` tokens and longer ones.

    For models whose RoPE depends on the longest segment of a micro-batch; see `rope_limit` of
    `evenstep.integrations.huggingface`. A micro-batch with both becomes two, on all ranks of its
    wave, so that counts stay equal. The samples of a step, its loss and its gradient stay as they
    are. A pooled step has no plan of all ranks: there, each micro-batch becomes two.

        for step in stream:
            runner.run(separate_lengths(step, rope_limit(model).tokens))
    """
    limit = whole_number("limit", limit)
    if step.batches is not None:
        raise ConfigError(
            "separate_lengths needs micro-batches that are not collated yet. Collate with the "
            "Runner."
        )
    waves = [True] * len(step) if step.plan is None else _mixed_waves(step.plan, limit)
    if step.plan is not None:
        _check_groups(step.plan, limit)
    parts = [part for micro, mixed in zip(step.micro_batches, waves, strict=True)
             for part in (_sides(micro, limit) if mixed else [micro])]  # fmt: skip
    if step.plan is not None and parts:
        missing = -len(parts) % step.plan.recipe.topology.multiple
        parts += [_part(parts[0], np.zeros(len(parts[0].segments), bool))] * missing
    totals = {name: value for name, value in step.totals.items() if "imbalance" not in name}
    return replace(step, micro_batches=tuple(parts), totals=totals, _read={})


def _mixed_waves(plan: Plan, limit: int) -> list[bool]:
    """Per wave, whether the micro-batch of any rank holds both short and long segments."""
    (ranks,) = list(plan)
    waves = zip(*ranks, strict=True)
    return [any(_is_mixed(micro.segments.length > limit) for micro in wave) for wave in waves]


def _is_mixed(long: NDArray[np.bool_]) -> bool:
    return bool(long.any() and not long.all())


def _check_groups(plan: Plan, limit: int) -> None:
    if plan.groups is None or plan.recipe.groups != "micro_batch":
        return
    group = plan.groups[plan.segments.sample]
    long = plan.segments.length > limit
    torn = np.intersect1d(group[long], group[~long])
    if len(torn):
        raise PlanError(
            f"group {torn[0]} holds segments of up to {limit} tokens and longer ones, which cannot "
            f"share a micro-batch. Set groups='step', or truncate samples to {limit} tokens."
        )


def _sides(micro: MicroBatch, limit: int) -> Iterator[MicroBatch]:
    """The short segments, then the long ones; either may be empty."""
    long = micro.segments.length > limit
    yield from (_part(micro, side) for side in (~long, long))


def _part(micro: MicroBatch, keep: NDArray[np.bool_]) -> MicroBatch:
    """Some of the segments in the same rows; rows are as wide as needed, and none is empty unless
    all are."""
    rows = np.repeat(np.arange(micro.rows), np.diff(micro.row_offsets))[keep]
    held = np.bincount(rows, minlength=micro.rows)
    held = held[held > 0] if len(rows) else np.zeros(1, np.int64)
    offsets = offsets_of(held.astype(np.int64))
    aligned = rounded_up(micro.segments.length[keep], micro.alignment)
    used = np.diff(np.concatenate(([0], np.cumsum(aligned)))[offsets])
    return replace(
        micro,
        segments=micro.segments.take(np.flatnonzero(keep)),
        row_offsets=offsets,
        width=max(int(used.max()), micro.alignment),
        sample_lengths=micro.sample_lengths[keep],
        truncated_to=micro.sample_ends[keep],
    )
