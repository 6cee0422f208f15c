"""Clock: where the time of steps goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from evenstep.core.step import Step
from evenstep.train.result import StepResult
from evenstep.train.runner import Runner
from evenstep.train.step_run import Stopwatch


class Clock:
    """Where the time of steps goes: the model and the optimizer, or all else."""

    def __init__(self) -> None:
        self.whole, self.model, self._step_model = 0.0, 0.0, 0.0
        self._began, self._first = 0.0, True
        self.saving = Stopwatch()
        """Of checkpoints, which are not counted as steps."""

    def each(self, stream: Iterable[Step]) -> Iterator[Step]:
        """The steps; planning one is part of its time."""
        self._began = time.perf_counter() - self.saving.seconds
        yield from stream

    def run(self, runner: Runner, step: Step) -> StepResult:
        """Run the forwards and backwards of a step."""
        result = runner.run(step).reduce(runner.collective)
        self._step_model = result.timings.compute
        return result

    def update(self, update: Callable[[], None]) -> None:
        """Run the update of the weights."""
        began = time.perf_counter()
        update()
        self._step_model += time.perf_counter() - began

    def end(self) -> None:
        """End a step. The first compiles kernels and is not counted."""
        now = time.perf_counter() - self.saving.seconds
        if not self._first:
            self.whole += now - self._began
            self.model += self._step_model
        self._began, self._first = now, False

    @property
    def overhead(self) -> float | None:
        """The share of all else; None before the second step."""
        return 1 - self.model / self.whole if self.whole else None
