"""Logs: what each step was, for people, programs and trackers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenstep.config.settings import TrainerSettings
from evenstep.core.plan_file import replace_file
from evenstep.data.source import digest_of
from evenstep.errors import ConfigError, FileError
from evenstep.report.run_progress import RunProgress

if TYPE_CHECKING:
    from evenstep.trainer.job import Job
    from evenstep.trainer.ranks import Ranks


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
