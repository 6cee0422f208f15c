"""Producers: threads, processes and futures that put samples into a feed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from evenstep.errors import ConfigError, SampleError

_GRACE = 5.0  # seconds after the last sample in which a feed is closed, once all have ended


@dataclass(slots=True)
class Producers:
    """What a feed knows about those that fill it, to detect that no sample will follow."""

    timeout: float | None = None
    watched: list[Any] = field(default_factory=list)
    active: float = field(default_factory=time.monotonic)
    """When a sample was put, or waiting for one began."""

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(f"timeout must be above 0 seconds, got {self.timeout!r}.")

    def watch(self, producers: Iterable[Any]) -> None:
        """Also watch these."""
        for producer in producers:
            if not hasattr(producer, "is_alive") and not hasattr(producer, "exception"):
                raise ConfigError(
                    f"expected a thread, a process or a future to watch, got "
                    f"{type(producer).__name__}."
                )
            self.watched.append(producer)

    def fault(self) -> SampleError | None:
        """Why no further sample can be expected although the feed is not closed; else None."""
        ended = [producer for producer in self.watched if _ended(producer)]
        for producer in ended:
            reason, cause = _failure(producer)
            if reason:
                fault = SampleError(
                    f"{reason} before the feed was closed, so samples of the step are missing. "
                    f"Start it again, and put its samples into the feed of a new step."
                )
                fault.__cause__ = cause
                return fault
        idle = time.monotonic() - self.active
        if ended and len(ended) == len(self.watched) and idle > _GRACE:
            return SampleError(
                f"all {len(ended)} producers of the feed have ended, but it was not closed. Call "
                f"close() after the last sample and fail(error) on an error, or produce samples "
                f"inside `with feed:`."
            )
        if self.timeout is not None and idle > self.timeout:
            return SampleError(
                f"the feed got no sample for {self.timeout:g} seconds and was not closed. Check "
                f"its producers, or raise timeout."
            )
        return None


def _ended(producer: Any) -> bool:
    """Whether a producer was started and has ended."""
    if hasattr(producer, "done"):
        return bool(producer.done())
    if hasattr(producer, "exitcode"):
        return producer.exitcode is not None
    return producer.ident is not None and not producer.is_alive()


def _failure(producer: Any) -> tuple[str, BaseException | None]:
    """(how an ended producer failed, its error); ("", None) if it did not."""
    if hasattr(producer, "done"):
        if producer.cancelled():
            return "a future that fills the feed was cancelled", None
        error = producer.exception()
        return (f"a future that fills the feed failed ({error!r})" if error else ""), error
    status = getattr(producer, "exitcode", 0)
    name = getattr(producer, "name", "")
    return (f"the process {name!r} ended with exit code {status}" if status else ""), None
