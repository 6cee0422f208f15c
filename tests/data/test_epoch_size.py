"""The exact number of steps and micro-batches of an epoch, and fingerprints of streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evenstep import Packed, PlannedStream, Recipe, Steps, Topology, World
from evenstep.data import InMemory, Lengths
from evenstep.errors import CursorError, EvenstepError, InputError
from evenstep.testing import Case, cases
from tests.data.test_from_plan import stream_of
from tests.examples import examples
from tests.internals import plan_step, planned_module

RECIPE = Recipe(layout=Packed(max_tokens=16), topology=Topology(dp=2), balance="lpt")


def stream(lengths: Any, steps: Steps, **more: Any) -> PlannedStream:
    source = Lengths(np.asarray(lengths, np.int64))
    return PlannedStream(source, replace(RECIPE, steps=steps), world=World(0, 2), **more)


@given(cases(), st.booleans(), st.integers(0, 9))
@examples(40)
def test_the_size_of_an_epoch_is_exact(case: Case, shuffle: bool, skipped: int) -> None:
    made = stream_of(case, shuffle=shuffle)
    for epoch in range(2):
        made.set_epoch(epoch)
        try:
            steps = list(made)
        except EvenstepError:
            assume(False)
        size = made.epoch_size(epoch)
        assert size.steps == len(steps) == len(made)
        assert made.steps_per_epoch.exact
        assert size.micro_batches == sum(map(len, steps))
        full = [step for step in steps if not step.totals["empty"]]
        left = made.epoch_size(epoch, drop_last=True)
        assert (left.steps, left.micro_batches) == (len(full), sum(map(len, full)))
        made.skip_batches(skipped)
        rest = made.size_left()
        assert (rest.steps, rest.micro_batches) == (
            len(steps[skipped:]),
            sum(map(len, steps[skipped:])),
        )
    assert made.micro_batches_per_epoch(2) == [made.epoch_size(n).micro_batches for n in (0, 1)]


class Counting(Lengths):
    """Counts how often lengths are asked for."""

    asked = 0

    def lengths_of(self, items: Any) -> Any:
        self.asked += 1
        return super().lengths_of(items)


def test_sizes_are_remembered_and_reading_is_not_needed() -> None:
    source = Counting(np.random.default_rng(0).integers(1, 16, 80))
    made = PlannedStream(source, replace(RECIPE, steps=Steps(tokens=60)), world=World(0, 2))
    first = made.micro_batches_per_epoch(3)
    asked = source.asked
    assert made.micro_batches_per_epoch(3) == first
    assert source.asked == asked
    unshuffled = PlannedStream(
        source, replace(RECIPE, steps=Steps(tokens=60)), world=World(0, 2), shuffle=False
    )
    before = source.asked
    unshuffled.epoch_size(0)
    once = source.asked - before
    assert len(set(unshuffled.micro_batches_per_epoch(9))) == 1
    assert source.asked == before + once  # epochs are the same


def test_progress_covers_all_epochs() -> None:
    made, seen = stream([3] * 80, Steps(samples=30)), list[tuple[int, int]]()
    made.micro_batches_per_epoch(2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, 160) for n in (30, 60, 80, 110, 140, 160)]


def test_steps_of_all_ranks_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []

    def counting(lengths: Any, *arguments: Any, **more: Any) -> Any:
        planned.append(len(lengths))
        return plan_step(lengths, *arguments, **more)

    monkeypatch.setattr(planned_module, "plan_step", counting)
    steps = list(stream([3] * 20, Steps(samples=10)).walk_all())
    assert [len(step) for step in steps] == [2, 2]
    assert planned == [10, 10]


# Fingerprints ----------------------------------------------------------------------------------


def test_the_fingerprint_covers_all_that_determines_steps_but_the_rank() -> None:
    lengths, limited = [3, 5] * 10, replace(RECIPE, limits=replace(RECIPE.limits, columns={"n": 9}))

    def made(recipe: Recipe = RECIPE, rank: int = 0, values: Any = lengths, **more: Any) -> str:
        source = Lengths(np.asarray(values))
        world = World(rank, recipe.topology.dp)
        return PlannedStream(source, recipe, world=world, **more).fingerprint

    assert made(rank=0) == made(rank=1)
    others = [
        made(),
        made(values=lengths[::-1]),
        made(seed=1),
        made(shuffle=False),
        made(replace(RECIPE, topology=Topology(dp=4))),
        made(replace(RECIPE, steps=Steps(samples=4))),
        made(groups=[0] * 20),
        made(limited, columns={"n": [1] * 20}),
        made(limited, columns={"n": [1] * 19 + [2]}),
        made(loss_tokens=[2] * 20),
        made(max_num_steps=3),
        made(infinite_loop=True),
    ]
    assert len(set(others)) == len(others)


def test_steps_of_all_ranks_share_a_fingerprint_and_differ_by_position() -> None:
    made = [
        PlannedStream(Lengths(np.arange(1, 13)), replace(RECIPE, steps=Steps(samples=4)), world=w)
        for w in (World(0, 2), World(1, 2))
    ]
    first, second = ([step.fingerprint for step in each] for each in made)
    assert first == second
    assert len(set(first)) == 3
    made[0].skip_batches(1)
    assert [step.fingerprint for step in made[0]] == first[1:]


def test_a_cursor_notices_samples_of_changed_length() -> None:
    """The fingerprint of this source covers 64 items; the edited one is not among them."""
    samples = [{"input_ids": [1] * (1 + n % 7)} for n in range(1000)]
    recipe = Recipe(layout=Packed(max_tokens=16), steps=Steps(samples=8))
    state = PlannedStream(InMemory(samples), recipe).state_dict()
    edited = [*samples[:500], {"input_ids": [1] * 9}, *samples[501:]]
    assert InMemory(edited).fingerprint == InMemory(samples).fingerprint
    with pytest.raises(CursorError, match="lengths was"):
        PlannedStream(InMemory(edited), recipe).load_state_dict(state)
    PlannedStream(InMemory(samples), recipe).load_state_dict(state)


def test_an_endless_stream_of_nothing_is_still_an_error() -> None:
    with pytest.raises(InputError, match="epoch 0 has no sample to run"):
        list(stream([], Steps(), infinite_loop=True))
    assert stream([], Steps()).micro_batches_per_epoch(2) == [0, 0]
