"""Controllers that dispatch planned rollouts to workers and gather what they return."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep import Topology
from evenstep.errors import ConfigError, InputError
from evenstep.integrations.local import Dispatcher, Gathered, LocalDispatcher
from evenstep.train import RolloutBatch
from tests.examples import examples
from tests.integrations.rollout_workers import RolloutWorker, expected_sums, expected_tokens
from tests.train.rollouts import WAYS, make_rollouts, recipe_of

LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=14).filter(any)


def batch_of(lengths: list[int], side: str = "left", seed: int = 0) -> RolloutBatch:
    return make_rollouts(lengths, side, seed=seed).batch


@examples(40)
@given(
    lengths=LENGTHS,
    side=st.sampled_from(["left", "right", "mixed"]),
    way=st.sampled_from(sorted(WAYS)),
    size=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_results_of_all_workers_return_in_the_order_of_the_batch(
    lengths: list[int], side: str, way: str, size: int, seed: int
) -> None:
    batch = batch_of(lengths, side, seed)
    dispatcher = LocalDispatcher([RolloutWorker() for _ in range(size)])
    plan = batch.plan(recipe_of(way, dp=size), seed=seed)
    for method in ("per_row", "end_to_end"):
        found = dispatcher.dispatch(method, plan, batch).tokens(pad=-1)
        assert torch.equal(found.float(), expected_tokens(batch, pad=-1))
    sums = dispatcher.dispatch("sums", plan, batch, times=2).sequences()
    assert torch.equal(sums.float(), 2 * expected_sums(batch))


@examples(20)
@given(lengths=LENGTHS, samples=st.integers(1, 5), epochs=st.integers(1, 3))
def test_every_row_runs_once_in_each_epoch(lengths: list[int], samples: int, epochs: int) -> None:
    batch = batch_of(lengths)
    dispatcher = LocalDispatcher([RolloutWorker() for _ in range(3)])
    plan = batch.plan(recipe_of("packed", dp=3, samples=samples), epochs=epochs)
    ran = dispatcher.dispatch("rows_run", plan, batch).by_rank
    assert sorted(row for rows in ran for row in rows) == sorted([*range(len(batch))] * epochs)


def test_a_method_without_a_batch_runs_on_every_worker() -> None:
    dispatcher = LocalDispatcher([RolloutWorker(), RolloutWorker()])
    assert dispatcher.broadcast("hold", 7) == [None, None]
    assert dispatcher.broadcast("get_held") == [7, 7]


class ThreadDispatcher(Dispatcher):
    """Workers that are called at once, in threads."""

    def call(self, method: str, calls: Any, keywords: Any) -> list[Any]:
        with ThreadPoolExecutor(self.size) as pool:
            started = [
                pool.submit(getattr(worker, method), *arguments, **keywords)
                for worker, arguments in zip(self.workers, calls, strict=True)
            ]
        return [each.result() for each in started]


def test_another_kind_of_worker_only_says_how_it_is_called() -> None:
    batch = batch_of([3, 2, 5, 1])
    dispatcher = ThreadDispatcher([RolloutWorker(), RolloutWorker()])
    sums = dispatcher.dispatch("sums", batch.plan(recipe_of("packed", dp=2)), batch, times=2)
    assert torch.equal(sums.sequences().float(), 2 * expected_sums(batch))
    assert dispatcher.broadcast("hold", 7) == [None, None]


def test_an_error_names_the_rank_and_the_method() -> None:
    batch = batch_of([3, 2, 5])
    plan = batch.plan(recipe_of("packed", dp=2))
    with pytest.raises(KeyError, match="a key of this worker") as caught:
        LocalDispatcher([RolloutWorker(), RolloutWorker()]).dispatch("fail", plan, batch)
    assert caught.value.__notes__ == ["in fail of rank 1"]


def test_what_cannot_be_dispatched_is_refused_before_a_worker_runs() -> None:
    batch = batch_of([3, 2, 5])
    plan = batch.plan(recipe_of("packed", dp=2))
    two = LocalDispatcher([RolloutWorker(), RolloutWorker()])
    with pytest.raises(ConfigError, match="the plan is for 2 ranks, but there are 1 workers"):
        LocalDispatcher([RolloutWorker()]).dispatch("sums", plan, batch)
    with pytest.raises(ConfigError, match="worker 0 has no method 'scores'"):
        two.dispatch("scores", plan, batch)
    with pytest.raises(InputError, match="this batch holds 1 of 3 rows"):
        two.dispatch("sums", plan, batch.select([1]))
    with pytest.raises(InputError, match="or rows of other lengths"):
        two.dispatch("sums", plan, batch_of([3, 2, 4]))
    with pytest.raises(ConfigError, match="there are no workers"):
        LocalDispatcher([])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (([torch.ones(3)], []), "rank 0 returned 1 values for"),
        ((torch.ones(99), torch.ones(0)), "rank 0 returned 99 values for"),
    ],
)
def test_results_that_are_not_one_per_row_or_token_are_refused(values: Any, said: str) -> None:
    batch = batch_of([3, 2, 5, 4])
    plan = batch.plan(recipe_of("packed", dp=2))
    with pytest.raises(InputError, match=said):
        Gathered(plan, batch, values).tokens()
    with pytest.raises(InputError, match="rank 0 returned"):
        Gathered(plan, batch, values).sequences()


def test_rows_that_ran_on_several_ranks_have_no_single_result() -> None:
    batch = batch_of([7, 1, 6, 5, 2])
    recipe = replace(recipe_of("packed", samples=2), topology=Topology(dp=2))
    plan = batch.plan(recipe, epochs=4, seed=1)
    workers = LocalDispatcher([RolloutWorker(), RolloutWorker()])
    with pytest.raises(InputError, match="runs on several ranks"):
        workers.dispatch("rows_run", plan, batch).sequences()
