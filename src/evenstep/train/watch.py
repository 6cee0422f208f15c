"""Watch: ranks that notice when one of them has failed, and stop with its name instead of hanging.

A rank that raises leaves the others waiting for it in their next exchange, for as long as the
process group's timeout. So every rank has a thread that beats once in a while in a store that all
of them see, and looks at the others' beats. Who raises says so there; who is killed falls silent.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from datetime import timedelta
from types import TracebackType
from typing import Any

from evenstep.errors import ConfigError, RankError

_PREFIX = "evenstep/watch"


class Watch:
    """`with Watch(...):` around the steps of a run, on every rank.

    When another rank fails, `RankError` is raised in this one's main thread, naming that rank and
    its error. A thread that is stuck in an exchange cannot be interrupted: after `grace` seconds
    more, the message is written to stderr and the process exits with status 1. From the failure
    to the end it takes no longer than `timeout + grace`.

    store    any `torch.distributed` store; that of the default process group if not given
    timeout  seconds of silence after which a rank counts as gone
    """

    def __init__(
        self,
        *,
        rank: int | None = None,
        size: int | None = None,
        store: Any = None,
        timeout: float = 30.0,
        grace: float = 5.0,
    ) -> None:
        self._store, self.rank, self.size = _group(store, rank, size)
        self.timeout, self.grace = timeout, grace
        self._every = min(1.0, timeout / 10)
        self._stop = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._look, name="evenstep-watch", daemon=True)
        self._told: RankError | None = None

    def __enter__(self) -> Watch:
        self._main = threading.get_ident()
        self._beat("0")
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if error is None:
            self._beat("done")
        elif isinstance(error, RankError):
            if self._told is not None and error is not self._told:
                raise self._told from None  # raised in here without its words
        elif self._told is not None:
            # What broke here broke because the other rank did.
            raise self._told from error
        else:
            first_line = (str(error).splitlines() or [""])[0]
            self._set("failed", f"{self.rank} {type(error).__name__}: {first_line}"[:2000])
            self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        """Stay until the others have read the message: the store may live in this process."""
        names = [f"{_PREFIX}/heard/{rank}" for rank in range(self.size) if rank != self.rank]
        until = time.monotonic() + 3 * self._every
        while time.monotonic() < until:
            if all(self._store.check([name]) for name in names):
                return
            time.sleep(self._every / 10)

    # Beating and looking, in the thread -----------------------------------------------------------

    def _look(self) -> None:
        seen: dict[int, tuple[str, float]] = {}
        beats = 0
        while not self._stop.wait(self._every):
            try:
                beats += 1
                self._beat(str(beats))
                fault = self._fault(seen)
            except Exception as lost:
                # Whoever holds the store is gone, and it with him.
                fault = f"the rank that holds the store is gone ({type(lost).__name__})"
            if fault is not None:
                self._raise(fault)
                return

    def _fault(self, seen: dict[int, tuple[str, float]]) -> str | None:
        if self._store.check([f"{_PREFIX}/failed"]):
            rank, _, what = self._store.get(f"{_PREFIX}/failed").decode().partition(" ")
            self._set(f"heard/{self.rank}", "1")
            return None if int(rank) == self.rank else f"rank {rank} failed ({what})"
        now = time.monotonic()
        for rank in range(self.size):
            if rank == self.rank or not self._store.check([f"{_PREFIX}/{rank}"]):
                seen.setdefault(rank, ("", now))
                beat = ""
            else:
                beat = self._store.get(f"{_PREFIX}/{rank}").decode()
            if beat == "done" or rank == self.rank:
                continue
            last, when = seen.get(rank, (beat, now))
            seen[rank] = (beat, when if beat == last and rank in seen else now)
            if now - seen[rank][1] > self.timeout:
                return f"rank {rank} has been silent for {self.timeout:g} s, so it is gone"
        return None

    def _raise(self, fault: str) -> None:
        self._told = RankError(
            f"{fault}, so rank {self.rank} stops: it would wait for ever. Look at that rank's "
            f"output, and resume from the last checkpoint."
        )
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._main), ctypes.py_object(RankError)
        )
        if not self._stop.wait(self.grace):
            sys.stderr.write(f"evenstep: {self._told}\n")
            sys.stderr.flush()
            os._exit(1)

    def _beat(self, what: str) -> None:
        self._set(str(self.rank), what)

    def _set(self, name: str, value: str) -> None:
        self._store.set(f"{_PREFIX}/{name}", value)


def _group(store: Any, rank: int | None, size: int | None) -> tuple[Any, int, int]:
    """(a store of our own connection, rank, size), from the process group where not given."""
    from torch import distributed

    if store is not None and rank is not None and size is not None:
        return store, rank, size
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ConfigError(
            "there is no process group to watch. Call init_process_group first, or give rank, "
            "size and store."
        )
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if store is None:
        # The group's own store blocks while it is used; a connection of our own does not.
        held = distributed.distributed_c10d._get_default_store()
        store = held.clone() if hasattr(held, "clone") else held
        store.set_timeout(timedelta(seconds=5))
    return store, rank, size
