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
        return self._threaded() if self._ahead else self._direct()

    def _direct(self) -> Generator[T, None, None]:
        try:
            items = self._named()
            while True:
                began = time.perf_counter()
                try:
                    item = next(items)
                except StopIteration:
                    return
                finally:
                    self.preparing += time.perf_counter() - began
                    self.waited += time.perf_counter() - began
                yield item
                del item
        finally:
            self._abandon()

    def _threaded(self) -> Generator[T, None, None]:
        ready: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()
        room = threading.Semaphore(self._ahead)
        stop = threading.Event()
        thread = threading.Thread(
            target=self._prepare,
            args=(ready.put, room, stop),
            name="evenstep-prefetch",
            daemon=True,
        )
        thread.start()
        try:
            while True:
                began = time.perf_counter()
                found = _get(ready)
                self.waited += time.perf_counter() - began
                if found is None:
                    return
                if isinstance(found, BaseException):
                    raise found
                room.release()  # the item in use does not count as prepared
                (item,) = found
                del found
                yield item
                del item
        finally:
            stop.set()
            room.release()
            self._abandon()
            # A thread blocked in its source for longer ends with the next item.
            thread.join(_JOIN_TIMEOUT)

    def _named(self) -> Iterator[T]:
        """The items; an error that is raised instead of one has a note with its name."""
        position = 0
        try:
            for item in self._items:
                position += 1
                yield item
                del item
        except Exception as error:
            with suppress(Exception):
                error.add_note(f"while preparing {self._name(position)}")
            raise

    def _prepare(
        self,
        put: Callable[[tuple[T] | BaseException | None], None],
        room: threading.Semaphore,
        stop: threading.Event,
    ) -> None:
        try:
            items = self._named()
            while True:
                room.acquire()
                if stop.is_set():
                    return
                began = time.perf_counter()
                try:
                    item = next(items)
                except StopIteration:
                    put(None)
                    return
                finally:
                    self.preparing += time.perf_counter() - began
                put((item,))
                del item
        except BaseException as error:
            put(error)


def _get(ready: queue.SimpleQueue[Any]) -> Any:
    """The next entry. Polls, so that `Watch` can interrupt the waiting thread."""
    while True:
        with suppress(queue.Empty):
            return ready.get(timeout=_POLL)
