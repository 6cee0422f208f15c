"""Transforms that are told a sample's id, epoch and seed draw the same on any ranks and workers."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Packed, Padded, PlannedStream, PooledStream, Recipe, Steps, Topology, World
from evenstep.data import (
    Draw,
    Iterated,
    Jsonl,
    Mapped,
    MeasuredMapped,
    Pool,
    SeededSource,
    merge_cursors,
)
from evenstep.errors import CursorError, InputError
from evenstep.integrations.dataloader import StreamLoader
from evenstep.integrations.sampler import PlannedBatchSampler
from tests.examples import examples
from tests.internals import ItemTransform, PartDataset, item_and_part


def augmented(row: Any, *, sample_id: int, epoch: int, seed: int) -> Any:
    """Random tokens, as many as the row says."""
    rng = np.random.default_rng((sample_id, epoch, seed))
    return {"input_ids": rng.integers(0, 10**9, row)}


def expected(sample_id: int, length: int, epoch: int, seed: int) -> list[int]:
    found: list[int] = augmented(length, sample_id=sample_id, epoch=epoch, seed=seed)[
        "input_ids"
    ].tolist()
    return found


def stream_of(kind: str, lengths: list[int], rank: int, ranks: int, seed: int, **more: Any) -> Any:
    world, ranked = World(rank, ranks), Topology(dp=ranks)
    if kind == "planned":
        source = MeasuredMapped(lengths, lengths=lengths, transform=augmented)
        recipe = Recipe(layout=Packed(max_tokens=12), steps=Steps(samples=3), topology=ranked)
        return PlannedStream(source, recipe, world=world, seed=seed, **more)
    recipe = Recipe(layout=Padded(max_tokens=12), topology=ranked)
    given: Any = Iterated if kind == "sequential" else Mapped
    source = given(lengths, transform=augmented)
    return PooledStream(source, recipe, world=world, seed=seed, pool=Pool(samples=3), **more)


def check(step: Any, lengths: list[int], epoch: int, seed: int) -> list[int]:
    """Compare the samples of a step; return their ids."""
    found = []
    for _, samples in step:
        for sample_id, sample in samples.items():
            want = expected(sample_id, lengths[sample_id], epoch, seed)
            assert np.asarray(sample["input_ids"]).tolist() == want
            found.append(sample_id)
    return found


@given(
    st.sampled_from(["planned", "mapped", "sequential"]),
    st.lists(st.integers(1, 9), min_size=1, max_size=25),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 4)), max_size=2),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.integers(0, 2),
    st.integers(0, 5),
)
@examples(60)
def test_what_is_drawn_is_the_same_on_any_ranks_and_workers_before_and_after_a_stop(
    kind: str, lengths: list[int], stops: Any, last: Any, epoch: int, seed: int
) -> None:
    seen: list[int] = []
    state = None
    for ranks, workers, most in [*stops, (*last, None)]:
        cursors: Any = []
        for rank in range(ranks):
            stream = stream_of(kind, lengths, rank, ranks, seed)
            if state is None:
                stream.set_epoch(epoch)
            else:
                stream.load_state_dict(state)
            cursors.append(stream.start(workers))
            walks = [stream.walk(worker, workers) for worker in range(workers)]
            in_turn = (s for group in zip_longest(*walks) for s in group if s is not None)
            for number, step in enumerate(in_turn):
                if number == most:
                    break
                seen += check(step, lengths, epoch, seed)
                cursors.append(step.cursor)
        if kind == "planned":
            merged = max(cursors, key=lambda cursor: cursor.step)
        else:
            top = max(cursor.step for cursor in cursors)
            merged = merge_cursors([replace(cursor, step=top) for cursor in cursors])
        state = json.loads(json.dumps(merged.to_dict()))
    assert sorted(seen) == list(range(len(lengths)))


@pytest.mark.parametrize("kind", ["planned", "mapped", "sequential"])
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_of_a_loader_draw_the_same_also_after_a_resume(kind: str, workers: int) -> None:
    lengths = [1 + n % 7 for n in range(40)]
    loader = StreamLoader(stream_of(kind, lengths, 0, 1, 3), num_workers=workers)
    loader.set_epoch(2)
    first = []
    for number, step in enumerate(loader):
        first += check(step, lengths, 2, 3)
        if number == 3:
            state = step.cursor.to_dict()
            break
    again = StreamLoader(stream_of(kind, lengths, 0, 1, 3), num_workers=2 - workers)
    again.load_state_dict(state)
    rest = [i for step in again for i in check(step, lengths, 2, 3)]
    assert sorted(first + rest) == list(range(40))


def test_every_epoch_of_an_endless_stream_draws_anew() -> None:
    lengths = [3, 4, 5, 2]
    for kind in ("planned", "mapped"):
        stream = stream_of(kind, lengths, 0, 1, 0, infinite_loop=True, max_num_steps=9)
        found: dict[int, set[tuple[int, ...]]] = {}
        for step in stream:
            for _, samples in step:
                for i, sample in samples.items():
                    found.setdefault(i, set()).add(tuple(sample["input_ids"].tolist()))
        assert max(map(len, found.values())) > 1


@pytest.mark.parametrize("source", [Mapped, Iterated])
def test_a_step_with_an_item_of_two_epochs_has_both_of_its_samples(source: Any) -> None:
    def numbered(row: int, *, epoch: int) -> Any:
        return {"input_ids": [10 * epoch + row] * (1 + epoch % 2)}

    recipe = Recipe(layout=Packed(max_tokens=9), overflow="split")
    stream = PooledStream(
        source([0, 1, 2], transform=numbered), recipe, infinite_loop=True, pool=Pool(samples=8),
        max_num_steps=6,
    )  # fmt: skip
    drawn: list[tuple[int, int]] = []
    for step in stream:
        for micro, samples in step:
            assert len(samples) == len(set(micro.segments.sample.tolist()))
            segments = micro.segments
            for i, length in zip(segments.sample.tolist(), segments.length.tolist(), strict=True):
                tokens = samples[i]["input_ids"]
                assert len(tokens) == length
                drawn.append((tokens[0] // 10, tokens[0] % 10))
    assert len(set(drawn)) == len(drawn) > 20


def test_trainers_read_the_samples_of_the_epoch() -> None:
    lengths = [3, 4, 5, 2, 6]
    sampler = PlannedBatchSampler(stream_of("planned", lengths, 0, 1, 1), per_step=3, epochs=2)
    data = PartDataset(sampler, lambda micro, samples: {"samples": samples})
    for epoch in range(2):
        data.set_epoch(epoch)
        for part in sampler:
            for sample_id, sample in data.__getitems__(part)["samples"].items():
                want = expected(sample_id, lengths[sample_id], epoch, 1)
                assert sample["input_ids"].tolist() == want


def test_another_seed_is_refused_even_if_the_order_is_the_same() -> None:
    for kind in ("planned", "sequential"):
        more: dict[str, Any] = {} if kind == "sequential" else {"shuffle": False}
        state = next(iter(stream_of(kind, [3] * 20, 0, 1, 0, **more))).cursor.to_dict()
        stream_of(kind, [3] * 20, 0, 1, 0, **more).load_state_dict(state)
        with pytest.raises(CursorError, match="seed of samples was 0 and is 1"):
            stream_of(kind, [3] * 20, 0, 1, 1, **more).load_state_dict(state)


def test_a_transform_is_told_what_its_signature_names() -> None:
    draw = Draw(sample_id=7, epoch=2, seed=5)

    def method(row: Any, epoch: int) -> Any:
        return row, epoch

    class Object:
        def __call__(self, row: Any, *, seed: int = 0) -> Any:
            return row, seed

    assert ItemTransform.of(method)("x", draw) == ("x", 2)
    assert ItemTransform.of(Object())("x", draw) == ("x", 5)
    assert ItemTransform.of(lambda seed: seed)("x", draw) == "x"  # the item itself
    assert ItemTransform.of(lambda row, **more: more)("x", draw) == {}
    assert ItemTransform.of(partial(method, epoch=9))("x", draw) == ("x", 9)
    fixed = partial(lambda scale, row, *, sample_id: (scale, row, sample_id), 3)
    assert ItemTransform.of(fixed)("x", draw) == (3, "x", 7)
    assert ItemTransform.of(str)(1, draw) == "1"
    assert not ItemTransform.of(len).seeded


def test_a_seeded_item_cannot_be_read_without_a_stream(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("3\n1\n")
    sources: list[Any] = [
        Mapped([3, 1], transform=augmented),
        MeasuredMapped([3, 1], transform=augmented),
        Jsonl(tmp_path / "a.jsonl", transform=augmented),
        MeasuredMapped(Jsonl(tmp_path / "a.jsonl", transform=augmented)),
    ]
    assert all(isinstance(source, SeededSource) for source in sources)
    for source in sources:
        assert source.seeded
        with pytest.raises(InputError, match="takes sample_id, epoch, seed, which only a stream"):
            source[1]
        assert source.drawn(1, Draw(1, 4, 0))["input_ids"].tolist() == expected(1, 1, 4, 0)
    for measured in (sources[1], sources[3]):
        assert measured.lengths_of(np.arange(2)).tolist() == [3, 1]


def test_the_id_of_several_samples_is_that_of_their_item() -> None:
    def twice(row: Any, *, sample_id: int) -> Any:
        return [{"input_ids": [sample_id] * row}] * 2

    stream = PooledStream(Mapped([3, 1], transform=twice), Recipe(layout=Packed(max_tokens=8)))
    for step in stream:
        for _, samples in step:
            for number, sample in samples.items():
                assert set(sample["input_ids"]) == {item_and_part(number)[0]}


def test_ranks_that_count_ahead_know_lengths_that_differ_between_epochs() -> None:
    def cropped(row: int, *, sample_id: int, epoch: int) -> Any:
        return {"input_ids": [sample_id] * (1 + (row * (epoch + 3) + sample_id) % 9)}

    ranks = 3
    recipe = Recipe(layout=Packed(max_tokens=10), topology=Topology(dp=ranks))
    streams = [
        PooledStream(
            Mapped(list(range(40)), transform=cropped),
            recipe,
            world=World(rank, ranks),
            pool=Pool(samples=3, tokens=0),
            count_ahead=True,
        )
        for rank in range(ranks)
    ]
    for epoch in range(3):
        for stream in streams:
            stream.set_epoch(epoch)
        steps = [list(stream) for stream in streams]
        assert len(set(map(len, steps))) == 1
        found = [i for mine in steps for step in mine for i in step.own_sample_ids.tolist()]
        assert sorted(found) == list(range(40))
