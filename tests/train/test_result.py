"""The repr of a result, and the work that it reports."""

from __future__ import annotations

import re
from typing import Any

import pytest

from evenstep import (
    Packed,
    Padded,
    PlannedStream,
    Recipe,
    Topology,
    World,
    find_prefixes,
    make_plan,
)
from evenstep.data import InMemory
from evenstep.tensors import Collator, cross_entropy
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


# What `fit_cost` reads: tokens, squared lengths and segments that run -----------------------------


def work_of(recipe: Recipe, ids: list[list[int]], **options: Any) -> list[Any]:
    plan = make_plan([len(each) for each in ids], recipe, **options)
    batches = [Collator()(micro, [{"input_ids": each} for each in ids]) for micro in plan[0, 0]]
    return [*Runner(model=model_of(), loss=cross_entropy()).run(batches).work]


def test_padded_rows_work_at_their_full_width() -> None:
    ids = [[1] * length for length in (5, 3, 4)]
    assert work_of(Recipe(layout=Padded(samples=3), balance="none"), ids) == [(15, 3 * 5**2, 3)]
    packed = work_of(Recipe(layout=Packed(max_tokens=16, pad_to=16)), ids)
    assert packed == [(12, 25 + 9 + 16, 3)]  # attention stays inside segments


def test_a_shared_prefix_works_once_and_is_seen_by_all_that_follow() -> None:
    prompt = [1, 2, 3, 4, 5, 6]
    ids = [[*prompt, 7, 8], [*prompt, 9, 7, 1]]
    recipe = Recipe(layout=Packed(max_tokens=32))
    assert work_of(recipe, ids) == [(17, 8**2 + 9**2, 2)]
    ((tokens, squares, segments),) = work_of(recipe, ids, prefixes=find_prefixes(ids))
    # length, tokens in front: the last shared token predicts two, so it runs twice
    parts = [(5, 0), (3, 5), (4, 5)]
    assert (tokens, segments) == (sum(n for n, _ in parts), 3)
    assert squares == sum(n * (n + 2 * front) for n, front in parts)
