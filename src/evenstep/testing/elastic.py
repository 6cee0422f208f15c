"""Elastic resume: checks that a stream continues on other ranks and workers, each sample once.

For any stream that `resume` can check and that shares samples between ranks and workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from evenstep.core.ragged import sample_name
from evenstep.core.recipe import World
from evenstep.core.step import Cursor, Step
from evenstep.core.text import listed
from evenstep.data.pooled import merge_cursors
from evenstep.errors import InputError
from evenstep.testing.content import content_of
from evenstep.testing.resume import Key, Resumable, ResumeError, compared, copied, is_cursor


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
    """Run on the first of `shapes`, stop after every step, and continue on each of the others.

    Every sample of the epoch must run exactly once in total, and repeating a resume must give the
    same order. Finally, one run goes through all shapes with a step on each.

    make        from (world, workers) to the finite stream of one rank, without communication
    shapes      (ranks, workers), two or more
    after       numbers of steps after which to stop (default: all)
    samples_of  from an item to its sample ids (default: those of a `Step`)
    epoch       all sample ids (default: those of an uninterrupted run)
    merge       from the states of all ranks to one (default: `merge_cursors` for pooled streams;
                the common state if all are equal)
    key         from an item to the value that is compared, as in `assert_exact_resume`

    >>> import numpy as np
    >>> from evenstep import Packed, Recipe, Steps, Topology
    >>> from evenstep.data import Lengths
    >>> from evenstep.data.planned import PlannedStream
    >>> def make(world: World, workers: int) -> PlannedStream:
    ...     layout, ranks = Packed(max_tokens=8), Topology(dp=world.size)
    ...     recipe = Recipe(layout=layout, steps=Steps(samples=3), topology=ranks)
    ...     return PlannedStream(Lengths(np.array([5, 3, 4, 2, 7, 1, 1])), recipe, world=world)
    >>> assert_elastic_resume(make, [(2, 1), (1, 1), (3, 1)])
    """
    if len(shapes) < 2:
        raise InputError(f"expected two or more shapes, as (ranks, workers), got {len(shapes)}.")
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
    """What one rank yielded, and its states before the first step and after each."""

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
        """Run every rank of a shape, from a state."""
        ranks, workers = shape
        return [self._rank(World(rank, ranks), workers, state, steps) for rank in range(ranks)]

    def _rank(self, world: World, workers: int, state: Any, steps: int | None) -> _Rank:
        stream = self.make(world, workers)
        if state is not None:
            stream.load_state_dict(copied(state))
        rank = _Rank([], [], [copied(stream.state_dict())])
        for item in islice(stream, steps):
            rank.samples.append(list(self.samples_of(item)))
            rank.contents.append(compared(item, self.key))
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
    """How often each sample ran in the first `steps` steps."""
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
        f"{where}, {' and '.join(faults)} of {expected.total()} samples. The merged state must "
        f"determine what remains for any number of ranks and workers, including the contents of "
        f"pools and buffers."
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
            _some(Counter(rank.samples[at])) if at < len(rank.samples) else "the end"
            for rank in (one, other)
        )
        raise ResumeError(
            f"{where}, give different orders when resumed twice from one state: step {at} of rank "
            f"{number} is {first} and then {second}. The seed and the state must determine the "
            f"order."
        )


def _samples_of_step(item: Any) -> list[Hashable]:
    """The sample id of every segment of a step; (id, start) for the later segments of a sample."""
    if not isinstance(item, Step):
        raise InputError(
            f"the samples of a {type(item).__name__} are unknown. Pass `samples_of`, a function "
            f"from an item to its sample ids."
        )
    segments = [micro.segments for micro in item.micro_batches]
    return [
        (sample_id, start) if start else sample_id
        for each in segments
        for sample_id, start in zip(each.sample.tolist(), each.start.tolist(), strict=True)
    ]


def _merged(states: Sequence[Any]) -> Any:
    first = states[0]
    if is_cursor(first) and first["belongs"].get("stream") == "pooled":
        cursors = [Cursor.from_dict(state) for state in states]
        done = max(cursor.step for cursor in cursors)  # ranks that ended earlier have waited
        return merge_cursors([replace(cursor, step=done) for cursor in cursors]).to_dict()
    if any(content_of(state) != content_of(first) for state in states):
        raise InputError(
            "the states of the ranks differ. Pass `merge`, a function from the states of all ranks "
            "to one that every rank can load."
        )
    return first


def _shape(shape: tuple[int, int]) -> str:
    ranks, workers = shape
    return f"{ranks} rank{'s' * (ranks != 1)} x {workers} worker{'s' * (workers != 1)}"


def _some(samples: Counter[Hashable]) -> str:
    return listed([_name(sample) for sample in samples], most=5)


def _name(sample: Hashable) -> str:
    match sample:
        case int(sample_id):
            return sample_name(sample_id)
        case (int(sample_id), int(start)):
            return f"{sample_name(sample_id)} from token {start} on"
    return str(sample)
