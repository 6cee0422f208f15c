"""Prefetch: the next micro-batches, prepared in a thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")
_JOIN_TIMEOUT = 10.0  # seconds
_POLL = 0.5  # seconds


class Prefetch(Generic[T]):
    """Iterates over items in a thread, at most `ahead` items in advance of the consumer.

    With the one in use, `ahead + 1` items are alive. With `ahead=0` there is no thread. An error
    in the thread is raised in place of the item, with a note that says which item: `name` of its
    position. `abandon` is called when no more items are taken, so that a blocked source can end.

    >>> list(Prefetch(iter("abc"), ahead=2))
    ['a', 'b', 'c']
    """

    def __init__(
        self,
        items: Iterable[T],
        ahead: int,
        abandon: Callable[[], None] = lambda: None,
        name: Callable[[int], str] = "item {}".format,
    ) -> None:
        self._items, self._ahead, self._abandon, self._name = items, ahead, abandon, name
        self.waited = 0.0
        """Seconds that the consumer waited."""
        self.preparing = 0.0
        """Seconds spent preparing items, in either thread."""

    def __iter__(self) -> Generator[T, None, None]:
        if self._ahead:
            yield from self._threaded()
            return
        try:
            yield from self._timed()
        finally:
            self.waited = self.preparing
            self._abandon()

    def _threaded(self) -> Generator[T, None, None]:
        entries: queue.SimpleQueue[tuple[T, ...] | BaseException] = queue.SimpleQueue()
        room: queue.SimpleQueue[None] = queue.SimpleQueue()
        stop = threading.Event()
        for _ in range(self._ahead):
            room.put(None)

        def prepare() -> None:
            try:
                for item in self._timed(lambda: room.get() is None and not stop.is_set()):
                    entries.put((item,))
                    del item
                entries.put(())
            except BaseException as error:
                entries.put(error)

        thread = threading.Thread(target=prepare, name="evenstep-prefetch", daemon=True)
        thread.start()
        try:
            while True:
                began = time.perf_counter()
                entry: tuple[T, ...] | BaseException | None = None
                while entry is None:  # polls, so that `Watch` can interrupt this thread
                    with suppress(queue.Empty):
                        entry = entries.get(timeout=_POLL)
                self.waited += time.perf_counter() - began
                if isinstance(entry, BaseException):
                    raise entry
                if not entry:
                    return
                room.put(None)  # the item in use does not count as prepared
                (item,) = entry
                del entry
                yield item
                del item
        finally:
            stop.set()
            room.put(None)
            self._abandon()
            # A thread blocked in its source for longer ends with the next item.
            thread.join(_JOIN_TIMEOUT)

    def _timed(self, go_on: Callable[[], bool] = lambda: True) -> Generator[T, None, None]:
        """The items, timed; an error that is raised instead of one has a note with its name."""
        items, position = iter(self._items), 0
        while go_on():
            began = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            except Exception as error:
                with suppress(Exception):
                    error.add_note(f"while preparing {self._name(position)}")
                raise
            finally:
                self.preparing += time.perf_counter() - began
            position += 1
            yield item
            del item
