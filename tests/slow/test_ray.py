"""Workers that are Ray actors on a local cluster, some of which are killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import RayActorError

from evenstep import Packed, Recipe, World
from evenstep.errors import ConfigError, RankError
from evenstep.integrations.ray import RayDispatcher
from evenstep.train import RolloutBatch, RolloutPlan
from tests.integrations.rollout_workers import RolloutWorker, expected_sums, expected_tokens
from tests.internals import LARGE
from tests.train.processes import free_port
from tests.train.rollouts import make_rollouts, recipe_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("cluster"),
]

SIZE, DISPATCHES, KILLS = 4, 100, 30
Worker = ray.remote(RolloutWorker)


def started(count: int = SIZE, delay: float = 0.0) -> list[Any]:
    return [Worker.options(num_cpus=0).remote(delay) for _ in range(count)]


@pytest.fixture(scope="module")
def actors(cluster: None) -> list[Any]:
    """Actors that survive."""
    return started()


def batch_of(seed: int, rows: int = 24) -> RolloutBatch:
    lengths = np.random.default_rng(seed).integers(0, 8, rows)
    return make_rollouts([int(n) for n in lengths], "mixed", seed=seed).batch


def test_results_of_actors_return_in_the_order_of_the_batch(actors: list[Any]) -> None:
    dispatcher = RayDispatcher(actors)
    batch = batch_of(0)
    plan = batch.plan(recipe_of("packed", dp=SIZE))
    for method in ("per_row", "end_to_end"):
        found = dispatcher.dispatch(method, plan, batch).tokens(pad=-1)
        assert torch.equal(found.float(), expected_tokens(batch, pad=-1))
    sums = dispatcher.dispatch("sums", plan, batch, times=ray.put(2)).sequences()
    assert torch.equal(sums.float(), 2 * expected_sums(batch))
    assert dispatcher.broadcast("hold", {"step": 3}) == [None] * SIZE
    assert dispatcher.broadcast("get_held") == [{"step": 3}] * SIZE


@pytest.mark.parametrize("rows", [24, 12_000])
def test_batches_and_plans_of_any_size_reach_the_actors(actors: list[Any], rows: int) -> None:
    batch = batch_of(5, rows)
    assert (batch.lengths.nbytes >= LARGE) == (rows > 24), "both ways to send an array"
    plan = batch.plan(recipe_of("packed", dp=SIZE))
    dispatcher = RayDispatcher(actors)
    for _ in range(2):
        found = dispatcher.dispatch("sums", plan, batch).sequences()
        assert torch.equal(found.float(), expected_sums(batch))


class AsyncWorker(RolloutWorker):
    """Runs all its calls in one event loop."""

    async def shared_sums(self, plan: Any, batch: Any, world: Any) -> list[float]:
        found = self.sums(plan, batch, world)
        await asyncio.sleep(random.random() / 50)
        return found

    async def warned(self) -> bool:
        """Whether Ray warned of a call that blocks the event loop."""
        return bool(ray._private.worker.blocking_get_inside_async_warned)


@pytest.mark.parametrize("kind", [RolloutWorker, AsyncWorker], ids=["threads", "async"])
def test_calls_that_run_at_once_in_an_actor_get_their_own_batches(kind: type) -> None:
    several = ray.remote(kind).options(num_cpus=0, max_concurrency=8)
    dispatcher = RayDispatcher([several.remote() for _ in range(2)])
    method = "shared_sums" if kind is AsyncWorker else "sums"

    def run(number: int) -> bool:
        batch = batch_of(number)
        plan = batch.plan(recipe_of("packed", dp=2), seed=number)
        found = dispatcher.dispatch(method, plan, batch).sequences()
        return bool(torch.equal(found.float(), expected_sums(batch)))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(64)))
    if kind is AsyncWorker:
        assert dispatcher.broadcast("warned") == [False, False]


@pytest.mark.parametrize("what", ["local class", "class", "packer"])
def test_what_workers_cannot_import_reaches_them(
    actors: list[Any], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    class Own(RolloutBatch):
        pass

    def in_order(lengths: Any, capacity: int, seed: int) -> Any:
        return [[item] for item in range(len(lengths))]

    if what != "local class":  # as if this file were the script that was started
        for own in (Own, in_order):
            own.__module__, own.__qualname__ = "__main__", own.__name__
            monkeypatch.setattr(sys.modules["__main__"], own.__name__, own, raising=False)
    given = batch_of(7)
    kind = RolloutBatch if what == "packer" else Own
    batch = kind(
        {"input_ids": given.tensors["input_ids"]}, lengths=given.lengths, padding_side="right"
    )
    layout = Packed(max_tokens=16, packer=in_order if what == "packer" else None)
    plan = batch.plan(recipe_of("packed", dp=SIZE, layout=layout))
    found = RayDispatcher(actors).dispatch("sums", plan, batch).sequences()
    assert torch.equal(found.float(), expected_sums(batch))


class Keeper:
    """Keeps the recipes of its plans."""

    def __init__(self) -> None:
        self.recipes = list[Recipe]()

    def keep(self, plan: Any, batch: Any, world: Any) -> tuple[Recipe, int]:
        self.recipes.append(plan.epochs[0].recipe)
        return self.recipes[-1], len({id(recipe) for recipe in self.recipes})


def test_recipes_in_turn_are_right_and_read_once() -> None:
    batch = batch_of(8)
    dispatcher = RayDispatcher([ray.remote(Keeper).options(num_cpus=0).remote()])
    recipes = [recipe_of(way) for way in ("packed", "dynamic", "greedy")]
    for turn in range(4):
        for number, recipe in enumerate(recipes):
            plan = batch.plan(recipe, seed=turn)
            ((found, different),) = dispatcher.dispatch("keep", plan, batch).by_rank
            assert found == recipe
            assert different == (len(recipes) if turn else number + 1)


def test_a_client_of_a_cluster_can_dispatch() -> None:
    port = str(free_port())
    script = [sys.executable, "-m", "tests.slow.ray_client"]
    server = subprocess.Popen(
        [*script, "serve", port], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == "ready\n"
        done = subprocess.run(
            [*script, "call", port], capture_output=True, text=True, timeout=600, check=False
        )
    finally:
        server.communicate(timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True", "True"]


def test_an_actor_keeps_no_batch_after_the_call_even_if_it_keeps_the_plan(
    actors: list[Any],
) -> None:
    batch = batch_of(6, 12_000)
    plan = batch.plan(recipe_of("packed", dp=SIZE))
    dispatcher = RayDispatcher(actors)
    owners = dispatcher.dispatch("hold_plan", plan, batch).by_rank
    assert dispatcher.broadcast("batches_in_memory") == [0] * SIZE
    assert set().union(*owners) <= {"NoneType", "bytes", "bytearray"}
    assert dispatcher.broadcast("hold", None) == [None] * SIZE


def test_a_dead_worker_is_an_error_that_names_it_or_is_replaced_as_asked() -> None:
    batch = batch_of(1)
    plan = batch.plan(recipe_of("packed", dp=SIZE))
    mine = started()
    with pytest.raises(RankError, match=r"the actor of rank 2 died in 'die'.*pass replace="):
        RayDispatcher(mine).dispatch("die", plan, batch, rank=2)
    with pytest.raises(RankError, match="rank 2 died in 'sums'"):
        RayDispatcher(mine).dispatch("sums", plan, batch)

    asked: list[int] = []

    def replace(rank: int) -> Any:
        asked.append(rank)
        return started(1)[0]

    dispatcher = RayDispatcher(mine, replace=replace, attempts=2)
    found = dispatcher.dispatch("sums", plan, batch).sequences()
    assert torch.equal(found.float(), expected_sums(batch))
    assert asked == [2]
    assert dispatcher.workers[2] is not mine[2]
    assert dispatcher.workers[:2] == mine[:2]
    with pytest.raises(RankError, match="the actors of rank 1 died 2 times in 'die'"):
        dispatcher.dispatch("die", plan, batch, rank=1)
    assert asked == [2, 1]


def test_a_replacement_that_cannot_be_scheduled_is_an_error() -> None:
    batch = batch_of(4)
    plan = batch.plan(recipe_of("packed", dp=2))
    mine = started(2)
    ray.get([actor.pid.remote() for actor in mine])
    ray.kill(mine[1])
    asked: list[Any] = []

    def replace(rank: int) -> Any:
        asked.append(Worker.options(num_cpus=100).remote(0.0))  # more than the cluster has
        return asked[-1]

    dispatcher = RayDispatcher(mine, replace=replace, start_timeout=2.0)
    with pytest.raises(RankError, match="the new actor of rank 1 has not started after 2 s"):
        dispatcher.dispatch("sums", plan, batch)

    assert len(asked) == 1
    with pytest.raises(RayActorError):  # it does not wait for room any longer
        ray.get(asked[0].pid.remote(), timeout=60)


class Unmade:
    def __init__(self) -> None:
        raise ValueError("no weights")

    def sums(self, plan: RolloutPlan, batch: RolloutBatch, world: World) -> None: ...


def test_a_replacement_whose_constructor_fails_counts_as_an_attempt() -> None:
    batch = batch_of(4)
    plan = batch.plan(recipe_of("packed", dp=2))
    mine = started(2)
    ray.kill(mine[1])
    asked: list[int] = []

    def replace(rank: int) -> Any:
        asked.append(rank)
        return ray.remote(Unmade).options(num_cpus=0).remote()

    dispatcher = RayDispatcher(mine, replace=replace, attempts=3)
    with pytest.raises(RankError, match="the actors of rank 1 died 3 times in 'sums'"):
        dispatcher.dispatch("sums", plan, batch)
    assert asked == [1, 1]


def test_an_exception_in_a_method_is_raised_and_not_tried_again(actors: list[Any]) -> None:
    def never(rank: int) -> Any:
        raise AssertionError(f"rank {rank} is replaced")

    batch = batch_of(2)
    plan = batch.plan(recipe_of("packed", dp=SIZE))
    dispatcher = RayDispatcher(actors, replace=never)
    with pytest.raises(KeyError, match="a key of this worker") as caught:
        dispatcher.dispatch("fail", plan, batch)
    assert caught.value.__notes__ == ["in fail of rank 1"]

    # A worker that calls a dead actor of its own is not dead.
    (other,) = started(1)
    ray.get(other.pid.remote())
    ray.kill(other)
    with pytest.raises(RayActorError):
        dispatcher.broadcast("call", other)
    assert dispatcher.workers == actors
    assert len(dispatcher.broadcast("pid")) == SIZE


def test_what_cannot_be_dispatched_is_refused(actors: list[Any]) -> None:
    mine = actors[0]
    batch = batch_of(3)
    plan = batch.plan(recipe_of("packed", dp=SIZE))
    with pytest.raises(ConfigError, match="the plan is for 4 ranks, but there are 1 workers"):
        RayDispatcher([mine]).dispatch("sums", plan, batch)
    with pytest.raises(ConfigError, match="worker 0 has no method 'scores'"):
        RayDispatcher([mine]).broadcast("scores")
    with pytest.raises(ConfigError, match="attempts has no effect without replace"):
        RayDispatcher([mine], attempts=2)
    with pytest.raises(ConfigError, match="start_timeout has no effect without replace"):
        RayDispatcher([mine], start_timeout=2.0)
    with pytest.raises(ConfigError, match="start_timeout must be above 0, got -1"):
        RayDispatcher([mine], replace=lambda rank: mine, start_timeout=-1)
    with pytest.raises(ConfigError, match="there are no workers"):
        RayDispatcher([])


def test_a_hundred_dispatches_with_random_kills_are_complete_in_order_and_counted_once() -> None:
    pids: dict[int, int] = {}
    replaced: list[int] = []

    def replace(rank: int) -> Any:
        replaced.append(rank)
        (actor,) = started(1, delay=0.1)
        pids[rank] = ray.get(actor.pid.remote())
        return actor

    dispatcher = RayDispatcher(started(delay=0.1), replace=replace, attempts=20)
    pids.update(enumerate(dispatcher.broadcast("pid")))
    rng, done, killed = random.Random(0), threading.Event(), set[int]()

    def kill_some() -> None:
        while not done.wait(rng.random()) and len(killed) < KILLS:
            pid = pids[rng.randrange(SIZE)]
            if pid not in killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_some)
    killer.start()
    try:
        for number in range(DISPATCHES):
            batch = batch_of(number)
            plan = batch.plan(recipe_of("packed", dp=SIZE), seed=number)
            method = ("per_row", "end_to_end")[number % 2]
            found = dispatcher.dispatch(method, plan, batch).tokens(pad=-1)
            assert torch.equal(found.float(), expected_tokens(batch, pad=-1)), number
            ran = dispatcher.dispatch("rows_run", plan, batch).by_rank
            assert sorted(row for rows in ran for row in rows) == [*range(len(batch))], number
    finally:
        done.set()
        killer.join()
    assert KILLS // 2 <= len(replaced) <= len(killed)
    assert len(set(replaced)) == SIZE
