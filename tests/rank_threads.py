"""Ranks as threads of one process, which gather objects."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class RankThreads:
    """One thread per rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier, self._values = threading.Barrier(size), [None] * size

    def gather(self, rank: int, value: Any) -> list[Any]:
        """The values of all ranks."""
        self._values[rank] = value
        self._barrier.wait(300)
        values = list(self._values)
        self._barrier.wait(300)
        return values

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """The results of all ranks. An error on one of them ends the others, and is raised."""

        def guarded(rank: int) -> Any:
            try:
                return function(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            runs = [pool.submit(guarded, rank) for rank in range(self.size)]
        errors = [error for run in runs if (error := run.exception()) is not None]
        # Ranks that were ended by another have a broken barrier, which is not the cause.
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [run.result() for run in runs]
