"""Elastic resume: does a stream go on with other ranks and workers, each sample exactly once?

For any stream that `resume` can check, and that has a share for each rank and worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from evenstep.core.cursor import Cursor
from evenstep.core.identity import sample_name
from evenstep.core.step import Step
from evenstep.core.world import World
from evenstep.data.streams.pooled import merge_cursors
from evenstep.errors import InputError
from evenstep.testing.content import content_of
from evenstep.testing.resume import Key, Resumable, ResumeError, copied, is_cursor, told_apart


def assert_elastic_resume(
    make: Callable[[World, int], Resumable],
    shapes: Sequence[tuple[int, int]],
    *,
    after: Iterable[int] | None = None,
    samples_of: Callable[[Any], Iterable[Hashable]] | None = None,
    epoch: Iterable[Hashable] | None = None,
    merge: Callable[[Sequence[Any]], Any] | None = None,
    key: Key | None = None,
) -> None:
    """Run on the first of `shapes`, stop after every step, go on with each of the others. Every
    sample of the epoch must run exactly once before and after together, and a repetition must
    give the same order. Last, one run goes through all shapes, a step on each.

    make        gives the stream of one rank with so many workers: finite, and waiting for nobody
    shapes      (ranks, workers), two or more
    after       after how many steps to stop; every number of them by default
    samples_of  the samples of an item; by default those of a `Step`
    epoch       all samples that there are; by default those that an uninterrupted run gives
    merge       the ranks' states as one; by default `merge_cursors` where streams are pooled, and
                any of them where all are equal
    key         what tells items apart, as in `assert_exact_resume`

    >>> import numpy as np
    >>> from evenstep import Packed, Recipe, Steps, Topology
    >>> from evenstep.data.sources.lengths import Lengths
    >>> from evenstep.data.streams.planned import PlannedStream
    >>> def make(world: World, workers: int) -> PlannedStream:
    ...     layout, ranks = Packed(max_tokens=8), Topology(dp=world.size)
    ...     recipe = Recipe(layout=layout, steps=Steps(samples=3), topology=ranks)
    ...     return PlannedStream(Lengths(np.array([5, 3, 4, 2, 7, 1, 1])), recipe, world=world)
    >>> assert_elastic_resume(make, [(2, 1), (1, 1), (3, 1)])
    """
    if len(shapes) < 2:
        raise InputError(
            f"{len(shapes)} shapes were given, so nothing changes. Give two or more, as "
            f"(ranks, workers)."
        )
    job = _Elastic(make, samples_of or _samples_of_step, merge or _merged, key)
    whole = job.run(shapes[0])
    seen = [sample for rank in whole for samples in rank.samples for sample in samples]
    everything = Counter(seen if epoch is None else epoch)
    if epoch is None:
        everything = Counter(dict.fromkeys(everything, 1))
    _each_once(Counter(seen), everything, f"without any stop, {_shape(shapes[0])}")
    longest = max(len(rank.samples) for rank in whole)
    for done in range(longest + 1) if after is None else after:
        state = job.merge([rank.states[min(done, len(rank.samples))] for rank in whole])
        before = _first(whole, done)
        for shape in shapes[1:]:
            where = f"after {done} steps of {_shape(shapes[0])}, {_shape(shape)}"
            rest, again = job.run(shape, state), job.run(shape, state)
            _each_once(before + _first(rest, None), everything, where)
            _same_order(rest, again, where)
    _through_all(job, shapes, everything)


@dataclass(frozen=True, slots=True)
class _Rank:
    """What one rank gave out, and its state before the first step and behind each."""

    samples: list[list[Hashable]]
    contents: list[Any]
    states: list[Any]


@dataclass(frozen=True, slots=True)
class _Elastic:
    make: Callable[[World, int], Resumable]
    samples_of: Callable[[Any], Iterable[Hashable]]
    merge: Callable[[Sequence[Any]], Any]
    key: Key | None

    def run(
        self, shape: tuple[int, int], state: Any = None, steps: int | None = None
    ) -> list[_Rank]:
        """Every rank of a shape, from a state on."""
        ranks, workers = shape
        return [self._rank(World(rank, ranks), workers, state, steps) for rank in range(ranks)]

    def _rank(self, world: World, workers: int, state: Any, steps: int | None) -> _Rank:
        stream = self.make(world, workers)
        if state is not None:
            stream.load_state_dict(copied(state))
        rank = _Rank([], [], [copied(stream.state_dict())])
        for item in islice(stream, steps):
            rank.samples.append(list(self.samples_of(item)))
            rank.contents.append(told_apart(item, self.key))
            rank.states.append(copied(stream.state_dict()))
        return rank


def _through_all(
    job: _Elastic, shapes: Sequence[tuple[int, int]], everything: Counter[Hashable]
) -> None:
    """One step on each shape, and the rest of the epoch on the last."""
    seen: Counter[Hashable] = Counter()
    state: Any = None
    for at, shape in enumerate(shapes):
        run = job.run(shape, state, None if at + 1 == len(shapes) else 1)
        seen += _first(run, None)
        state = job.merge([rank.states[-1] for rank in run])
    _each_once(seen, everything, f"a step on each of {', '.join(map(_shape, shapes))} in turn")


def _first(run: list[_Rank], steps: int | None) -> Counter[Hashable]:
    """How often each sample ran in the first steps."""
    return Counter(sample for rank in run for samples in rank.samples[:steps] for sample in samples)


def _each_once(seen: Counter[Hashable], expected: Counter[Hashable], where: str) -> None:
    repeated, lost = seen - expected, expected - seen
    if not (repeated or lost):
        return
    faults = [
        f"{verb} {_some(samples)}"
        for verb, samples in (("repeat", repeated), ("lose", lost))
        if samples
    ]
    raise ResumeError(
        f"{where}, {' and '.join(faults)} of {expected.total()} samples. What a step holds must "
        f"follow from the merged state alone, for any number of ranks and workers: let it say "
        f"what every rank and worker has yet to give out, pools and buffers included."
    )


def _same_order(rest: list[_Rank], again: list[_Rank], where: str) -> None:
    for number, (one, other) in enumerate(zip(rest, again, strict=True)):
        if one.contents == other.contents:
            continue
        at = next(
            (
                step
                for step, (a, b) in enumerate(zip(one.contents, other.contents, strict=False))
                if a != b
            ),
            min(len(one.contents), len(other.contents)),
        )
        first, second = (
            _some(Counter(rank.samples[at])) if at < len(rank.samples) else "its end"
            for rank in (one, other)
        )
        raise ResumeError(
            f"{where}, resumed twice from one state, give two orders: step {at} of rank {number} "
            f"is {first}, and then {second}. A run that cannot be repeated cannot be debugged, "
            f"and ranks may disagree. Let the order follow from a seed and the state."
        )


def _samples_of_step(item: Any) -> list[Hashable]:
    """The sample number of every segment of a step; (number, start) for what was split off."""
    if not isinstance(item, Step):
        raise InputError(
            f"the samples of a {type(item).__name__} are unknown, so they cannot be counted. Pass "
            f"`samples_of`, a function from an item to the ids of its samples."
        )
    segments = [micro.segments for micro in item.micro_batches]
    return [
        (number, start) if start else number
        for each in segments
        for number, start in zip(each.sample.tolist(), each.start.tolist(), strict=True)
    ]


def _merged(states: Sequence[Any]) -> Any:
    first = states[0]
    if is_cursor(first) and first["belongs"].get("stream") == "pooled":
        cursors = [Cursor.from_dict(state) for state in states]
        done = max(cursor.step for cursor in cursors)  # who ended earlier has waited since
        return merge_cursors([replace(cursor, step=done) for cursor in cursors]).to_dict()
    if any(content_of(state) != content_of(first) for state in states):
        raise InputError(
            "the states of the ranks differ, and how they make one is unknown. Pass `merge`, a "
            "function from the states of all ranks to one that any of them can load."
        )
    return first


def _shape(shape: tuple[int, int]) -> str:
    ranks, workers = shape
    return f"{ranks} rank{'s' * (ranks != 1)} x {workers} worker{'s' * (workers != 1)}"


def _some(samples: Counter[Hashable]) -> str:
    names = [_name(sample) for sample in samples]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _name(sample: Hashable) -> str:
    match sample:
        case int(number):
            return sample_name(number)
        case (int(number), int(start)):
            return f"{sample_name(number)} from token {start} on"
    return str(sample)
