"""Resume: does a stream go on from any of its states as if it had never stopped?

For any iterable with `state_dict` and `load_state_dict`: ours, torchdata's, or your own.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeAlias

from evenstep.core.cursor import Cursor
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
    >>> from evenstep.data.sources.lengths import Lengths
    >>> from evenstep.data.streams.planned import PlannedStream
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
        if cursor is not None and is_cursor(state) and cursor != state:
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
    states, cursors = [copied(given[0])], list[Any]([None])
    for item in islice(stream, steps):
        contents.append(told_apart(item, key))
        glimpses.append(glimpse(item))
        given.append(stream.state_dict())
        states.append(copied(given[-1]))
        cursor = getattr(item, "cursor", None)
        cursors.append(copied(cursor.to_dict()) if isinstance(cursor, Cursor) else None)
    ended = steps is None or len(contents) < steps
    return _Run(contents, glimpses, given, states, cursors, ended)


def _compare(make: Make, key: Key | None, whole: _Run, state: Any, done: int, where: str) -> None:
    """Resume from a state and compare all that follows."""
    stream, handed = make(), copied(state)
    stream.load_state_dict(handed)
    expected = whole.contents[done:]
    found = 0
    for item in islice(stream, len(expected) + whole.ended):  # one more, to see it end
        if found == len(expected):
            raise ResumeError(
                f"resumed {where}, the stream goes on with {glimpse(item)} where it ended before: "
                f"data is repeated. {_HOLD}"
            )
        content = told_apart(item, key)
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
        stream.load_state_dict(copied(state))
        where = f"{at} times, each time after one item,"
        for item in islice(stream, 1):
            content = told_apart(item, key)
            if content != expected:
                raise ResumeError(_difference(whole, at, content, glimpse(item), where))
            state = copied(stream.state_dict())
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


def told_apart(item: Any, key: Key | None) -> Any:
    """What tells an item apart from others: all that it holds, unless a key says it."""
    return content_of(item) if key is None else key(item)


def copied(state: Any) -> Any:
    """A state after a round trip through JSON, if that leaves it as it is; else a copy."""
    try:
        again = json.loads(json.dumps(state))
        if content_of(again) == content_of(state):
            return again
    except (TypeError, ValueError, InputError):
        pass
    return copy.deepcopy(state)


def is_cursor(state: Any) -> bool:
    """Whether a state is one of our cursors, as plain data."""
    return isinstance(state, Mapping) and "evenstep_cursor" in state
