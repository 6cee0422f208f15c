"""Count the tokens of a source: in this process, in several, or on Ray Data."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Literal, TypeAlias

import numpy as np

from evenstep.core.ragged import IntArray
from evenstep.data.corpus.files import statuses
from evenstep.data.sources.source import SampleSource, length_of
from evenstep.errors import EvenstepError, FileError, InputError

Engine: TypeAlias = Literal["processes", "ray"]
Progress: TypeAlias = Callable[[int, int], None]

_MOST = 512  # items that one task counts
_PER_WORKER = 16  # tasks, so that none waits long for the last
_BYTES = 1 << 22  # of files that are worth one more process


def counted(
    source: SampleSource, workers: int | None, engine: Engine, progress: Progress
) -> IntArray:
    """The number of tokens of every item: the same for any workers and engine."""
    total, done = len(source), 0
    counts = np.zeros(total, np.int64)
    if engine == "ray" and total:
        from evenstep.data.corpus.ray_counting import counted_on_ray

        parts = counted_on_ray(source, workers)
    else:
        parts = _counted_here(source, workers or 1)
    for items, found in parts:
        counts[items] = found
        done += len(items)
        progress(done, total)
    return counts


def default_workers(files: Iterable[Path]) -> int:
    """As many processes as this one has cores, and at most one per 4 MiB of files."""
    size = sum(status.st_size for _, status in statuses(files))
    free = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(free or 1, 1 + size // _BYTES)


def task_size(total: int, workers: int) -> int:
    """Items per task.

    >>> task_size(100, 2), task_size(10**6, 8)
    (3, 512)
    """
    return min(_MOST, max(1, total // (workers * _PER_WORKER)))


def count(source: SampleSource, item: int) -> int:
    """The number of tokens of an item. An error names its file and line."""
    try:
        found = source[item]
    except FileError:
        raise
    except Exception as error:
        raise unreadable_item(item, error) from None
    return sum(map(length_of, found if isinstance(found, list) else [found]))


def unreadable_item(item: int, error: BaseException) -> InputError:
    """The error for an item that raised `error`, with its file and line."""
    notes = [note.removeprefix("raised for ") for note in getattr(error, "__notes__", ())]
    where = notes[0] if notes else f"sample {item}"  # sources leave the place in a note
    said = str(error) if isinstance(error, EvenstepError) else f"{type(error).__name__}: {error}"
    return InputError(said if where in said else f"{where}: {said}")


def _counted_here(source: SampleSource, workers: int) -> Iterator[tuple[IntArray, IntArray]]:
    """Items and their numbers of tokens, in order."""
    total = len(source)
    size = task_size(total, workers)
    tasks = [np.arange(start, min(start + size, total)) for start in range(0, total, size)]
    if min(workers, len(tasks)) <= 1:
        yield from ((items, _counts(source, items)) for items in tasks)
    else:
        yield from _in_processes(source, tasks, min(workers, len(tasks)))


def _counts(source: SampleSource, items: IntArray) -> IntArray:
    return np.array([count(source, item) for item in items.tolist()], np.int64)


# Processes ---------------------------------------------------------------------------------------


def _in_processes(
    source: SampleSource, tasks: list[IntArray], workers: int
) -> Iterator[tuple[IntArray, IntArray]]:
    """Every process unpickles the source once, from a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "source")
        path.write_bytes(pickle.dumps(source))
        # Processes that are forked would inherit locks of the tokenizer's threads.
        pool = ProcessPoolExecutor(
            workers,
            mp_context=get_context("spawn"),
            initializer=signal.signal,
            initargs=(signal.SIGINT, signal.SIG_IGN),  # Ctrl-C ends them through this process
        )
        try:
            with _without_main_module():  # the processes start here
                counts = pool.map(partial(_stored_counts, path), tasks)
            yield from zip(tasks, counts, strict=True)
        except BrokenProcessPool:
            raise InputError(
                "a process that counts tokens was killed, perhaps for its memory. Use fewer "
                "workers."
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Processes that start within do not import the user's script, which would run it again: a
    source has nothing of it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _stored_counts(path: Path, items: IntArray) -> IntArray:
    return _counts(_load(path), items)


@cache
def _load(path: Path) -> SampleSource:
    source: SampleSource = pickle.loads(path.read_bytes())
    return source
