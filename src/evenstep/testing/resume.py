"""Resume: does a stream go on from any of its states as if it had never stopped?

For any iterable with `state_dict` and `load_state_dict`: ours, torchdata's, or your own.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeAlias

from evenstep.core.cursor import Cursor
from evenstep.core.identity import sample_name
from evenstep.core.step import Step
from evenstep.core.world import World
from evenstep.data.pooled import merge_cursors
from evenstep.errors import EvenstepError, InputError
from evenstep.testing.content import content_of, glimpse


class ResumeError(EvenstepError, AssertionError):
    """A stream that does not go on as if it had never stopped."""


class Resumable(Protocol):
    """A stream that knows where it is."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> Any:
        """The place behind the item that was given out last."""

    def load_state_dict(self, state: Any, /) -> None:
        """Begin behind the item that the state was taken after."""


Make: TypeAlias = Callable[[], Resumable]
Key: TypeAlias = Callable[[Any], Any]

_HOLD = (
    "Let state_dict hold all that decides what comes next: the position, what waits in a pool or "
    "buffer, the state of random generators; and let it stand behind the item that was given out "
    "last, not behind what was read ahead."
)


# Exact ------------------------------------------------------------------------------------------


def assert_exact_resume(make: Make, *, steps: int | None = None, key: Key | None = None) -> None:
    """Restore a stream at every state, from before its first item to behind its last, and compare
    what follows with a run that was never interrupted. Raises a `ResumeError` that says which
    state, which item, and what that means.

    Checked are also a run that stops after every single item, that states do not change once
    they were handed out, and that the `cursor` of an item, if it has one, is as good as the state.
    States pass through JSON where they can, else they are copied.

    make   gives a fresh stream, each time the same
    steps  how many items to look at; needed for an endless stream
    key    what tells items apart; by default everything they hold, to the bit (`content_of`)

    >>> import numpy as np
    >>> from evenstep import Packed, Recipe, Steps
    >>> from evenstep.data.lengths import Lengths
    >>> from evenstep.data.planned import PlannedStream
    >>> recipe = Recipe(layout=Packed(max_tokens=8), steps=Steps(samples=2))
    >>> assert_exact_resume(lambda: PlannedStream(Lengths(np.array([5, 3, 4, 2, 7])), recipe))
    """
    whole = _record(make, steps, key)
    for done, (given, copied) in enumerate(zip(whole.given, whole.states, strict=True)):
        if content_of(given) != content_of(copied):
            raise ResumeError(
                f"the state {_behind(done)} changed after it was handed out, so a checkpoint that "
                f"is written a moment later holds another place. Let state_dict return a copy."
            )
    for done, state in enumerate(whole.states):
        _compare(make, key, whole, state, done, f"from the state {_behind(done)}")
        cursor = whole.cursors[done]
        if cursor is not None and _is_cursor(state) and cursor != state:
            _compare(make, key, whole, cursor, done, f"from the cursor of item {done - 1}")
    _restart_after_each(make, key, whole)


@dataclass(frozen=True, slots=True)
class _Run:
    """An uninterrupted run: its items, and the state before the first and behind each."""

    contents: list[Any]
    glimpses: list[str]
    given: list[Any]
    """States as they were handed out."""
    states: list[Any]
    """The same, copied at once."""
    cursors: list[Any]
    """What the item before a state carries of its place, as plain data; None where nothing."""
    ended: bool
    """Whether the stream came to its end, rather than to the last item that was asked for."""


def _record(make: Make, steps: int | None, key: Key | None) -> _Run:
    stream = make()
    given, contents, glimpses = [stream.state_dict()], list[Any](), list[str]()
    states, cursors = [_copied(given[0])], list[Any]([None])
    for item in islice(stream, steps):
        contents.append(_told_apart(item, key))
        glimpses.append(glimpse(item))
        given.append(stream.state_dict())
        states.append(_copied(given[-1]))
        cursor = getattr(item, "cursor", None)
        cursors.append(_copied(cursor.to_dict()) if isinstance(cursor, Cursor) else None)
    ended = steps is None or len(contents) < steps
    return _Run(contents, glimpses, given, states, cursors, ended)


