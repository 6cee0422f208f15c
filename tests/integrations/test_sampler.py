"""Batch samplers: a planned stream in existing loaders."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from evenstep import Packed, Padded, PlannedStream, Recipe, Steps, Topology, World, find_prefixes
from evenstep.data import Lengths
from evenstep.errors import ConfigError, CursorError, PlanError
from evenstep.integrations.sampler import PlannedBatchSampler
from tests.examples import examples
from tests.train.processes import results_of

LENGTHS = np.random.default_rng(0).integers(1, 20, 96)


class Rows(Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, item: int) -> dict[str, Any]:
        return {"id": item, "input_ids": [item] * int(LENGTHS[item])}


def stream_of(rank: int = 0, size: int = 1, **changes: Any) -> PlannedStream:
    recipe = changes.pop("recipe", Recipe(layout=Packed(max_tokens=40), steps=Steps(samples=24)))
    recipe = replace(recipe, topology=Topology(dp=size))
    lengths = changes.pop("lengths", LENGTHS)
    return PlannedStream(Lengths(lengths), recipe, world=World(rank, size), **changes)


def whole(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return samples


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_loader_gets_the_micro_batches_of_its_rank(workers: int) -> None:
    seen: list[int] = []
    for rank in range(2):
        sampler = PlannedBatchSampler(stream_of(rank, 2))
        loader = DataLoader(Rows(), batch_sampler=sampler, collate_fn=whole, num_workers=workers)
        for batch in loader:
            assert sum(len(sample["input_ids"]) for sample in batch) <= 40
            seen += [sample["id"] for sample in batch]
    assert sorted(seen) == list(range(96))


def test_samples_that_share_prefixes_are_refused() -> None:
    samples = [[1, 2, 3, 4, 5, 6, prompt, answer] for prompt in range(5) for answer in range(4)]
    lengths = np.array([len(tokens) for tokens in samples])
    shared = stream_of(lengths=lengths, prefixes=find_prefixes(samples))
    saved = PlannedStream.from_plan(Lengths(lengths), shared.plan_epoch())
    for stream in (shared, saved):
        with pytest.raises(ConfigError, match="Plan without prefixes"):
            PlannedBatchSampler(stream)
    batches = list(PlannedBatchSampler(stream_of(lengths=lengths)))
    assert sorted(sample for batch in batches for sample in batch) == list(range(20))


def test_distributing_the_batches_of_one_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="accelerate_loader"):
        _ = PlannedBatchSampler(stream_of(1, 2)).batch_size
    assert PlannedBatchSampler(stream_of()).batch_size is None


def run_prepared(rank: int, size: int) -> list[str]:
    """The errors of one of the processes that prepare a loader of a sampler with accelerate."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",  # the group is there already
    }  # fmt: skip
    from accelerate import Accelerator, DataLoaderConfiguration

    from evenstep.integrations.accelerate import accelerate_loader

    found = []
    for name in ("even_batches", "split_batches", "dispatch_batches"):
        accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(**{name: True})
        )
        stream = stream_of(accelerator.process_index, accelerator.num_processes)
        loader = DataLoader(Rows(), batch_sampler=PlannedBatchSampler(stream), collate_fn=whole)
        try:
            next(iter(accelerator.prepare(loader)))
        except ConfigError as error:
            found.append(str(error))
    try:  # the same samples in another order
        accelerate_loader(Accelerator(cpu=True), stream_of(rank, 2, seed=rank))
    except ConfigError as error:
        found.append(str(error))
    return found


def test_accelerate_may_not_distribute_the_batches_of_a_rank(tmp_path: Path) -> None:
    for found in results_of(2, run_prepared, tmp_path):
        assert len(found) == 4
        assert all("accelerate_loader" in message for message in found[:3])
        assert "process 1 has other data" in found[3]


@given(st.integers(1, 3), st.integers(1, 3), st.booleans(), st.data())
@examples(40)
def test_resuming_within_a_step_is_exact_and_elastic(
    size: int, later: int, padded: bool, data: st.DataObject
) -> None:
    layout = Padded(max_tokens=40) if padded else Packed(max_tokens=40)
    recipe = Recipe(layout=layout, steps=Steps(samples=24))

    def samplers(count: int) -> list[PlannedBatchSampler]:
        return [PlannedBatchSampler(stream_of(r, count, recipe=recipe)) for r in range(count)]

    whole_run = [list(sampler) for sampler in samplers(size)]
    stop = data.draw(st.integers(0, len(whole_run[0])))
    seen: list[int] = []
    state: Any = None
    for sampler in samplers(size):
        for count, batch in enumerate(sampler):
            if count == stop:
                break
            seen += batch
            state = json.loads(json.dumps(sampler.state_dict()))
    if state is None:
        return
    for resumed, expected in zip(samplers(size), whole_run, strict=True):
        resumed.load_state_dict(state)
        assert list(resumed) == expected[stop:]
    # Another number of ranks, twice: the second stop may be within the same step.
    again = data.draw(st.integers(0, 2))
    for sampler in (second := samplers(later)):
        sampler.load_state_dict(state)
    taken = []
    for sampler in second:
        for count, batch in enumerate(sampler):
            if count == again:
                break
            taken.append(batch)
            next_state = sampler.state_dict()
    if not taken:
        next_state = state
    rest: list[int] = []
    for sampler in samplers(size):
        sampler.load_state_dict(next_state)
        try:
            rest += [i for batch in sampler for i in batch]
        except PlanError as error:  # a few samples are left for several ranks
            if size == 1 or "has less work than ranks" not in str(error):
                raise
            return
    assert sorted(seen + [i for batch in taken for i in batch] + rest) == list(range(96))


