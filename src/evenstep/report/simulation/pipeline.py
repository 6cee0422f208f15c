"""When each micro-batch of a pipeline runs, for many ranks and steps at once."""

from __future__ import annotations

import numpy as np

from evenstep.core.ragged import FloatArray
from evenstep.report.simulation.schedule import run_order

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
