"""Work: the micro-batches of a step, and one that is ready to run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evenstep.core.plan import MicroBatch
from evenstep.core.ragged import IntArray, Segments
from evenstep.data.feed import FedMicroBatch
from evenstep.tensors.batch import Batch
from evenstep.train.kept import Places


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """A collated micro-batch, with host-side copies of what results and errors report."""

    batch: Batch
    lengths: IntArray
    sample_ids: IntArray
    labels: int
    predicted: int
    """Tokens that are not the first of their sample."""
    born: tuple[float, ...] = ()
    moved: bool = True
    """Whether the batch is on the device. If there was no memory yet, it is moved when it runs."""
    places: Places | None = None
    """Where its segments lie, if values are kept by sample."""
    parts: int = 1
    """Number of segments, or of groups that stay together."""
    groups: frozenset[int] = frozenset()
    """Those that GroupMean counts in this batch, unless the plan keeps them in it."""


def empty_micro_batch() -> MicroBatch:
    """An empty micro-batch of one slot."""
    none = np.empty(0, np.int64)
    return MicroBatch(Segments(none, none, none), np.array([0, 0]), 1, none)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The micro-batches of one step and what is known about it."""

    items: Iterable[Batch | FedMicroBatch | tuple[MicroBatch, Mapping[int, Any] | Batch]]
    count: int | None  # None while a step is being fed
    number: int
    totals: Mapping[str, float]
    budget: int | None
    loss_tokens: Mapping[int, int] = field(default_factory=dict)
    """Loss tokens of each sample, if `totals` is computed from them."""
    groups: Mapping[int, int] = field(default_factory=dict)
    """The group of each sample in the plan, if it has groups."""
    empty: MicroBatch = field(default_factory=empty_micro_batch)
    """Empty micro-batch for ranks without work."""
    costs: tuple[float, ...] = ()
    """Planned cost of each micro-batch, if there is a plan."""
    lock_step: bool = False  # whether ranks agree before each micro-batch that is fed


def described(rows: int, width: int, sample_ids: IntArray) -> str:
    """1 x 8 slots, 3 segments of samples 4, 0, 7"""
    shown = ", ".join(map(str, sample_ids[:4])) + ("..." if len(sample_ids) > 4 else "")
    held = f"{len(sample_ids)} segments of samples {shown}" if shown else "no segment"
    return f"{rows} x {width} slots, {held}"