def _compare(make: Make, key: Key | None, whole: _Run, state: Any, done: int, where: str) -> None:
    """Resume from a state and compare all that follows."""
    stream, handed = make(), _copied(state)
    stream.load_state_dict(handed)
    expected = whole.contents[done:]
    found = 0
    for item in islice(stream, len(expected) + whole.ended):  # one more, to see it end
        if found == len(expected):
            raise ResumeError(
                f"resumed {where}, the stream goes on with {glimpse(item)} where it ended before: "
                f"data is repeated. {_HOLD}"
            )
        content = _told_apart(item, key)
        if content != expected[found]:
            raise ResumeError(_difference(whole, done + found, content, glimpse(item), where))
        found += 1
    if found < len(expected):
        raise ResumeError(
            f"resumed {where}, the stream ends after {found} items although {len(expected)} "
            f"should follow; the first that is missing is {whole.glimpses[done + found]}: data is "
            f"lost. {_HOLD}"
        )
    if content_of(handed) != content_of(state):
        raise ResumeError(
            f"resumed {where}, the stream changed the state that it was given, so a second resume "
            f"from it would begin elsewhere. Let load_state_dict copy what it keeps."
        )


def _restart_after_each(make: Make, key: Key | None, whole: _Run) -> None:
    """Run as many processes as there are items, each from the state that the one before left."""
    state = whole.states[0]
    for at, expected in enumerate(whole.contents):
        stream = make()
        stream.load_state_dict(_copied(state))
        where = f"{at} times, each time after one item,"
        for item in islice(stream, 1):
            content = _told_apart(item, key)
            if content != expected:
                raise ResumeError(_difference(whole, at, content, glimpse(item), where))
            state = _copied(stream.state_dict())
            break
        else:
            raise ResumeError(
                f"resumed {where} the stream ends before item {at}, {whole.glimpses[at]}: data is "
                f"lost. {_HOLD}"
            )


def _difference(whole: _Run, at: int, content: Any, seen: str, where: str) -> str:
    expected = whole.glimpses[at]
    if seen == expected:
        seen += ", which looks the same but holds something else"
    if content in whole.contents[:at]:
        meaning = f"item {whole.contents.index(content)} comes again: data is repeated"
    elif content in whole.contents[at:]:
        meaning = f"item {whole.contents.index(content)} comes too early: data is lost"
    else:
        meaning = "no such item comes at all when the run is not interrupted"
    return (
        f"resumed {where}, item {at} is not the one that an uninterrupted run gives; expected "
        f"{expected}, got {seen}; {meaning}. {_HOLD}"
    )


def _behind(done: int) -> str:
    return "before the first item" if done == 0 else f"behind item {done - 1}"


def _told_apart(item: Any, key: Key | None) -> Any:
    return content_of(item) if key is None else key(item)


def _copied(state: Any) -> Any:
    """The state after a round trip through JSON, if that leaves it as it is; else a copy."""
    try:
        again = json.loads(json.dumps(state))
        if content_of(again) == content_of(state):
            return again
    except (TypeError, ValueError, InputError):
        pass
    return copy.deepcopy(state)


def _is_cursor(state: Any) -> bool:
    return isinstance(state, Mapping) and "evenstep_cursor" in state


# Elastic ----------------------------------------------------------------------------------------


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
    >>> from evenstep.data.lengths import Lengths
    >>> from evenstep.data.planned import PlannedStream
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
            stream.load_state_dict(_copied(state))
        rank = _Rank([], [], [_copied(stream.state_dict())])
        for item in islice(stream, steps):
            rank.samples.append(list(self.samples_of(item)))
            rank.contents.append(_told_apart(item, self.key))
            rank.states.append(_copied(stream.state_dict()))
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
    if _is_cursor(first) and first["belongs"].get("stream") == "pooled":
        return merge_cursors(states).to_dict()
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
