"""When each micro-batch of a pipeline runs, for many ranks and steps at once.

The order of forwards and backwards is 1F1B, plain or interleaved. A stage holds `chunks` parts of
the model; part c of stage s is part c * stages + s of the model. The order does not depend on
times, so that one order serves all ranks and all steps with equally many micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from evenstep.core.ragged import FloatArray
from evenstep.errors import ConfigError

FORWARD = 1 / 3
"""The forward's share of a micro-batch; the backward computes twice as much."""
_ENTRIES = 1 << 23  # of an array of end times


def pipeline_times(
    seconds: FloatArray, transfer: FloatArray, stages: int, chunks: int
) -> FloatArray:
    """The seconds from the first forward to the last backward, for each row.

    `seconds` and `transfer` are (rows, micro-batches): the time of a micro-batch on all stages
    together, and to send it from one stage to the next. Each stage has `chunks` equal parts.

    >>> pipeline_times(np.full((1, 4), 6.0), np.zeros((1, 4)), stages=2, chunks=1).tolist()
    [15.0]
    """
    rows, micros = seconds.shape
    if stages == 1:
        return np.asarray(seconds.sum(axis=1))
    found = np.empty(rows)
    some = max(1, _ENTRIES // max(1, 2 * stages * chunks * micros))
    for at in range(0, rows, some):
        part = slice(at, at + some)
        found[part] = _times(seconds[part].T, transfer[part].T, stages, chunks)
    return found


def _times(seconds: FloatArray, transfer: FloatArray, stages: int, chunks: int) -> FloatArray:
    """The same for (micro-batches, rows)."""
    parts, (micros, rows) = stages * chunks, seconds.shape
    forward, backward = seconds * (FORWARD / parts), seconds * ((1 - FORWARD) / parts)
    ends = np.zeros((2, parts, micros, rows))  # of each backward and each forward
    free = np.zeros((stages, rows))
    for run in run_order(stages, chunks, micros):
        way = int(run.forward)
        before = run.part - 1 if run.forward else run.part + 1
        start = free[run.stage]
        if 0 <= before < parts:
            arrives = ends[way, before, run.micro] + transfer[run.micro]
            start = np.maximum(start, arrives)
        took = forward if run.forward else backward
        np.add(start, took[run.micro], out=ends[way, run.part, run.micro])
        free[run.stage] = ends[way, run.part, run.micro]
    return np.asarray(free.max(axis=0))


@dataclass(frozen=True, slots=True)
class Operation:
    """A forward or backward of one micro-batch on one part of the model."""

    stage: int
    part: int
    micro: int
    forward: bool


def stage_order(stage: int, stages: int, chunks: int, micros: int) -> list[Operation]:
    """What a stage runs, in order: forwards to fill the pipeline, one and one, then backwards.

    With several chunks, micro-batches go through each chunk in groups of `stages`.

    >>> [("F" if o.forward else "B") + str(o.micro) for o in stage_order(0, 2, 1, 3)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    total = micros * chunks
    ahead = stages - stage - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * stages
    ahead = min(ahead, total)
    order = [_forward(at, stage, stages, chunks) for at in range(ahead)]
    for at in range(total - ahead):
        order.append(_forward(ahead + at, stage, stages, chunks))
        order.append(_backward(at, stage, stages, chunks))
    order += [_backward(at, stage, stages, chunks) for at in range(total - ahead, total)]
    return order


def _forward(at: int, stage: int, stages: int, chunks: int) -> Operation:
    chunk, micro = _place(at, stages, chunks)
    return Operation(stage, chunk * stages + stage, micro, True)


def _backward(at: int, stage: int, stages: int, chunks: int) -> Operation:
    chunk, micro = _place(at, stages, chunks)
    return Operation(stage, (chunks - 1 - chunk) * stages + stage, micro, False)


def _place(at: int, stages: int, chunks: int) -> tuple[int, int]:
    """(chunk, micro-batch) of a forward: with 2 stages and 2 chunks 00 01 10 11 02 03 12 13."""
    if chunks == 1:
        return 0, at
    group, within = divmod(at, stages * chunks)
    return within // stages, group * stages + within % stages


@lru_cache(maxsize=64)
def run_order(stages: int, chunks: int, micros: int) -> tuple[Operation, ...]:
    """All operations so that each comes after what it needs: the part before it, and its stage."""
    if chunks > 1 and micros % stages:
        raise ConfigError(
            f"an interleaved pipeline needs a multiple of {stages} micro-batches per rank, got "
            f"{micros}. Set topology.vpp when planning."
        )
    orders = [stage_order(stage, stages, chunks, micros) for stage in range(stages)]
    done: set[tuple[int, int, bool]] = set()
    found: list[Operation] = []
    at, parts = [0] * stages, stages * chunks
    total = 2 * parts * micros
    while len(found) < total:
        before = len(found)
        for stage, order in enumerate(orders):
            while at[stage] < len(order) and _ready(order[at[stage]], done, parts):
                operation = order[at[stage]]
                done.add((operation.part, operation.micro, operation.forward))
                found.append(operation)
                at[stage] += 1
        assert len(found) > before, "the schedule waits for itself"
    return tuple(found)


def _ready(operation: Operation, done: set[tuple[int, int, bool]], parts: int) -> bool:
    part, micro = operation.part, operation.micro
    if operation.forward:
        return part == 0 or (part - 1, micro, True) in done
    if part == parts - 1:
        return (part, micro, True) in done
    return (part + 1, micro, False) in done