def test_within_a_step_another_layout_is_refused() -> None:
    sampler = PlannedBatchSampler(stream_of(0, 2))
    next(iter(sampler))
    state = sampler.state_dict()
    other = Recipe(layout=Packed(max_tokens=80), steps=Steps(samples=24))
    with pytest.raises(CursorError, match="recipe was"):
        PlannedBatchSampler(stream_of(0, 2, recipe=other)).load_state_dict(state)


def test_a_step_with_less_work_than_ranks_is_refused_or_left_out() -> None:
    lengths = np.full(26, 5)
    with pytest.raises(PlanError, match="drop_last=True"):
        [list(PlannedBatchSampler(stream_of(r, 4, lengths=lengths))) for r in range(4)]
    seen = []
    for rank in range(4):
        sampler = PlannedBatchSampler(stream_of(rank, 4, lengths=lengths), drop_last=True)
        seen += [i for batch in sampler for i in batch]
        assert sampler.dropped == 2
    assert len(seen) == len(set(seen)) == 24


def test_an_option_that_is_not_a_boolean_is_refused() -> None:
    option: Any = "no"
    with pytest.raises(ConfigError, match="drop_last must be true or false, got 'no'"):
        PlannedBatchSampler(stream_of(), drop_last=option)


def test_the_state_is_after_a_step_that_was_left_out() -> None:
    lengths = np.full(26, 5)
    sampler = PlannedBatchSampler(stream_of(0, 4, lengths=lengths), drop_last=True)
    list(sampler)
    alone = PlannedBatchSampler(stream_of(lengths=lengths))
    alone.load_state_dict(sampler.state_dict())
    assert list(alone) == []


def test_an_epoch_in_which_every_step_is_left_out_raises() -> None:
    few = stream_of(0, 4, lengths=np.full(3, 5), infinite_loop=True)
    with pytest.raises(PlanError, match=r"all steps of epoch 1 .* left out"):
        next(iter(PlannedBatchSampler(few, drop_last=True)))


def test_resuming_within_the_first_step_of_a_later_epoch_is_exact() -> None:
    sampler = PlannedBatchSampler(stream_of(0, 2, infinite_loop=True))
    batches, states = [], []
    for batch in sampler:
        batches.append(batch)
        states.append(json.loads(json.dumps(sampler.state_dict())))
        if len(batches) == 40:
            break
    assert {state["place"]["epoch"] for state in states} >= {0, 1}
    for done, state in enumerate(states[:-1], 1):
        resumed = PlannedBatchSampler(stream_of(0, 2, infinite_loop=True))
        resumed.load_state_dict(state)
        assert next(iter(resumed)) == batches[done]


def test_too_small_a_rest_of_a_step_for_more_ranks_raises() -> None:
    lengths, recipe = np.full(8, 2), Recipe(layout=Packed(max_tokens=4), steps=Steps(samples=8))
    sampler = PlannedBatchSampler(stream_of(0, 2, lengths=lengths, recipe=recipe))
    next(iter(sampler))
    more = [
        PlannedBatchSampler(stream_of(r, 5, lengths=lengths, recipe=recipe), drop_last=True)
        for r in range(5)
    ]
    for one in more:
        one.load_state_dict(sampler.state_dict())
    with pytest.raises(PlanError, match="Resume on fewer ranks"):
        [list(one) for one in more]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_of_a_stateful_loader_is_after_the_batch_yielded_last(workers: int) -> None:
    def loader() -> Any:
        sampler = PlannedBatchSampler(stream_of())
        return StatefulDataLoader(
            Rows(), batch_sampler=sampler, collate_fn=whole, num_workers=workers
        )

    expected = list(PlannedBatchSampler(stream_of()))
    first = loader()
    for count, _ in enumerate(first, 1):
        if count == 5:
            break
    second = loader()
    second.load_state_dict(first.state_dict())
    assert [[sample["id"] for sample in batch] for batch in second] == expected[5:]


