"""The order of forwards and backwards on each stage of a pipeline: 1F1B, plain and interleaved.

A stage holds `chunks` parts of the model; part c of stage s is part c * stages + s of the model.
The order does not depend on times, so that one order serves all ranks and all steps with equally
many micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from evenstep.errors import ConfigError


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
