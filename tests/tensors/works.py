"""Random plans with their samples and batches, for tests of sharding and restoring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from evenstep import Packed, Padded, Plan, Recipe, Steps, Topology, make_plan
from evenstep.tensors import Batch, BatchShard, Collator, Extra
from tests.internals import IGNORE_INDEX, Layout, Overflow

torch.set_num_threads(1)

VOCABULARY = 23
CAPACITY = 32  # a multiple of every alignment drawn
COLLATOR = Collator(
    extras={
        "old_log_probs": Extra(aligned="token"),
        "advantages": Extra(aligned="token"),
        "features": Extra(aligned="token", shape=(2,)),
        "reward": Extra(aligned="sequence"),
        "patches": Extra(aligned="ragged", dtype=torch.int64),
    }
)


@dataclass(frozen=True)
class Work:
    """A plan and the samples it was made for."""

    plan: Plan
    samples: list[dict[str, Any]] = field(repr=False)

    @property
    def batches(self) -> list[Batch]:
        """The batches of all micro-batches, in execution order."""
        cells = ((s, r) for s in range(self.plan.num_steps) for r in range(self.plan.num_ranks))
        return [COLLATOR(micro, self.samples) for cell in cells for micro in self.plan[cell]]


def layouts() -> SearchStrategy[Layout]:
    return st.sampled_from(
        [
            Packed(max_tokens=CAPACITY),
            Packed(max_tokens=CAPACITY, pad_to=CAPACITY),
            Padded(max_tokens=4 * CAPACITY, pad_to=CAPACITY),
            Padded(max_tokens=2 * CAPACITY),
            Packed(rows=2, pad_to=CAPACITY),
            Packed(samples=3),
        ]
    )


def works(
    cp: tuple[int, ...] = (1, 2, 4),
    overflow: tuple[Overflow, ...] = ("split", "split", "truncate", "drop"),
) -> SearchStrategy[Work]:
    """Lengths from 1, some over-long. Few samples on many ranks: empty micro-batches are common."""

    @st.composite
    def work(draw: DrawFn) -> Work:
        lengths = draw(
            st.lists(st.sampled_from([1, 1, 2, 3, 7, 8, 15, 31, 40, 70]), min_size=1, max_size=12)
        )
        recipe = Recipe(
            layout=draw(layouts()),
            topology=Topology(
                dp=draw(st.sampled_from([1, 2, 3])),
                cp=draw(st.sampled_from(cp)),
                tp=draw(st.sampled_from([1, 2])),
            ),
            steps=Steps(samples=draw(st.sampled_from([None, 1, 4]))),
            overflow=draw(st.sampled_from(overflow)),
        )
        return make_work(lengths, recipe, seed=draw(st.integers(0, 99)))

    return work()


def make_work(lengths: list[int], recipe: Recipe, seed: int = 0) -> Work:
    """Samples of these lengths with random values, and their plan."""
    rng = np.random.default_rng(seed)
    samples = []
    for length in lengths:
        size = (length, 2)
        samples.append(
            {
                "input_ids": rng.integers(1, VOCABULARY, length),
                "loss_mask": rng.integers(0, 4, length) > 0,
                "old_log_probs": -rng.random(length),
                "advantages": rng.normal(size=length),
                "features": rng.normal(size=size),
                "reward": rng.normal(),
                "patches": rng.integers(0, 9, rng.integers(0, 3)),
            }
        )
    return Work(make_plan(lengths, recipe), samples)


def handmade(tiles: list[int], real: list[int], tokens: list[int]) -> Batch:
    """One row of tiles with these numbers of slots and of real tokens."""
    slots, seqlens = torch.tensor(tiles), torch.tensor(real)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), slots.cumsum(0)))
    ids = torch.arange(len(tiles)).repeat_interleave(slots)
    position = torch.arange(int(slots.sum())) - offsets[ids]
    row = torch.tensor([tokens])
    ahead = torch.cat((row[:, 1:], row[:, :1]), dim=1)
    labels = torch.where(position + 1 < seqlens[ids], ahead, IGNORE_INDEX)
    return Batch(
        tokens=row,
        targets=row,
        labels=labels,
        position_ids=position[None],
        segment_ids=ids[None],
        loss_weights=(labels != IGNORE_INDEX).float(),
        cu_seqlens=offsets.to(torch.int32),
        seqlens=seqlens,
        sample_ids=torch.where(seqlens > 0, torch.arange(len(real)), -1),
        starts=torch.zeros_like(seqlens),
        loss_tokens=(seqlens - 1).clamp(min=0),
        max_seqlen=max(tiles),
    )


def same(first: Tensor, second: Tensor) -> bool:
    """Equal in dtype, shape and every entry."""
    return bool(first.dtype == second.dtype and torch.equal(first, second))


def assert_shards_hold(
    batch: Batch, shards: list[BatchShard], join: Callable[[list[Tensor]], Tensor]
) -> None:
    """The slots of the shards join to those of the batch, and each shard has all of its tiles."""
    for name in ("tokens", "targets", "labels", "position_ids", "segment_ids", "loss_weights"):
        assert same(join([getattr(shard, name) for shard in shards]), getattr(batch, name)), name
    for shard in shards:
        for name in ("cu_seqlens", "seqlens", "sample_ids", "starts", "loss_tokens"):
            assert same(getattr(shard, name), getattr(batch, name)), name
        assert shard.max_seqlen == batch.max_seqlen
        assert shard.aligned == batch.aligned
        assert shard.continuation is batch.continuation
    for name, extra in batch.extras.items():
        parts: list[Any] = [shard.extras[name] for shard in shards]
        if batch.aligned[name] in ("token", "label"):
            assert same(join(parts), extra), name
        else:
            assert all(part is extra for part in parts), name