def test_overflow_that_divides_samples_is_refused() -> None:
    recipe = Recipe(layout=Packed(max_tokens=8), overflow="split")
    with pytest.raises(ConfigError, match="only name whole samples"):
        PlannedBatchSampler(stream_of(recipe=recipe))


KINDS = [Steps(samples=10), Steps(tokens=150), Steps(micro_batches=2), Steps()]


@given(st.sampled_from(KINDS), st.integers(1, 3), st.booleans(), st.integers(0, 99))
@examples(20)
def test_the_length_is_exact_and_with_epochs_the_same(
    steps: Steps, size: int, padded: bool, seed: int
) -> None:
    layout = Padded(max_tokens=40) if padded else Packed(max_tokens=40)
    recipe = Recipe(layout=layout, steps=steps)
    lengths = np.random.default_rng(seed).integers(1, 40, 30 + seed % 7)
    counts = []
    for rank in range(size):
        stream = stream_of(rank, size, recipe=recipe, lengths=lengths)
        dropping = PlannedBatchSampler(stream, drop_last=True)
        sampler = PlannedBatchSampler(
            stream_of(rank, size, recipe=recipe, lengths=lengths), epochs=3
        )
        for epoch in range(3):
            dropping.set_epoch(epoch)
            assert len(dropping) == len(list(dropping))
            sampler.set_epoch(epoch)
            found = list(sampler)
            counts.append(len(found))
            assert len(found) == len(sampler)
    assert len(set(counts)) == 1


def test_resuming_among_the_empty_batches_at_the_end_is_exact() -> None:
    def make() -> PlannedBatchSampler:
        recipe = Recipe(layout=Packed(max_tokens=40), steps=Steps(micro_batches=1))
        return PlannedBatchSampler(stream_of(0, 1, recipe=recipe, seed=3), epochs=6)

    sampler, resumed, ends = make(), make(), 0
    for epoch in range(6):
        sampler.set_epoch(epoch)
        batches, states = [], []
        for batch in sampler:
            batches.append(batch)
            states.append(json.dumps(sampler.state_dict()))
        ends += not batches[-1]
        for done in range(len(batches) - 3, len(batches) + 1):
            resumed.load_state_dict(json.loads(states[done - 1]))
            resumed.set_epoch(epoch)
            assert list(resumed) == batches[done:]
    assert ends
    with pytest.raises(ConfigError, match="epoch 6 was not planned"):
        sampler.set_epoch(6)


@pytest.mark.parametrize("endless", [False, True])
def test_the_length_with_a_last_step_is_exact(endless: bool) -> None:
    stream = stream_of(0, 2, infinite_loop=endless, max_num_steps=6)
    sampler = PlannedBatchSampler(stream)
    assert len(sampler) == len(list(sampler)) == len(sampler)
    with pytest.raises(TypeError, match="has no length"):
        len(PlannedBatchSampler(stream_of(infinite_loop=True)))
    with pytest.raises(ConfigError, match="Remove epochs"):
        PlannedBatchSampler(stream, epochs=2)


def test_counting_reports_progress_and_happens_once() -> None:
    calls: list[tuple[int, int]] = []
    sampler = PlannedBatchSampler(
        stream_of(), epochs=3, progress=lambda done, total: calls.append((done, total))
    )
    assert len(sampler) == len(sampler)
    assert calls[-1] == (3 * 96, 3 * 96)
    assert len(calls) == len(set(calls))


def test_a_resumed_sampler_sets_its_epochs_like_any_other() -> None:
    sampler, expected, states = PlannedBatchSampler(stream_of()), [], []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in sampler:
            expected.append(batch)
            states.append((epoch, json.dumps(sampler.state_dict())))
    for done, (begun, state) in enumerate(states, 1):
        resumed, found = PlannedBatchSampler(stream_of()), []
        resumed.load_state_dict(json.loads(state))
        for epoch in range(begun, 2):
            resumed.set_epoch(epoch)
            found += list(resumed)
        assert found == expected[done:]


@pytest.mark.parametrize("epochs", [None, 3])
def test_a_start_that_is_set_on_the_stream_itself_is_followed(epochs: int | None) -> None:
    expected = PlannedBatchSampler(stream_of(), epochs=epochs)
    list(expected)
    state = json.loads(json.dumps(expected.state_dict()))
    expected.set_epoch(1)
    stream = stream_of()
    sampler = PlannedBatchSampler(stream, epochs=epochs)
    list(sampler)
    stream.set_epoch(1)
    assert sampler.state_dict() == expected.state_dict()
    assert list(sampler) == list(expected)
    stream.load_state_dict(state)
    assert sampler.state_dict()["step"] == state["step"]
