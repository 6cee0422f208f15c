"""Ranks of a finite pooled stream that count ahead end after the same step, alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from evenstep import Limits, Packed, Padded, PooledStream, Recipe, Step, Steps, Topology, World
from evenstep.data import InMemory, Iterated, Mapped, Pool, merge_cursors
from evenstep.errors import ConfigError
from evenstep.integrations.dataloader import StreamDataset
from evenstep.testing import assert_elastic_resume, assert_exact_resume
from tests.examples import examples
from tests.internals import common_steps

STRATEGIES = ("subset_sum", "greedy", "fullest", "prefer_closest", "prefer_first")
KINDS = ("memory", "mapped", "iterated")


def stream_of(
    lengths: list[int],
    kind: str = "mapped",
    strategy: str = "greedy",
    rank: int = 0,
    ranks: int = 1,
    micro_batches: int = 1,
    pool: int = 8,
    **options: Any,
) -> PooledStream:
    samples = [{"input_ids": [n] * length} for n, length in enumerate(lengths)]
    source: Any = {"memory": InMemory, "mapped": Mapped, "iterated": Iterated}[kind](samples)
    packed = strategy in ("subset_sum", "greedy")
    layout: Any = Packed(max_tokens=16) if packed else Padded(max_tokens=16)
    recipe = Recipe(
        layout=layout,
        topology=Topology(dp=ranks),
        steps=Steps(micro_batches=micro_batches),
        overflow="alone",
    )
    found: Any = Pool(samples=pool, strategy=strategy)  # type: ignore[arg-type]
    return PooledStream(
        source, recipe, pool=found, world=World(rank, ranks), seed=3, count_ahead=True, **options
    )


def ids_of(steps: list[Step]) -> list[int]:
    return [i for step in steps for m in step.micro_batches for i in m.segments.sample.tolist()]


@examples(150)
@given(
    lengths=st.lists(st.integers(1, 18), max_size=60),
    kind=st.sampled_from(KINDS),
    strategy=st.sampled_from(STRATEGIES),
    ranks=st.integers(1, 4),
    workers=st.integers(1, 3),
    micro_batches=st.integers(1, 3),
    pool=st.integers(1, 12),
)
def test_ranks_end_after_the_same_step_and_every_sample_runs_once(
    lengths: list[int],
    kind: str,
    strategy: str,
    ranks: int,
    workers: int,
    micro_batches: int,
    pool: int,
) -> None:
    counts, seen, alone = [], [], []
    for rank in range(ranks):
        stream = stream_of(lengths, kind, strategy, rank, ranks, micro_batches, pool)
        walked = [list(stream.walk(worker, workers)) for worker in range(workers)]
        counts.append(sum(map(len, walked)))
        seen += [i for steps in walked for i in ids_of(steps)]
        for step in (step for steps in walked for step in steps):
            assert len(step) == micro_batches
            assert all(m.slots <= 16 or len(m.segments) == 1 for m in step.micro_batches)
        natural = stream_of(lengths, kind, strategy, rank, ranks, micro_batches, pool)
        natural.count_ahead = False
        alone.append(sum(len(list(natural.walk(worker, workers))) for worker in range(workers)))
    assert Counter(seen) == Counter(range(len(lengths)))
    assert set(counts) == {max(alone)}


def test_samples_are_spread_rather_than_steps_left_empty() -> None:
    lengths = [*[16] * 12, *[1] * 12]
    found = [list(stream_of(lengths, "mapped", rank=rank, ranks=2, pool=12)) for rank in (0, 1)]
    assert len(found[0]) == len(found[1])
    assert not any(step.micro_batches[0].is_empty for steps in found for step in steps)


@pytest.mark.parametrize("kind", KINDS)
def test_it_resumes_exactly_and_on_other_ranks(kind: str) -> None:
    lengths = np.random.default_rng(5).integers(1, 17, 40).tolist()
    for rank in range(3):
        assert_exact_resume(lambda rank=rank: stream_of(lengths, kind, rank=rank, ranks=3))  # type: ignore[misc]

    def make(world: World, workers: int) -> Any:
        return stream_of(lengths, kind, rank=world.rank, ranks=world.size)

    assert_elastic_resume(make, [(3, 1), (1, 1), (2, 1)], after=(0, 1, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_still_end_together_after_resuming_on_others(kind: str) -> None:
    lengths = np.random.default_rng(6).integers(1, 17, 60).tolist()
    cursors = []
    for rank in range(3):
        steps = iter(stream_of(lengths, kind, rank=rank, ranks=3))
        cursors.append([next(steps) for _ in range(3)][-1].cursor)
    merged = merge_cursors(cursors).to_dict()
    for allow, budget in (((), 16), (("pool",), 16)):
        for ranks in (2, 3, 4):
            counts = []
            for rank in range(ranks):
                stream = stream_of(lengths, kind, rank=rank, ranks=ranks, pool=8 + 4 * len(allow))
                stream.load_state_dict(merged, allow=allow)
                counts.append(len(list(stream)))
            assert len(set(counts)) == 1, (allow, budget, ranks, counts)


def test_a_cursor_of_one_rank_is_refused_if_settings_changed() -> None:
    lengths = [*range(1, 17)] * 3
    step = next(iter(stream_of(lengths, rank=0, ranks=2)))
    changed = stream_of(lengths, rank=0, ranks=2, pool=5)
    changed.load_state_dict(step.cursor.to_dict(), allow={"pool"})
    with pytest.raises(ValueError, match="merge_cursors"):
        list(changed)


@pytest.mark.parametrize("workers", [1, 2])
def test_loader_workers_of_all_ranks_end_together(workers: int) -> None:
    lengths = np.random.default_rng(7).integers(1, 17, 50).tolist()
    counts, seen = [], []
    for rank in range(3):
        data = StreamDataset(stream_of(lengths, rank=rank, ranks=3))
        found = list(DataLoader(data, batch_size=None, num_workers=workers))
        counts.append(len(found))
        seen += ids_of(found)
    assert len(set(counts)) == 1
    assert sorted(seen) == list(range(50))


def test_unreadable_samples_are_left_out_of_the_count() -> None:
    def make(rank: int) -> PooledStream:
        rows: Any = [{"input_ids": [0] * (1 + n % 16)} if n % 5 else None for n in range(40)]
        recipe = Recipe(layout=Packed(max_tokens=16), topology=Topology(dp=2))
        return PooledStream(
            Mapped(rows), recipe, pool=Pool(samples=4), world=World(rank, 2), count_ahead=True,
            on_error="skip",
        )  # fmt: skip

    found = [list(make(rank)) for rank in (0, 1)]
    assert len(found[0]) == len(found[1])
    assert sorted(ids_of(found[0] + found[1])) == [n for n in range(40) if n % 5]


def test_it_is_refused_where_steps_cannot_be_counted() -> None:
    with pytest.raises(ConfigError, match="cannot be combined with infinite_loop"):
        stream_of([1], infinite_loop=True)
    recipe = Recipe(layout=Packed(max_tokens=8), limits=Limits(columns={"loss_tokens": 4}))
    with pytest.raises(ConfigError, match=r"cannot be combined with limits\.columns"):
        PooledStream(InMemory([{"input_ids": [1]}]), recipe, count_ahead=True)


def test_steps_are_counted_anew_where_an_epoch_starts_at_another_step() -> None:
    lengths = [4, 4, 1, 3, 4, 4, 3, 4, 3, 2, 2, 3, 2, 1, 3, 2, 3, 1, 1]
    samples = InMemory([{"input_ids": [n] * length} for n, length in enumerate(lengths)])
    recipe = Recipe(layout=Packed(max_tokens=16), topology=Topology(dp=2))
    growing = Pool(samples=2, tokens=0, warmup_steps=6, warmup_tokens=4)
    counts = []
    for rank in (0, 1):
        stream = PooledStream(
            samples, recipe, pool=growing, world=World(rank, 2), shuffle=False, count_ahead=True
        )
        for done in (50, 0):  # with the full budget, then with the first ones
            stream.set_epoch(0, done)
            counts.append(len(list(stream)))
    assert counts[:2] == counts[2:]


@given(own=st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=1, max_size=5))
def test_further_steps_go_to_the_readers_with_the_fewest(own: list[list[int]]) -> None:
    found = np.array(common_steps(np.array(own), 2)).reshape(-1, 2)
    assert (found.sum(axis=1) == np.array(own).sum(axis=1).max()).all()
    assert (found >= np.array(own)).all()
