"""The repr of a result."""

from __future__ import annotations

import re
from typing import Any

import pytest

from evenstep import Packed, PlannedStream, Recipe, Topology, World
from evenstep.data import InMemory
from evenstep.tensors import cross_entropy
from evenstep.testing import run_ranks
from evenstep.train import Collective, Runner, StepResult
from tests.internals import Bundle, Timings
from tests.train.running import samples_of
from tests.train.steps import COLLATOR, model_of

LENGTHS = [5, 3, 8, 4]


def run(ranks: Collective) -> tuple[str, str]:
    source = InMemory(samples_of(LENGTHS, masked=0.0).samples)
    recipe = Recipe(layout=Packed(max_tokens=8, pad_to=8), topology=Topology(dp=ranks.size))
    stream = PlannedStream(
        source,
        recipe,
        world=World(ranks.rank, ranks.size),
        loss_tokens=[length - 1 for length in LENGTHS],
    )
    runner = Runner(model=model_of(), loss=cross_entropy(), collate=COLLATOR, collective=ranks)
    result = runner.run(next(iter(stream)))
    return repr(result), repr(result.reduce(ranks))


@pytest.mark.parametrize("size", [1, 2])
def test_a_result_prints_its_loss_sizes_fill_and_imbalance_in_one_line(size: int) -> None:
    sizes = r"\d+ micro-batch(es)?, \d+ tokens, fill [\d.]+%, imbalance [\d.]+ planned"
    for before, after in run_ranks(size, run):
        found = rf"StepResult\(loss [\d.]+, {sizes}, imbalance [\d.]+ measured, [\d.e-]+ s\)"
        assert re.fullmatch(found, after)
        if size > 1:
            assert re.fullmatch(rf"StepResult\(not reduced, {sizes}, [\d.e-]+ s\)", before)


def test_a_result_of_nothing_prints_too() -> None:
    nothing: dict[str, Any] = {"tokens": 0, "slots": 0, "num_micro_batches": 0}
    result = StepResult(timings=Timings(), planned_imbalance=None, bundle=Bundle({}, {}), **nothing)
    assert repr(result) == "StepResult(not reduced, 0 micro-batches, 0 tokens, 0 s)"
