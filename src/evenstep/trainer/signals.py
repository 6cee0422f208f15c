"""Signals: SIGINT and SIGTERM ask a run to save and end."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_ASKING = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether a signal asked this process to stop. A second one ends it at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._note) for each in _ASKING}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            for each, handler in self._before.items():
                signal.signal(each, handler)
            signal.raise_signal(number)
        self.asked = True
