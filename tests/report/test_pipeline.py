"""Pipelines: the vectorised times against an event simulation and closed forms."""

import heapq
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import ConfigError
from tests.examples import examples
from tests.internals import FloatArray, pipeline_times, run_order, stage_order


def events(seconds: FloatArray, transfer: FloatArray, stages: int, chunks: int) -> float:
    """One event at a time: a stage takes its next operation when its input has arrived."""
    parts, micros = stages * chunks, len(seconds)
    queues = [stage_order(stage, stages, chunks, micros)[::-1] for stage in range(stages)]
    arrived = {(0, micro, True): 0.0 for micro in range(micros)}
    free, busy = [0.0] * stages, [False] * stages
    clock: list[tuple[float, int, int, bool, int]] = []
    end = 0.0

    def begin(stage: int) -> None:
        if busy[stage] or not queues[stage]:
            return
        run = queues[stage][-1]
        key = (run.part, run.micro, run.forward)
        if key not in arrived:
            return
        queues[stage].pop()
        start = max(free[stage], arrived[key])
        took = seconds[run.micro] / parts * (1 / 3 if run.forward else 2 / 3)
        busy[stage] = True
        heapq.heappush(clock, (start + took, stage, run.part, run.forward, run.micro))

    for stage in range(stages):
        begin(stage)
    while clock:
        now, stage, part, forward, micro = heapq.heappop(clock)
        free[stage], busy[stage], end = now, False, max(end, now)
        after = part + 1 if forward else part - 1
        if forward and after == parts:
            arrived[part, micro, False] = now
        elif 0 <= after < parts:
            arrived[after, micro, forward] = now + transfer[micro]
        for each in range(stages):
            begin(each)
    assert not any(queues)
    return end


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[FloatArray, FloatArray, int, int]:
    stages, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    chunks = chunks if stages > 1 else 1
    micros = draw(st.integers(1, 4)) * (stages if chunks > 1 else 1)
    time = st.floats(0.01, 10)
    seconds = draw(st.lists(time, min_size=micros, max_size=micros))
    transfer = draw(st.lists(st.floats(0, 2), min_size=micros, max_size=micros))
    return np.array(seconds), np.array(transfer), stages, chunks


@given(pipelines())
@examples(300)
def test_times_are_those_of_an_event_simulation(
    case: tuple[FloatArray, FloatArray, int, int],
) -> None:
    seconds, transfer, stages, chunks = case
    found = pipeline_times(seconds[None], transfer[None], stages, chunks)[0]
    sent = transfer if stages > 1 else np.zeros_like(transfer)
    assert found == pytest.approx(events(seconds, sent, stages, chunks))


@given(pipelines(), st.integers(1, 4))
@examples(60)
def test_rows_are_independent(case: tuple[FloatArray, FloatArray, int, int], rows: int) -> None:
    seconds, transfer, stages, chunks = case
    scale = np.arange(1, rows + 1)[:, None]
    together = pipeline_times(seconds * scale, transfer * scale, stages, chunks)
    alone = pipeline_times(seconds[None], transfer[None], stages, chunks)
    np.testing.assert_allclose(together, alone * scale[:, 0])


@given(pipelines())
@examples(100)
def test_no_pipeline_beats_its_bounds(case: tuple[FloatArray, FloatArray, int, int]) -> None:
    seconds, transfer, stages, chunks = case
    found = pipeline_times(seconds[None], transfer[None], stages, chunks)[0]
    sends = 2 * (stages * chunks - 1) if stages > 1 else 0
    through = seconds + sends * transfer  # one micro-batch through all parts and back
    assert found >= seconds.sum() / stages - 1e-9
    assert found >= through.max() - 1e-9


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_equal_micro_batches_have_the_bubble_of_the_closed_form(stages: int, rounds: int) -> None:
    micros, each = rounds * stages, 6.0
    even, nothing = np.full((1, micros), each), np.zeros((1, micros))
    plain = pipeline_times(even, nothing, stages, 1)[0]
    assert plain == pytest.approx((micros + stages - 1) * each / stages)
    if stages == 1:
        return
    for chunks in (2, 3, 4):
        found = pipeline_times(even, nothing, stages, chunks)[0]
        ideal = micros * each / stages
        assert found == pytest.approx(ideal + (stages - 1) * each / stages / chunks)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
@examples(100)
def test_every_stage_runs_each_of_its_parts_once_per_micro_batch(
    stages: int, chunks: int, rounds: int
) -> None:
    chunks = chunks if stages > 1 else 1
    micros = rounds * stages if chunks > 1 else rounds
    for stage in range(stages):
        order = stage_order(stage, stages, chunks, micros)
        keys = [(run.part, run.micro, run.forward) for run in order]
        assert len(set(keys)) == len(keys) == 2 * chunks * micros
        assert {run.part % stages for run in order} == {stage}
        alive = np.cumsum([1 if run.forward else -1 for run in order])
        most = stages - stage if chunks == 1 else 2 * (stages - stage) - 1 + (chunks - 1) * stages
        assert alive.max() <= min(most, chunks * micros)
    assert len(run_order(stages, chunks, micros)) == 2 * stages * chunks * micros


def test_forwards_of_a_chunk_come_in_groups_of_stages() -> None:
    order = [run for run in stage_order(0, 2, 2, 4) if run.forward]
    assert [(run.part, run.micro) for run in order] == [
        (0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3),
    ]  # fmt: skip
    assert all(a != b for a, b in pairwise(order))


def test_an_interleaved_pipeline_refuses_counts_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="multiple of 4 micro-batches per rank, got 6"):
        run_order(4, 2, 6)
