"""The resume checkers accept exact streams and explain what is wrong with others."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from evenstep import Packed, PlannedStream, PooledStream, Recipe, Steps, Topology, World
from evenstep.data import InMemory, Lengths, Pool
from evenstep.errors import InputError
from evenstep.integrations.dataloader import StreamDataset, StreamLoader
from evenstep.tensors import Collator
from evenstep.testing import ResumeError, assert_elastic_resume, assert_exact_resume
from tests.examples import examples
from tests.internals import content_of

LENGTHS = [5, 1, 9, 2, 7, 3, 3, 8, 12, 1, 4, 6]
SOURCE = InMemory([{"input_ids": torch.full((n,), i)} for i, n in enumerate(LENGTHS)])
PACKED = Packed(max_tokens=12)
NO_OTHER_RANKS: dict[str, Any] = {"anyone": lambda mine: mine}


def planned(world: World, workers: int = 1, **changes: Any) -> PlannedStream:
    recipe = Recipe(layout=PACKED, steps=Steps(samples=5), topology=Topology(dp=world.size))
    return PlannedStream(SOURCE, recipe, world=world, **changes)


def pooled(world: World, workers: int = 1, **changes: Any) -> PooledStream:
    recipe = Recipe(layout=PACKED, topology=Topology(dp=world.size))
    return PooledStream(SOURCE, recipe, pool=Pool(samples=3, tokens=0), world=world, **changes)


# What is exact ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [planned, pooled])
def test_our_streams_resume_exactly(stream: Callable[..., Any]) -> None:
    assert_exact_resume(lambda: stream(World()))
    assert_exact_resume(lambda: stream(World(1, 2), infinite_loop=True), steps=9)
    assert_exact_resume(lambda: stream(World(), max_num_steps=2))


def test_a_rank_of_a_pool_without_a_step_left_has_a_state_of_its_own() -> None:
    # Two samples: of four ranks, two have nothing to run.
    source = InMemory([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])

    def make(world: World, workers: int = 1) -> PooledStream:
        recipe = Recipe(layout=Packed(max_tokens=4), topology=Topology(dp=world.size))
        return PooledStream(source, recipe, pool=Pool(samples=1, tokens=0), world=world)

    before = make(World()).state_dict()
    streams = [make(World(rank, 4)) for rank in range(4)]
    states = []
    for stream in streams:
        stream.load_state_dict(before)
        assert stream.state_dict()["place"]["ranks"] == 4
        assert len(list(stream)) <= 1
        states.append(stream.state_dict())
    assert [list(state["place"]["readers"]) for state in states] == [["0"], ["1"], ["2"], ["3"]]
    assert_elastic_resume(make, [(1, 1), (4, 1), (4, 1), (2, 1)])


@examples(40)
@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=12),
    ranks=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    micro_batches=st.integers(1, 3),
    samples=st.integers(1, 4),
    count_ahead=st.booleans(),
)
def test_pools_change_their_ranks_anywhere(
    lengths: list[int], ranks: list[int], micro_batches: int, samples: int, count_ahead: bool
) -> None:
    source = InMemory([{"input_ids": [0] * length} for length in lengths])

    def make(world: World, workers: int) -> PooledStream:
        steps, topology = Steps(micro_batches=micro_batches), Topology(dp=world.size)
        recipe = Recipe(layout=Packed(max_tokens=8), steps=steps, topology=topology)
        pool = Pool(samples=samples, tokens=0)
        return PooledStream(source, recipe, pool=pool, world=world, count_ahead=count_ahead)

    assert_elastic_resume(make, [(each, 1) for each in ranks], epoch=range(len(lengths)))


@pytest.mark.parametrize("stream", [planned, pooled])
def test_our_loader_resumes_exactly(stream: Callable[..., Any]) -> None:
    assert_exact_resume(lambda: StreamLoader(stream(World()), num_workers=2), steps=3)
    assert_exact_resume(lambda: StreamLoader(stream(World()), collate=Collator()))


def test_torchdatas_loader_resumes_exactly() -> None:
    def make() -> Any:
        return StatefulDataLoader(StreamDataset(pooled(World())), batch_size=None, num_workers=1)

    assert_exact_resume(make)


def test_a_stream_of_lengths_alone_resumes_exactly() -> None:
    recipe = Recipe(layout=PACKED, steps=Steps(tokens=20))
    assert_exact_resume(lambda: PlannedStream(Lengths(np.array(LENGTHS)), recipe))


SHAPES = [(2, 1), (1, 1), (3, 1)]


@pytest.mark.parametrize("stream", [planned, pooled])
def test_our_streams_resume_on_other_ranks(stream: Callable[..., Any]) -> None:
    assert_elastic_resume(stream, SHAPES, epoch=range(len(LENGTHS)))


@pytest.mark.parametrize("stream", [planned, pooled])
def test_our_loader_resumes_on_other_ranks_and_workers(stream: Callable[..., Any]) -> None:
    def make(world: World, workers: int) -> StreamLoader:
        return StreamLoader(stream(world), num_workers=workers, **NO_OTHER_RANKS)

    assert_elastic_resume(make, [(2, 2), (1, 1)], after=[1])


# What is not ------------------------------------------------------------------------------------


@dataclass
class Shuffled:
    """Samples through a small buffer, one by one; correct unless given a fault."""

    fault: str = ""
    count: int = 12

    def __post_init__(self) -> None:
        self.state: dict[str, Any] = {"position": 0, "buffer": []}

    def __iter__(self) -> Iterator[Any]:
        state = self.state
        while True:
            while len(state["buffer"]) < 3 and state["position"] < self.count:
                state["buffer"].append(state["position"])
                state["position"] += 1
            if not state["buffer"]:
                return
            at = state["position"] * 7 % len(state["buffer"])
            yield {"sample": state["buffer"].pop(at)}

    def state_dict(self) -> dict[str, Any]:
        state, buffer = self.state, list(self.state["buffer"])
        if self.fault == "shared":
            return state
        if self.fault == "forgets its pool":
            return {"position": state["position"], "buffer": []}
        if self.fault == "repeats" and buffer and state["position"] == self.count:
            return {**state, "buffer": [buffer[0], *buffer]}
        if self.fault == "ahead":
            return {"position": min(self.count, state["position"] + 1), "buffer": buffer}
        if self.fault == "starts over" and not buffer:
            return {"position": 0, "buffer": []}
        return {**state, "buffer": buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        keep = self.fault == "changes the loaded state"
        self.state = state if keep else {**state, "buffer": list(state["buffer"])}


FAULTS = {
    "shared": "changed after state_dict returned it.*Let state_dict return a copy",
    "forgets its pool": r"from the state after item 0, item 1 .*got \{'sample': 3\}.*data is lost",
    "repeats": r"item \d+ comes again: data is repeated|continues with",
    "ahead": "comes too early: data is lost|the stream ends after",
    "starts over": "continues with .* after its end: data is repeated",
    "changes the loaded state": "changed the state that was loaded.*load_state_dict copy",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_stream_is_detected_with_its_fault(fault: str) -> None:
    assert_exact_resume(Shuffled)
    with pytest.raises(ResumeError, match=f"(?s){FAULTS[fault]}"):
        assert_exact_resume(lambda: Shuffled(fault))


def test_a_fault_that_only_a_second_resume_shows_is_detected() -> None:
    class Late(Shuffled):
        """After a resume, its states are off by one sample."""

        resumed = False

        def state_dict(self) -> dict[str, Any]:
            state = super().state_dict()
            return {**state, "position": state["position"] - 1} if self.resumed else state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.resumed = True
            super().load_state_dict(state)

    with pytest.raises(ResumeError, match="resumed 1 times, each time after one item"):
        assert_exact_resume(Late)


def test_a_missing_random_state_is_detected() -> None:
    class Careless(Shuffled):
        def __iter__(self) -> Iterator[Any]:
            rng = random.Random(0)
            for item in super().__iter__():
                yield item["sample"], rng.random()

    with pytest.raises(ResumeError, match="has no such item"):
        assert_exact_resume(Careless)
    assert_exact_resume(Careless, key=lambda item: item[0])


def test_a_cursor_that_disagrees_with_the_state_is_detected() -> None:
    class Behind(PooledStream):
        def __iter__(self) -> Iterator[Any]:
            before = self.start()
            for step in super().__iter__():
                yield replace(step, cursor=before)
                before = step.cursor

    recipe = Recipe(layout=PACKED)
    with pytest.raises(ResumeError, match="from the cursor of item 0, item 1"):
        assert_exact_resume(lambda: Behind(SOURCE, recipe, pool=Pool(samples=3)))


def test_a_pool_that_is_missing_in_the_cursor_is_detected() -> None:
    class Forgetful(PooledStream):
        def load_state_dict(self, state: Any, allow: Collection[str] = ()) -> None:
            super().load_state_dict(state, allow)
            assert self._loaded is not None
            states = {n: replace(state, waiting=()) for n, state in self._loaded.states.items()}
            self._loaded = replace(self._loaded, states=states)

    recipe = Recipe(layout=PACKED)
    with pytest.raises(ResumeError, match="after item 0, item 1 differs from"):
        assert_exact_resume(lambda: Forgetful(SOURCE, recipe, pool=Pool(samples=3)))

    def make(world: World, workers: int) -> Forgetful:
        ranks = Topology(dp=world.size)
        return Forgetful(SOURCE, replace(recipe, topology=ranks), world=world)

    with pytest.raises(ResumeError, match=r"after 1 steps of 2 ranks x 1 worker.*lose"):
        assert_elastic_resume(make, SHAPES)


class Dealt:
    """Samples r, r + R, ... for rank r of R, from a position that all ranks share."""

    def __init__(self, world: World, fault: str = "", rng: random.Random | None = None) -> None:
        self.world, self.fault, self.rng = world, fault, rng
        self.begin = self.position = 0

    def __iter__(self) -> Iterator[int]:
        order = list(range(10))
        rest = order[self.begin :]
        if self.rng is not None and self.begin:
            self.rng.shuffle(rest)
        for at in range(0, len(rest), self.world.size):
            self.position = min(10, self.begin + at + self.world.size)
            yield from rest[at : at + self.world.size][self.world.rank :][:1]

    def state_dict(self) -> dict[str, int]:
        off = self.fault == "repeats" and self.position > 4
        return {"position": self.position - off} | ({"rank": self.world.rank} if self.fault else {})

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = self.position = state["position"]


def least(states: Any) -> Any:
    return min(states, key=lambda state: int(state["position"]))


def test_elastic_faults_are_detected() -> None:
    def samples(item: int) -> list[int]:
        return [item]

    def check(make: Callable[[World, int], Any], **options: Any) -> None:
        assert_elastic_resume(make, SHAPES, samples_of=samples, **options)

    check(lambda world, _: Dealt(world), merge=least)
    with pytest.raises(ResumeError, match=r"after 3 steps of 2 ranks x 1 worker, .* repeat 5 of"):
        check(lambda world, _: Dealt(world, "repeats"), merge=least)
    rng = random.Random(0)
    with pytest.raises(ResumeError, match="different orders when resumed twice from one state"):
        check(lambda world, _: Dealt(world, rng=rng), merge=least)
    with pytest.raises(ResumeError, match=r"without any stop.*lose 10"):
        check(lambda world, _: Dealt(world), merge=least, epoch=range(11))
    with pytest.raises(InputError, match="states of the ranks differ"):
        check(lambda world, _: Dealt(world, "marked"))
    with pytest.raises(InputError, match="samples of a int are unknown"):
        assert_elastic_resume(lambda world, _: Dealt(world), SHAPES)
    with pytest.raises(InputError, match="expected two or more shapes"):
        assert_elastic_resume(lambda world, _: Dealt(world), [(1, 1)])


# Content ----------------------------------------------------------------------------------------


def test_contents_differ_if_one_bit_differs() -> None:
    same = [
        lambda: torch.tensor([1.0, float("nan")], dtype=torch.bfloat16),
        lambda: torch.tensor(True),
        lambda: {"a": [np.float32(1), {2, 3}], "b": (None, "x", b"y", 1.5)},
        lambda: np.array([{"a": 1}], object),
        lambda: next(iter(pooled(World()))),
    ]
    for make in same:
        assert content_of(make()) == content_of(make())  # type: ignore[no-untyped-call]
    different = [
        (torch.zeros(2), -torch.zeros(2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.zeros(1, 2)),
        (0.0, -0.0),
        (1, True),
        ([1], (1,)),
        ({"a": 1}, {"a": 2}),
    ]
    for one, other in different:
        assert content_of(one) != content_of(other)
    with pytest.raises(InputError, match=r"type object cannot be compared.*Pass `key`"):
        content_of(object())


def test_any_dataset_can_be_checked_through_torchdata() -> None:
    class Numbers(IterableDataset):  # type: ignore[misc]
        def __init__(self, forgets: bool) -> None:
            self.at, self.forgets = 0, forgets

        def __iter__(self) -> Iterator[int]:
            for number in range(self.at, 6):
                self.at = number + 1
                yield number
            self.at = 0

        def state_dict(self) -> dict[str, int]:
            return {} if self.forgets else {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state.get("at", 0)

    def make(forgets: bool) -> Any:
        return StatefulDataLoader(Numbers(forgets), batch_size=None)

    assert_exact_resume(lambda: make(False))
    with pytest.raises(ResumeError, match="item 0 comes again: data is repeated"):
        assert_exact_resume(lambda: make(True))


def test_importing_the_helpers_loads_no_torch() -> None:
    use = "from evenstep.testing import assert_exact_resume"
    code = f"import sys; {use}; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert found.strip() == "False"
