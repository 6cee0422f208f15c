"""Resume: checks that a stream continues from each of its states as without interruption.

For any iterable with `state_dict` and `load_state_dict`: ours, torchdata's, or your own.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeAlias

from evenstep.core.step import Cursor
from evenstep.errors import EvenstepError, InputError
from evenstep.testing.content import content_of, glimpse


class ResumeError(EvenstepError, AssertionError):
    """A resumed stream differs from an uninterrupted one."""


class Resumable(Protocol):
    """An iterable whose position can be saved and restored."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> Any:
        """The position after the item that was yielded last."""

    def load_state_dict(self, state: Any, /) -> None:
        """Start after the item that the state was taken at."""


Make: TypeAlias = Callable[[], Resumable]
Key: TypeAlias = Callable[[Any], Any]

_REMEDY = (
    "state_dict must hold everything that determines the next items: the position, the contents of "
    "pools and buffers, the state of random generators; as of the item that was yielded last, not "
    "of items read ahead."
)


def assert_exact_resume(make: Make, *, steps: int | None = None, key: Key | None = None) -> None:
    """Restore a stream from every state, and compare what follows with an uninterrupted run.

    Raises a `ResumeError` that names the state and the item. Also checks a run that restarts after
    every item, that states do not change after `state_dict` has returned them, and that resuming
    from the `cursor` of an item, if it has one, gives the same. States go through JSON if that
    preserves them; otherwise they are copied.

    make   returns a new stream, the same each time
    steps  number of items to check; needed for an endless stream
    key    from an item to the value that is compared (default: its whole contents)

    >>> import numpy as np
    >>> from evenstep import Packed, Recipe, Steps
    >>> from evenstep.data import Lengths
    >>> from evenstep.data.planned import PlannedStream
    >>> recipe = Recipe(layout=Packed(max_tokens=8), steps=Steps(samples=2))
    >>> assert_exact_resume(lambda: PlannedStream(Lengths(np.array([5, 3, 4, 2, 7])), recipe))
    """
    whole = _record(make, steps, key)
    for done, (given, copied) in enumerate(zip(whole.given, whole.states, strict=True)):
        if content_of(given) != content_of(copied):
            raise ResumeError(
                f"the state {_after(done)} changed after state_dict returned it. Let state_dict "
                f"return a copy."
            )
    for done, state in enumerate(whole.states):
        _compare(make, key, whole, state, done, f"from the state {_after(done)}")
        cursor = whole.cursors[done]
        if cursor is not None and is_cursor(state) and cursor != state:
            _compare(make, key, whole, cursor, done, f"from the cursor of item {done - 1}")
    _restart_after_each(make, key, whole)


@dataclass(frozen=True, slots=True)
class _Run:
    """An uninterrupted run: its items, and the states before the first and after each."""

    contents: list[Any]
    glimpses: list[str]
    given: list[Any]
    """States as `state_dict` returned them."""
    states: list[Any]
    """Copies of them, made immediately."""
    cursors: list[Any]
    """The cursor of the item before each state, as plain data; None if it has none."""
    ended: bool
    """Whether the stream ended before `steps` items."""


def _record(make: Make, steps: int | None, key: Key | None) -> _Run:
    stream = make()
    given, contents, glimpses = [stream.state_dict()], list[Any](), list[str]()
    states, cursors = [copied(given[0])], list[Any]([None])
    for item in islice(stream, steps):
        contents.append(compared(item, key))
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
    for item in islice(stream, len(expected) + whole.ended):  # one more, to check the end
        if found == len(expected):
            raise ResumeError(
                f"resumed {where}, the stream continues with {glimpse(item)} after its end: data "
                f"is repeated. {_REMEDY}"
            )
        content = compared(item, key)
        if content != expected[found]:
            raise ResumeError(_difference(whole, done + found, content, glimpse(item), where))
        found += 1
    if found < len(expected):
        raise ResumeError(
            f"resumed {where}, the stream ends after {found} items; expected {len(expected)}. The "
            f"first missing item is {whole.glimpses[done + found]}: data is lost. {_REMEDY}"
        )
    if content_of(handed) != content_of(state):
        raise ResumeError(
            f"resumed {where}, the stream changed the state that was loaded. Let load_state_dict "
            f"copy what it keeps."
        )


def _restart_after_each(make: Make, key: Key | None, whole: _Run) -> None:
    """Restart after every item, each time from the state that the previous run left."""
    state = whole.states[0]
    for at, expected in enumerate(whole.contents):
        stream = make()
        stream.load_state_dict(copied(state))
        where = f"{at} times, each time after one item,"
        for item in islice(stream, 1):
            content = compared(item, key)
            if content != expected:
                raise ResumeError(_difference(whole, at, content, glimpse(item), where))
            state = copied(stream.state_dict())
            break
        else:
            raise ResumeError(
                f"resumed {where} the stream ends before item {at}, {whole.glimpses[at]}: data is "
                f"lost. {_REMEDY}"
            )


def _difference(whole: _Run, at: int, content: Any, seen: str, where: str) -> str:
    expected = whole.glimpses[at]
    if seen == expected:
        seen += ", which has other contents"
    if content in whole.contents[:at]:
        meaning = f"item {whole.contents.index(content)} comes again: data is repeated"
    elif content in whole.contents[at:]:
        meaning = f"item {whole.contents.index(content)} comes too early: data is lost"
    else:
        meaning = "an uninterrupted run has no such item"
    return (
        f"resumed {where}, item {at} differs from that of an uninterrupted run: expected "
        f"{expected}, got {seen}; {meaning}. {_REMEDY}"
    )


def _after(done: int) -> str:
    return "before the first item" if done == 0 else f"after item {done - 1}"


def compared(item: Any, key: Key | None) -> Any:
    """The value by which an item is compared: its contents, or the result of `key`."""
    return content_of(item) if key is None else key(item)


def copied(state: Any) -> Any:
    """A copy of a state: through JSON if that preserves it, else a deep copy."""
    try:
        again = json.loads(json.dumps(state))
        if content_of(again) == content_of(state):
            return again
    except (TypeError, ValueError, InputError):
        pass
    return copy.deepcopy(state)


def is_cursor(state: Any) -> bool:
    """Whether a state is an Evenstep cursor as plain data."""
    return isinstance(state, Mapping) and "evenstep_cursor" in state
