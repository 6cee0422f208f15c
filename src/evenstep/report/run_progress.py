"""RunProgress: the state of a training run on standard error."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO

_EVERY_S = 10.0  # seconds between two lines if standard error is not a terminal


class RunProgress:
    """The state of a run on standard error: one line that changes on a terminal; otherwise a new
    line every ten seconds."""

    def __init__(self, steps: int, done: int, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._steps, self._first, self._began = steps, done, time.perf_counter()
        self._live = self._stream.isatty()
        self._said, self._width = 0.0, 0

    def write(self, values: Mapping[str, Any]) -> None:
        """Show one step."""
        now = time.perf_counter()
        done = int(values["step"]) + 1
        if not self._live and now - self._said < _EVERY_S and done < self._steps:
            return
        self._said = now
        left = (now - self._began) / (done - self._first) * (self._steps - done)
        text = line_of(values, self._steps, left)
        if self._live:
            text = text[: shutil.get_terminal_size().columns - 1]  # a line that wraps stays
            self._print(f"\r{text:<{self._width}}")
            self._width = len(text)
        else:
            self._print(text + "\n")

    def close(self) -> None:
        """End the line."""
        if self._live and self._width:
            self._print("\n")

    def _print(self, text: str) -> None:
        with suppress(OSError):  # its reader has ended; the run goes on
            self._stream.write(text)
            self._stream.flush()


def line_of(values: Mapping[str, Any], steps: int, left: float) -> str:
    """The line of one step.

    >>> values = {"step": 4, "loss": 2.5, "tokens_per_second": 12345.0, "padding": 0.013}
    >>> line_of({**values, "imbalance/planned": 1.002}, 20, 75.0)
    'step 5/20  loss 2.5000  12,345 tokens/s  padding 1.3%  imbalance 1.002  1:15 left'
    """
    parts = [
        f"step {values['step'] + 1}/{steps}",
        f"loss {values['loss']:.4f}",
        f"{values['tokens_per_second']:,.0f} tokens/s",
        f"padding {values['padding']:.1%}",
    ]
    if values.get("skipped"):
        parts.append("skipped")
    if values.get("imbalance/planned") is not None:
        parts.append(f"imbalance {values['imbalance/planned']:.3f}")
    if values.get("mfu") is not None:
        parts.append(f"MFU {values['mfu']:.1%}")
    if values.get("validation/loss") is not None:
        parts.append(f"validation {values['validation/loss']:.4f}")
    return "  ".join([*parts, f"{_clock(left)} left"])


def _clock(seconds: float) -> str:
    """75 -> 1:15, 3675 -> 1:01:15."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
