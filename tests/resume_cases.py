"""Random runs that stop anywhere and continue on other ranks and workers, each sample once.

A case has `check`, which raises an AssertionError if a sample is lost or repeated, and returns
whether the case could be planned at all. `KINDS` names the kinds of streams; `make fuzz-resume`
runs through all of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from evenstep import MicroBatch, Plan, PlannedStream, Recipe, Step, Steps, World
from evenstep.data import Lengths
from evenstep.errors import EvenstepError
from evenstep.testing import Case, cases
from tests.internals import StreamPosition, segments_of
from tests.pooled_cases import pooled_cases
from tests.source_cases import MEASURED, check_draws, source_of

SegmentKey: TypeAlias = tuple[int, int, int]
"""(sample, start, length)"""


class ResumeCase(Protocol):
    """A stream and the places where it stops."""

    def check(self) -> bool:
        """False if the case cannot be planned; raises AssertionError if it resumes wrongly."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Part of a run: `micro_batches` on each of `ranks` ranks, then it stops (None: to the end)."""

    ranks: int
    workers: int
    micro_batches: int | None


@dataclass(frozen=True, slots=True)
class PlannedCase:
    """An epoch of a planned stream, in stages. `plan_ranks`: as a saved plan for so many ranks."""

    case: Case
    seed: int
    shuffle: bool
    epoch: int
    stages: tuple[Stage, ...]
    plan_ranks: int | None = None
    source: str = "lengths"

    def check(self) -> bool:
        """Run all stages; every token of the epoch must run exactly once."""
        seen, state = Counter[SegmentKey](), None
        try:
            for stage in self.stages:
                state = self._run(stage, state, seen)
        except EvenstepError:
            if self._refused():
                return False
            raise
        lost, repeated = self._expected() - seen, seen - self._expected()
        assert not lost, f"lost {sorted(lost)[:5]}"
        assert not repeated, f"repeated {sorted(repeated)[:5]}"
        return True

    def _refused(self) -> bool:
        """Whether an uninterrupted epoch on one of these numbers of ranks is an error, too.

        Ranks cannot share groups equally in every step, and where steps of micro-batches begin
        depends on the ranks before. The rest of a step may have too few samples with second work
        to give each rank of a wave one.
        """
        recipe = self.case.recipe
        if recipe.second_work is not None and recipe.second_work.same_waves:
            return True
        if recipe.equal_sizes and recipe.steps.micro_batches and self.case.groups is not None:
            return True
        for ranks in {stage.ranks for stage in self.stages}:
            try:
                for _ in self._stream(ranks).walk_all():
                    pass
            except EvenstepError:
                return True
        return False

    def _expected(self) -> Counter[SegmentKey]:
        recipe = self.case.recipe
        found, _ = segments_of(self.case.lengths, recipe.longest_segment, recipe.overflow)
        columns = (found.sample.tolist(), found.start.tolist(), found.length.tolist())
        return Counter(zip(*columns, strict=True))

    def _recipe(self, ranks: int) -> Recipe:
        topology = replace(self.case.recipe.topology, dp=ranks)
        return replace(self.case.recipe, topology=topology)

    def _stream(self, ranks: int, rank: int = 0) -> PlannedStream:
        world, source = World(rank, ranks), self._source()
        if self.plan_ranks is not None:
            return PlannedStream.from_plan(source, self._plan(), world=world)
        stream = PlannedStream(
            source,
            self._recipe(ranks),
            world=world,
            seed=self.seed,
            shuffle=self.shuffle,
            groups=self.case.groups,
            columns=self.case.columns,
        )
        stream.set_epoch(self.epoch)
        return stream

    def _source(self) -> Any:
        if self.source == "lengths":
            return Lengths(self.case.lengths)
        return source_of(f"measured {self.source}", tuple((n,) for n in self.case.lengths.tolist()))

    def _plan(self) -> Plan:
        assert self.plan_ranks is not None
        stream = replace(self, plan_ranks=None)._stream(self.plan_ranks)
        return Plan.from_bytes(stream.plan_epoch(self.epoch).to_bytes())

    def _run(self, stage: Stage, state: Any, seen: Counter[SegmentKey]) -> Any:
        """Run a stage from a state, count its segments, and return the state after it."""
        alone, shared = self._stream(stage.ranks, stage.ranks - 1), self._stream(stage.ranks)
        if state is not None:
            for stream in (alone, shared):
                stream.load_state_dict(json.loads(json.dumps(state)))
        recipe, state, left = shared.recipe, shared.start().to_dict(), stage.micro_batches
        budget = None if recipe.overflow == "alone" else recipe.layout.budget
        for steps, states in whole_steps(shared, alone, stage.workers):
            assert len({len(step) for step in steps}) == 1, "ranks differ in micro-batches"
            if self.source != "lengths":
                seed = 0 if self.plan_ranks is not None else self.seed
                epoch = 0 if self.plan_ranks is not None else self.epoch
                check_draws(steps[0], epoch, seed)
            for wave, after in enumerate(states):
                if left == 0:
                    return state
                for micro in (step.micro_batches[wave] for step in steps):
                    assert budget is None or micro.slots <= budget, "over the budget"
                    seen.update(keys_of(micro))
                state, left = after, None if left is None else left - 1
        return state


