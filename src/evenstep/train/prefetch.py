"""Prefetch: the next micro-batches are prepared while the current one runs, and no more."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_PATIENCE = 10.0  # seconds
_LOOK = 0.5  # seconds


class Prefetch(Generic[T]):
    """Takes items from an iterable in a thread, at most `ahead` of whoever consumes them.

    Counting the one that is in use, `ahead + 1` items are alive. With `ahead` 0 there is no
    thread. An error in the thread is raised where the item would have been. `abandon` is called
    when nothing more is taken, and ends a source that may be waiting.

    >>> list(Prefetch(iter("abc"), ahead=2))
    ['a', 'b', 'c']
    """

    def __init__(
        self, items: Iterable[T], ahead: int, abandon: Callable[[], None] = lambda: None
    ) -> None:
        self._items, self._ahead, self._abandon = items, ahead, abandon
        self.waited = 0.0
        """Seconds for which the consumer had nothing to do."""
        self.preparing = 0.0
        """Seconds that preparing took, in whichever thread."""

    def __iter__(self) -> Generator[T, None, None]:
        return self._threaded() if self._ahead else self._direct()

    def _direct(self) -> Generator[T, None, None]:
        items = iter(self._items)
        try:
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
                room.release()  # what is in use no longer counts as prepared
                (item,) = found
                del found
                yield item
                del item
        finally:
            stop.set()
            room.release()
            self._abandon()
            # Whoever is stuck in its source for longer ends when the source gives something.
            thread.join(_PATIENCE)

    def _prepare(
        self,
        put: Callable[[tuple[T] | BaseException | None], None],
        room: threading.Semaphore,
        stop: threading.Event,
    ) -> None:
        try:
            items = iter(self._items)
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
    """The next thing. Python runs now and then, so that `Watch` can interrupt who waits here."""
    while True:
        with suppress(queue.Empty):
            return ready.get(timeout=_LOOK)
