"""The folder of a training run: its log, and the plan of its steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from evenstep.core.plan import Plan, join_plans
from evenstep.core.plan_file import reading
from evenstep.core.ragged import IntArray
from evenstep.core.recipe import Recipe, World
from evenstep.data.planned import PlannedStream
from evenstep.data.token_file import TokenFile
from evenstep.errors import FileError
from evenstep.report import RunLog
from evenstep.report.numbers import count

_MOST_STEPS = 1000  # that are planned again


@dataclass(frozen=True, slots=True, eq=False)
class RunFolder:
    """What a run left: its log, the plan of its steps from `first` on, notes about the rest."""

    records: list[dict[str, Any]]
    """The lines of its log, one per step."""
    log: RunLog
    plan: Plan
    epochs: IntArray
    """The epoch of each sample of the plan."""
    first: int
    notes: list[str]


def read_run(folder: Path, progress: Callable[[int, int], None] | None = None) -> RunFolder:
    """Read a run of `evenstep train`; its steps are planned again, from the stored lengths."""
    records = _records(folder / "log.jsonl", {"step"})
    starts = _records(folder / "starts.jsonl", {"step", "cursor", "seed", "shuffle", "recipe"})
    if not records or not starts:
        raise FileError(f"{folder} has no finished step. Train at least one.")
    start = starts[-1]
    first, done = int(start["step"]), int(records[-1]["step"]) + 1
    if first >= done:  # the last start ended before its first step
        start = next(each for each in reversed(starts) if each["step"] < done)
        first = int(start["step"])
    last = min(done, first + _MOST_STEPS)
    plan, epochs = _planned(folder, start, last, progress)
    notes = []
    if first or last < done:
        notes.append(
            f"The plan is of steps {count(first)} to {count(last - 1)} of {count(done)}: the run "
            f"was started {len(starts)} times, and at most {count(_MOST_STEPS)} steps are shown."
        )
    return RunFolder(records, RunLog.of(records), plan, epochs, first, notes)


def _planned(
    folder: Path,
    start: dict[str, Any],
    last: int,
    progress: Callable[[int, int], None] | None,
) -> tuple[Plan, IntArray]:
    """The plan of the steps from a start on, and the epoch of each of its samples."""
    recipe = Recipe.from_dict(start["recipe"])
    path = folder / "data.tokens"
    file = TokenFile(path if path.exists() else start.get("data", [path]))
    stream = PlannedStream(
        file,
        recipe,
        world=World(0, recipe.topology.dp),
        seed=start["seed"],
        shuffle=start["shuffle"],
        max_num_steps=last,
        infinite_loop=True,
        groups=np.arange(len(file)) // 2 if start.get("pairs") else None,
    )
    if start["cursor"] is not None:
        stream.load_state_dict(start["cursor"])
    plans, ids, epochs = [], [], []
    for step in stream:
        assert step.plan is not None
        assert step.sample_ids is not None
        plans.append(step.plan)
        ids.append(step.sample_ids)
        epochs.append(np.full(len(step.sample_ids), step.epoch))
        if progress is not None:
            progress(len(plans), last - int(start["step"]))
    # An epoch may be incomplete or repeated, so that samples are numbered by position first.
    ends = np.cumsum([0, *map(len, ids)])
    numbers = [np.arange(*pair) for pair in pairwise(ends.tolist())]
    plan = replace(join_plans(plans, numbers), sample_ids=np.concatenate(ids))
    return plan, np.concatenate(epochs)


def _records(path: Path, names: set[str]) -> list[dict[str, Any]]:
    """The lines of a file, each an object with these names."""
    with reading(path, "Name the folder of a run of `evenstep train`, or a saved plan."):
        lines = path.read_bytes().splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break  # the last line of a process that was killed
            raise FileError(f"{path}, line {number}: not JSON ({error}). Remove it.") from None
        if not isinstance(values, dict) or not names <= values.keys():
            raise FileError(
                f"{path}, line {number}: not what `evenstep train` writes, which has "
                f"{', '.join(sorted(names))}. Name the folder of one of its runs."
            )
        found.append(values)
    return found