def whole_steps(
    shared: PlannedStream, alone: PlannedStream, workers: int
) -> Iterator[tuple[list[Step], list[dict[str, Any]]]]:
    """(every step on all ranks, the state after each of its micro-batches).

    `alone` is the same stream on one rank; its workers take turns and must find the same steps.
    """
    ranks, start = shared.world.size, shared.start()
    before = StreamPosition.of(start)
    turns = [alone.walk(worker, workers) for worker in range(workers)]
    for number, steps in enumerate(shared.walk_all()):
        own, mine = next(turns[number % workers]), steps[alone.world.rank]
        assert own.fingerprint == mine.fingerprint
        assert own.cursor == mine.cursor
        assert keys_of_all(own.micro_batches) == keys_of_all(mine.micro_batches)
        after = StreamPosition.of(own.cursor)
        done = before.inside[-1][1] if before.inside and before.inside[-1][0] == ranks else 0
        inside = [before.within(ranks, done + wave + 1) for wave in range(len(own) - 1)]
        yield steps, [shared.cursor(at).to_dict() for at in (*inside, after)]
        before = after
    assert all(next(turn, None) is None for turn in turns), "workers have more steps than the rank"


def keys_of(micro: MicroBatch) -> list[SegmentKey]:
    """The segments of a micro-batch."""
    segments = micro.segments
    columns = (segments.sample.tolist(), segments.start.tolist(), segments.length.tolist())
    return list(zip(*columns, strict=True))


def keys_of_all(micros: Iterable[MicroBatch]) -> list[list[SegmentKey]]:
    """The segments of each micro-batch."""
    return [keys_of(micro) for micro in micros]


def planned_cases(max_samples: int = 40) -> SearchStrategy[PlannedCase]:
    """Every recipe that `cases` makes, on few ranks, with one to three stops."""
    counts = st.sampled_from([1, 1, 2, 3, 4, 6])
    lasting = st.one_of(st.integers(0, 3), st.integers(0, 12))

    @st.composite
    def case(draw: DrawFn) -> PlannedCase:
        plan_ranks = draw(st.sampled_from([None, None, None, 1, 2, 4, 6]))
        allowed = counts
        if plan_ranks is not None:
            allowed = st.sampled_from([n for n in (1, 2, 3, 4, 6) if plan_ranks % n == 0])
        stops = draw(st.integers(1, 3))
        stages = [
            Stage(draw(allowed), draw(st.integers(1, 3)), draw(lasting)) for _ in range(stops)
        ]
        made = draw(cases(max_samples))
        if draw(st.sampled_from([True, False])):  # the kind of step that depends on ranks
            made = replace(made, recipe=_of_micro_batches(made.recipe, draw(st.integers(2, 4))))
        return PlannedCase(
            made,
            draw(st.integers(0, 3)),
            draw(st.booleans()),
            draw(st.integers(0, 2)),
            (*stages, Stage(draw(allowed), 1, None)),
            plan_ranks,
            draw(st.sampled_from(["lengths", "lengths", *MEASURED])),
        )

    return case()


def _of_micro_batches(recipe: Recipe, count: int) -> Recipe:
    """The same recipe with steps of several micro-batches, where that is allowed."""
    if recipe.second_work is not None and recipe.second_work.same_waves:
        return recipe
    return replace(recipe, steps=Steps(micro_batches=count * recipe.topology.multiple))


KINDS: dict[str, Callable[[int], SearchStrategy[Any]]] = {
    "planned": planned_cases,
    "pooled": pooled_cases,
    "pooled-known": partial(pooled_cases, known=True),
    "pooled-loader": partial(pooled_cases, known=True, in_loader=True),
}
"""From the largest number of samples to the cases of a kind of stream."""
