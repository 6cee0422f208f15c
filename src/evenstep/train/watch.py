"""Watch: ranks that notice when one of them has failed, and stop with its name instead of hanging.

A rank that raises leaves the others waiting for it in their next exchange, for as long as the
process group's timeout. So every rank has a thread that beats once in a while in a store that all
of them see, and looks at the others' beats. Who raises says so there; who is killed falls silent.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch

from evenstep.errors import ConfigError, RankError

_PREFIX = "evenstep/watch"
_DONE = "done"
# What exchanges raise when the other side is gone: often the echo of another rank's failure.
_ECHO = re.compile(
    r"gloo|nccl|\bmpi\b|\bucc\b|connection (was )?(closed|reset|refused)|broken pipe|timed? ?out|"
    r"process group|collective|socket|\b(tcp|file|hash|prefix)?store\b",
    re.IGNORECASE,
)


class Watch:
    """`with Watch():` around the steps of a run, entered on every rank at about the same time.

    When another rank fails, `RankError` is raised in the thread that entered, naming that rank and
    its error. A thread that is stuck in an exchange cannot be interrupted: after `grace` seconds
    more, the message is written to stderr and the process exits with status 1. From the failure
    to the end it takes no longer than `timeout + grace`. A rank that is done is not missed.

    store    any `torch.distributed` store; that of the default process group if not given
    timeout  seconds of silence after which a rank counts as gone. Longer than anything that holds
             Python's lock, such as a long compilation
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
        for name, value in (("timeout", timeout), ("grace", grace)):
            if not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value} s, so nobody could keep it. Set it above 0.")
        self._store, self.rank, self.size = _group(store, rank, size, timeout)
        self.timeout, self.grace = timeout, grace
        self._every = min(1.0, timeout / 10)
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._leaving = self._silent = False
        self._watched = 0
        self._prefix = _PREFIX
        self._told: RankError | None = None
        self._thread: threading.Thread | None = None
        self._seen: dict[int, tuple[str, float]] = {}

    def __enter__(self) -> Watch:
        self._stop.clear()
        self._leaving = self._silent = False
        self._told, self._seen = None, {}
        self._watched = threading.get_ident()
        # Numbered, so that nobody takes the end of an earlier watch for that of this one.
        number = self._store.add(f"{_PREFIX}/entered/{self.rank}", 1)
        self._prefix = f"{_PREFIX}/{number}"
        self._set(f"beat/{self.rank}", "0")
        self._thread = threading.Thread(target=self._look, name="evenstep-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with self._lock:
                self._leaving = True
            _interrupt(self._watched, None)  # one that is on its way is withdrawn
        except RankError:
            pass  # and one that arrives right here is known from what was told
        try:
            self._leave(error)
        finally:
            self._stop.set()
            assert self._thread is not None
            self._thread.join()

    def _leave(self, error: BaseException | None) -> None:
        if isinstance(error, Exception) and self._told is None and _is_echo(error):
            # Another rank may be why. It says so within a beat, or is silent for the timeout.
            self._wait(lambda: self._told is not None, self.timeout + 2 * self._every)
        if self._told is not None:
            self._stay_for_others()
            if not isinstance(error, RankError):
                raise self._told from error
        elif error is None or (isinstance(error, SystemExit) and not error.code):
            with suppress(Exception), self._lock:
                self._silent = True  # or the thread would beat after this last word
                self._set(f"beat/{self.rank}", _DONE)
            self._stay_for_others()
        elif not isinstance(error, RankError):
            first_line = (_text(error).splitlines() or [""])[0][:1000]
            self._publish(self.rank, f"failed ({type(error).__name__}: {first_line})")
            self._stay_for_others()

    def _stay_for_others(self) -> None:
        """The store lives in rank 0's process: stay until the others have read the last word."""
        if self.rank == 0:
            with suppress(Exception):
                self._wait(self._all_have_read, 3 * self._every)

    def _all_have_read(self) -> bool:
        return all(
            self._store.check([f"{self._prefix}/heard/{rank}"])
            or self._read(f"beat/{rank}") == _DONE
            for rank in self._others()
        )

    def _wait(self, over: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not over():
            time.sleep(self._every / 10)

    # Beating and looking, in the thread -----------------------------------------------------------

    def _look(self) -> None:
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
                    return  # rank 0 is done, and took the store along
                fault = f"{_holder()} is gone ({type(lost).__name__})"
            if fault is not None:
                self._tell(fault)
                return

    def _fault(self) -> str | None:
        failed = self._read("failed")
        if failed is not None:
            with suppress(Exception):  # heard is heard, whoever still wants to know
                self._set(f"heard/{self.rank}", "1")
            whose, _, what = failed.partition(" ")
            return None if int(whose) == self.rank else f"rank {whose} {what}"
        now = time.monotonic()
        for rank in self._others():
            beat = self._read(f"beat/{rank}") or ""
            last, since = self._seen.get(rank, (None, now))
            self._seen[rank] = (beat, since if beat == last else now)
            if beat == _DONE:
                if rank == 0:
                    self._set(f"heard/{self.rank}", "1")
            elif now - self._seen[rank][1] > self.timeout - 2 * self._every:
                silent = f"has been silent for {self.timeout:g} s, so it is gone"
                return self._publish(rank, silent)
        return None

    def _tell(self, fault: str) -> None:
        message = (
            f"{fault}, so rank {self.rank} stops: it would wait for ever. Look at that rank's "
            f"output, and resume from the last checkpoint."
        )
        self._told = RankError(message)
        with self._lock:
            if not self._leaving:
                _interrupt(self._watched, _saying(message))
        if not self._stop.wait(self.grace):
            sys.stderr.write(f"evenstep: {message}\n")
            sys.stderr.flush()
            os._exit(1)

    # The store ------------------------------------------------------------------------------------

    def _publish(self, rank: int, what: str) -> str:
        """Say what is wrong with a rank, unless somebody has said something before."""
        with suppress(Exception):
            said = self._store.compare_set(f"{self._prefix}/failed", "", f"{rank} {what}")
            first, _, said_of = said.decode().partition(" ")
            if int(first) != self.rank:
                return f"rank {first} {said_of}"
        return f"rank {rank} {what}"

    def _others(self) -> Iterator[int]:
        return (rank for rank in range(self.size) if rank != self.rank)

    def _read(self, name: str) -> str | None:
        key = f"{self._prefix}/{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _set(self, name: str, value: str) -> None:
        self._store.set(f"{self._prefix}/{name}", value)


def _interrupt(thread: int, error: type[BaseException] | None) -> None:
    """Raise an error in another thread, when it next runs Python; None withdraws it."""
    what = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


def _saying(message: str) -> type[RankError]:
    """A RankError that needs no argument: only a class can be raised in another thread."""

    def init(self: RankError) -> None:
        RankError.__init__(self, message)

    return type("RankError", (RankError,), {"__init__": init, "__module__": RankError.__module__})


def _text(error: BaseException) -> str:
    """What an error says, in characters that a store can hold."""
    try:
        return str(error).encode(errors="backslashreplace").decode()
    except Exception:
        return "which cannot be told"


def _is_echo(error: BaseException | None) -> bool:
    """Whether an exchange broke, which may be another rank's doing."""
    distributed = getattr(torch.distributed, "DistError", ())
    while error is not None:
        if isinstance(error, (distributed, ConnectionError)):
            return True
        if isinstance(error, RuntimeError) and _ECHO.search(_text(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _holder() -> str:
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"{'the launcher' if launched else 'rank 0'}, which holds the store,"


def _group(store: Any, rank: int | None, size: int | None, timeout: float) -> tuple[Any, int, int]:
    """(a store of our own connection, rank, size), from the process group where not given."""
    distributed = torch.distributed
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
        store.set_timeout(timedelta(seconds=min(5.0, max(1.0, timeout))))
    return store, rank, size
