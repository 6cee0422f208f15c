"""Watch: stop all ranks with an error when one of them fails, instead of hanging.

When a rank raises, the others block in their next collective until the process group's timeout.
`Watch` runs a thread on every rank that writes heartbeats to a shared store and reads those of the
other ranks. A rank that raises records its error in the store; a killed rank stops its heartbeats.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch

from evenstep.errors import ConfigError, RankError
from evenstep.tensors.head import positive
from evenstep.train.collectives import has_group

_PREFIX = "evenstep/watch"
_DONE = "done"
# Errors of collectives whose peer is gone: usually a consequence of another rank's failure.
_CONSEQUENCE = re.compile(
    r"gloo|nccl|\bmpi\b|\bucc\b|connection (was )?(closed|reset|refused)|broken pipe|timed? ?out|"
    r"process group|collective|socket|\b(tcp|file|hash|prefix)?store\b",
    re.IGNORECASE,
)


class Watch:
    """Context manager around the steps of a run; enter it on every rank at about the same time.

    When another rank fails, `RankError` with its rank and error is raised in the thread that
    entered. A thread blocked in a collective cannot be interrupted: after `grace` more seconds the
    message is written to stderr and the process exits with status 1. All ranks stop within
    `timeout + grace` seconds of the failure. A rank that leaves normally is not a failure.

    store    any `torch.distributed` store; by default that of the default process group
    timeout  seconds without a heartbeat after which a rank counts as failed. Must exceed the
             longest time that Python's GIL is held, e.g. in a long compilation
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
        positive("timeout", timeout)
        positive("grace", grace)
        self._store, self.rank, self.size = _group(store, rank, size, timeout)
        self.timeout, self.grace = timeout, grace
        self._others = [other for other in range(self.size) if other != self.rank]
        self._every = min(1.0, timeout / 10)
        self._stop, self._lock = threading.Event(), threading.Lock()

    def __enter__(self) -> Watch:
        self._stop.clear()
        self._leaving = self._silent = False
        self._error: RankError | None = None
        self._seen: dict[int, tuple[str, float]] = {}
        self._watched = threading.get_ident()
        # Numbered, so that the end of an earlier watch is not read as the end of this one.
        number = self._store.add(f"{_PREFIX}/entered/{self.rank}", 1)
        self._prefix = f"{_PREFIX}/{number}"
        self._set(f"beat/{self.rank}", "0")
        self._thread = threading.Thread(target=self._run, name="evenstep-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(RankError):  # the interrupt may arrive here; its error is kept in _error
            with self._lock:
                self._leaving = True
            _interrupt(self._watched, None)  # withdraw a pending interrupt
        try:
            self._leave(error)
        finally:
            self._stop.set()
            self._thread.join()

    def _leave(self, error: BaseException | None) -> None:
        if isinstance(error, Exception) and self._error is None and _is_consequence(error):
            # Another rank may be the cause: wait for its error or its missing heartbeats.
            self._wait(lambda: self._error is not None, self.timeout + 2 * self._every)
        fault = self._error
        if fault is None:
            if isinstance(error, RankError):
                return
            if error is None or (isinstance(error, SystemExit) and not error.code):
                with suppress(Exception), self._lock:
                    self._silent = True  # no heartbeat may overwrite this
                    self._set(f"beat/{self.rank}", _DONE)
            else:
                first_line = (_text(error).splitlines() or [""])[0][:1000]
                self._publish(self.rank, f"failed ({type(error).__name__}: {first_line})")
        if self.rank == 0:
            # Its process hosts the store: wait until the others have read the last state.
            with suppress(Exception):
                self._wait(self._all_have_read, 3 * self._every)
        if fault is not None and not isinstance(error, RankError):
            raise fault from error

    def _all_have_read(self) -> bool:
        return all(
            self._store.check([f"{self._prefix}/read/{rank}"])
            or self._read(f"beat/{rank}") == _DONE
            for rank in self._others
        )

    def _wait(self, over: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not over():
            time.sleep(self._every / 10)

    # Heartbeats, in the thread --------------------------------------------------------------------

    def _run(self) -> None:
        beats = 0
        while not self._stop.wait(self._every):
            try:
                beats += 1
                with self._lock:
                    if not self._silent:
                        self._set(f"beat/{self.rank}", str(beats))
                fault = self._fault()
            except Exception as lost:
                if self._seen.get(0, ("", 0.0))[0] == _DONE:
                    return  # rank 0 is done and its store is closed
                launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
                holder = "the launcher" if launched else "rank 0"
                fault = f"{holder}, which hosts the store, is gone ({type(lost).__name__})"
            if fault is not None:
                self._report(fault)
                return

    def _fault(self) -> str | None:
        failed = self._read("failed")
        if failed is not None:
            with suppress(Exception):  # the store may be closed by now
                self._set(f"read/{self.rank}", "1")
            whose, _, what = failed.partition(" ")
            return None if int(whose) == self.rank else f"rank {whose} {what}"
        now = time.monotonic()
        for rank in self._others:
            beat = self._read(f"beat/{rank}") or ""
            last, since = self._seen.get(rank, (None, now))
            self._seen[rank] = (beat, since if beat == last else now)
            if beat == _DONE:
                if rank == 0:
                    self._set(f"read/{self.rank}", "1")
            elif now - self._seen[rank][1] > self.timeout - 2 * self._every:
                return self._publish(rank, f"has sent no heartbeat for {self.timeout:g} s")
        return None

    def _report(self, fault: str) -> None:
        message = (
            f"{fault}, so rank {self.rank} stops. See the output of the failed rank, and resume "
            f"from the last checkpoint."
        )
        self._error = RankError(message)
        with self._lock:
            if not self._leaving:
                _interrupt(self._watched, _error_class(message))
        if not self._stop.wait(self.grace):
            sys.stderr.write(f"evenstep: {message}\n")
            sys.stderr.flush()
            os._exit(1)

    # The store ------------------------------------------------------------------------------------

    def _publish(self, rank: int, what: str) -> str:
        """Record the failure of a rank unless one is recorded; return the recorded one."""
        with suppress(Exception):
            entry = self._store.compare_set(f"{self._prefix}/failed", "", f"{rank} {what}")
            first, _, recorded = entry.decode().partition(" ")
            if int(first) != self.rank:
                return f"rank {first} {recorded}"
        return f"rank {rank} {what}"

    def _read(self, name: str) -> str | None:
        key = f"{self._prefix}/{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _set(self, name: str, value: str) -> None:
        self._store.set(f"{self._prefix}/{name}", value)


def _interrupt(thread: int, error: type[BaseException] | None) -> None:
    """Raise an error in another thread when it next runs Python code; None withdraws it."""
    what = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


def _error_class(message: str) -> type[RankError]:
    """A RankError class without arguments: only a class can be raised in another thread."""

    def init(self: RankError) -> None:
        RankError.__init__(self, message)

    return type("RankError", (RankError,), {"__init__": init, "__module__": RankError.__module__})


def _text(error: BaseException) -> str:
    """The message of an error, encodable for the store."""
    try:
        return str(error).encode(errors="backslashreplace").decode()
    except Exception:
        return "no message"


def _is_consequence(error: BaseException | None) -> bool:
    """Whether an error comes from a collective, so that another rank may be the cause."""
    distributed = getattr(torch.distributed, "DistError", ())
    while error is not None:
        if isinstance(error, (distributed, ConnectionError)):
            return True
        if isinstance(error, RuntimeError) and _CONSEQUENCE.search(_text(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _group(store: Any, rank: int | None, size: int | None, timeout: float) -> tuple[Any, int, int]:
    """(store with its own connection, rank, size), by default those of the process group."""
    distributed = torch.distributed
    if store is not None and rank is not None and size is not None:
        return store, rank, size
    if not has_group():
        raise ConfigError(
            "torch.distributed is not initialised. Call init_process_group first, or pass rank, "
            "size and store."
        )
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if store is None:
        # The group's connection blocks while it is in use; a separate one does not.
        shared = distributed.distributed_c10d._get_default_store()
        store = shared.clone() if hasattr(shared, "clone") else shared
        store.set_timeout(timedelta(seconds=min(5.0, max(1.0, timeout))))
    return store, rank, size
