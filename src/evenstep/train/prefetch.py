"""Prefetch: prepare the next items in a thread while the current one is in use."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

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
            for item in self._timed():
                yield item
                del item
        finally:
            self.waited = self.preparing
            self._abandon()

    def _threaded(self) -> Generator[T, None, None]:
        entries: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()
        room = threading.Semaphore(self._ahead)
        stop = threading.Event()
        thread = threading.Thread(
            target=self._prepare,
            args=(entries.put, room, stop),
            name="evenstep-prefetch",
            daemon=True,
        )
        thread.start()
        try:
            while True:
                began = time.perf_counter()
                entry = _get(entries)
                self.waited += time.perf_counter() - began
                if entry is None:
                    return
                if isinstance(entry, BaseException):
                    raise entry
                room.release()  # the item in use does not count as prepared
                (item,) = entry
                del entry
                yield item
                del item
        finally:
            stop.set()
            room.release()
            self._abandon()
            # A thread blocked in its source for longer ends with the next item.
            thread.join(_JOIN_TIMEOUT)

    def _prepare(
        self,
        put: Callable[[tuple[T] | BaseException | None], None],
        room: threading.Semaphore,
        stop: threading.Event,
    ) -> None:
        """The thread: prepare the next item whenever there is room."""
        try:
            items = self._timed()
            while True:
                room.acquire()
                if stop.is_set():
                    return
                try:
                    item = next(items)
                except StopIteration:
                    put(None)
                    return
                put((item,))
                del item
        except BaseException as error:
            put(error)

    def _timed(self) -> Iterator[T]:
        """The items, timed; an error that is raised instead of one has a note with its name."""
        items, position = iter(self._items), 0
        while True:
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


def _get(entries: queue.SimpleQueue[Any]) -> Any:
    """The next entry. Polls, so that `Watch` can interrupt the waiting thread."""
    while True:
        with suppress(queue.Empty):
            return entries.get(timeout=_POLL)
