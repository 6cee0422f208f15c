"""Logs: what each step was, for people, programs and trackers."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from evenstep.config.settings import TrainerSettings
from evenstep.core.plan_file import replace_file
from evenstep.data.source import digest_of
from evenstep.errors import ConfigError, FileError

if TYPE_CHECKING:
    from evenstep.trainer.job import Job
    from evenstep.trainer.ranks import Ranks

_EVERY_S = 10.0  # seconds between two lines if standard error is not a terminal


class Log:
    """One JSON object per step in `log.jsonl`; after a resume, each step is there once."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        if path.exists():
            kept = [line for line in path.read_bytes().splitlines() if _step(line) < step]
            replace_file(path, b"".join(line + b"\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, values: Mapping[str, Any]) -> None:
        """Add one step; numbers that are not finite are null."""
        lost = [n for n, each in values.items() if isinstance(each, float) and not isfinite(each)]
        try:
            self._file.write(json.dumps({**values, **dict.fromkeys(lost)}) + "\n")
            self._file.flush()
        except OSError as error:
            raise FileError(
                f"{self.path} cannot be written ({error.strerror or error}). Check the free disk "
                f"space and start the run again."
            ) from None

    def close(self) -> None:
        """Finish the file."""
        with suppress(OSError):  # of a line that `write` has refused
            self._file.close()


def _step(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # the last line of a process that was killed


@contextmanager
def writers(job: Job, ranks: Ranks, step: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function that logs a step, on rank 0: to `log.jsonl`, to trackers and to standard error."""
    if not ranks.first:
        yield lambda values: None
        return
    settings = job.settings.trainer
    names = trackers_of(settings)
    kinds = zip(names, tracker_kinds(names), strict=True)
    trackers = [_tracker(name, kind, job, step) for name, kind in kinds]
    log, line = Log(job.folder / "log.jsonl", step), RunProgress(job.steps, step)

    def write(values: Mapping[str, Any]) -> None:
        log.write(values)
        line.write(values)
        numbers = {name: each for name, each in values.items() if isinstance(each, int | float)}
        for tracker in trackers:
            tracker.log(numbers, step=values["step"])

    try:
        yield write
    finally:
        for each in (log, line):
            each.close()
        for tracker in trackers:
            tracker.finish()


def trackers_of(settings: TrainerSettings) -> list[str]:
    """The names of the trackers of a run, each once."""
    return list(dict.fromkeys([*settings.log, *["tensorboard"] * settings.tensorboard]))


def tracker_kinds(names: Iterable[str]) -> list[Any]:
    """The classes of these trackers of accelerate, or an error with what is unknown or missing."""
    names = list(names)
    if not names:
        return []
    try:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, LoggerType, get_available_trackers
    except ImportError:
        raise ConfigError(
            "trainer.log needs accelerate. Install it with pip install accelerate."
        ) from None
    kinds: dict[str, Any] = {str(name): kind for name, kind in LOGGER_TYPE_TO_CLASS.items()}
    missing = {str(each) for each in LoggerType} - {str(each) for each in get_available_trackers()}
    for name in names:
        if name not in kinds:
            raise ConfigError(
                f"trainer.log: {name!r} is unknown; expected one of {', '.join(kinds)}."
            )
        if name in missing:
            raise _not_installed(name)
    return [kinds[name] for name in names]


def _tracker(name: str, kind: Any, job: Job, step: int) -> Any:
    """A tracker of accelerate; one that can goes on where an earlier start of the run ended."""
    run, options = job.folder.resolve().name, {}
    if name == "tensorboard":
        options = {"logging_dir": str(job.folder), "purge_step": step}
        run = "tensorboard"
    elif kind.requires_logging_directory:
        options = {"logging_dir": str(job.folder)}
    elif name == "wandb":
        digest = digest_of(str(job.folder.resolve())).hex()[:16]
        options = {"id": digest, "resume": "allow", "dir": str(job.folder)}
    try:
        tracker = kind(run, **options)
        tracker.start()
    except ImportError:
        raise _not_installed(name) from None
    return tracker


def _not_installed(name: str) -> ConfigError:
    return ConfigError(f"trainer.log: {name} is not installed. Install it with pip install {name}.")


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
