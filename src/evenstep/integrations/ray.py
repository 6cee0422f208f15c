"""ray: the workers of an RL job as Ray actors."""

from __future__ import annotations

import copyreg
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from io import BytesIO
from typing import Any, TypeAlias

import ray
from ray import cloudpickle
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayTaskError,
)
from ray.util import client

from evenstep.core.recipe import Recipe
from evenstep.core.text import whole_number
from evenstep.errors import ConfigError, RankError
from evenstep.integrations.local import Dispatcher
from evenstep.train.rollouts import RolloutBatch, RolloutPlan

__all__ = ["RayDispatcher"]


Replace: TypeAlias = Callable[[int], Any]
"""Rank -> a new actor in the state that the lost one had between two calls."""

_LOST = (RayActorError, ObjectLostError, NodeDiedError)
_ATTEMPTS = 3
_START_S = 600.0  # also loads a large model


class RayDispatcher(Dispatcher):
    """Runs methods on all of these Ray actors; actor i is rank i.

        dispatcher = RayDispatcher([Worker.remote(rank) for rank in range(4)])
        plan = batch.plan(Recipe(layout=..., topology=Topology(dp=dispatcher.size)))
        old = dispatcher.dispatch("log_probs", plan, batch).tokens()  # (rows, width)

    Plan and batch are put into the object store once. Workers on a node share that memory: they
    get the whole batch and run their rows of it, `plan.steps(batch, world)`, and must not write
    into its tensors. `batch.select(plan.rows_of(world.rank))` is a copy to write into.

    If a worker dies, `RankError` names it, and no result is returned. With `replace`, its share
    runs again on the actor that `replace(rank)` returns, up to `attempts` times (default 3); the
    results of the other workers are kept, and of each rank one result is used. The lost actor is
    killed first, in case it can only not be reached. If the new actor has not started after
    `start_timeout` seconds (default 600), because no node has room for it or its constructor takes
    longer, `RankError` says so. Workers that exchange tensors during a call would wait for the lost
    one: leave `replace` out for those. An exception in a method is raised here and not tried again;
    other workers may still be busy with the call.

    Leave `max_restarts` of the actors at 0. Ray would restart them by itself, in the state of
    their constructor.
    """

    def __init__(
        self,
        workers: Sequence[Any],
        *,
        replace: Replace | None = None,
        attempts: int | None = None,
        start_timeout: float | None = None,
    ) -> None:
        super().__init__(workers)
        for name, value in (("attempts", attempts), ("start_timeout", start_timeout)):
            if replace is None and value is not None:
                raise ConfigError(
                    f"{name} has no effect without replace. Leave it out, or pass both."
                )
        self._replace = replace
        self._attempts = whole_number("attempts", _ATTEMPTS if attempts is None else attempts)
        self._start_timeout = _START_S if start_timeout is None else start_timeout
        if not self._start_timeout > 0:
            raise ConfigError(f"start_timeout must be above 0, got {start_timeout}.")

    def _shared(self, value: Any) -> Any:
        """A reference to a value, stored once for all workers."""
        return value if isinstance(value, ray.ObjectRef) else ray.put(value)

    def _jobs(self, plan: RolloutPlan, batch: RolloutBatch) -> list[tuple[Any, Any]]:
        """Plan and batch, stored once, as arguments of each worker."""
        if client.ray.is_connected():  # its server unpickles every argument
            return [(ray.put(plan), ray.put(batch))] * self.size
        # Ray asks the node for objects that are arguments before it starts the call. That takes
        # longer than `ray.get` in the call, which would block other calls that the actor runs.
        stored = ray.put(_job(plan, batch))
        name = "_ray_allow_out_of_order_execution"
        alone = [getattr(worker, name, None) is False for worker in self.workers]
        return [(_Later(_get, stored) if each else stored, _THE_BATCH) for each in alone]

    def call(
        self, method: str, calls: Sequence[tuple[Any, ...]], keywords: Mapping[str, Any]
    ) -> list[Any]:
        """Call a method of all workers at once with their arguments of `calls`; results by rank."""

        def start(rank: int) -> Any:
            actor_method = getattr(self.workers[rank], method).options(max_task_retries=0)
            return actor_method.remote(*calls[rank], **keywords)

        started = [start(rank) for rank in range(self.size)]
        with suppress(Exception):  # of any rank: which one, and whether it is lost, comes next
            return list(ray.get(started))
        return self._one_by_one(method, started, start)

    def _one_by_one(
        self, method: str, started: list[Any], start: Callable[[int], Any]
    ) -> list[Any]:
        """The results by rank; `start` runs the share of a lost actor again."""
        waiting = {call: rank for rank, call in enumerate(started)}
        attempts, results = [1] * self.size, dict[int, Any]()
        while waiting:
            (ready, *_), _ = ray.wait(list(waiting), num_returns=1)
            rank = waiting.pop(ready)
            try:
                results[rank] = ray.get(ready)
            except Exception as error:
                # A method may itself raise the loss of another actor.
                if not isinstance(error, _LOST) or isinstance(error, RayTaskError):
                    error.add_note(f"in {method} of rank {rank}")
                    raise
                self._put_in_place(rank, method, attempts[rank], error)
                attempts[rank] += 1
                waiting[start(rank)] = rank
        return [results[rank] for rank in range(self.size)]

    def _put_in_place(self, rank: int, method: str, attempts: int, error: Exception) -> None:
        """Replace the actor of a rank, or raise."""
        if self._replace is None:
            raise RankError(
                f"the actor of rank {rank} died in {method!r}, so the call has no result. Start "
                f"new workers and call again, or pass replace= to run its share on a new actor."
            ) from error
        if attempts >= self._attempts:
            raise RankError(
                f"the actors of rank {rank} died {attempts} times in {method!r}. Check whether its "
                f"share needs more memory than an actor has, or raise attempts."
            ) from error
        with suppress(Exception):
            ray.kill(self.workers[rank], no_restart=True)
        actor = self._replace(rank)
        try:
            ray.get(actor.__ray_ready__.remote(), timeout=self._start_timeout)
        except GetTimeoutError:
            with suppress(Exception):
                ray.kill(actor, no_restart=True)
            raise RankError(
                f"the new actor of rank {rank} has not started after {self._start_timeout:g} s: no "
                f"node has the resources that it asks for, or its constructor takes longer. Free "
                f"resources, add a node, or raise start_timeout."
            ) from error
        except _LOST:
            pass  # in its constructor; its share fails, which counts as an attempt
        self.workers[rank] = actor


# A plan and a batch, stored once by Ray and read by all workers -----------------------------------

LARGE = 2**16  # bytes; smaller arrays are read faster as part of the pickled data
_MOST_RECIPES = 8  # kept by a driver, and by each worker
_PROTOCOL = pickle.HIGHEST_PROTOCOL


class _Later:
    """Unpickles to `function(*arguments)`, which the worker calls."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def _job(plan: RolloutPlan, batch: RolloutBatch) -> _Later:
    """A plan and a batch, as the first two arguments of a call: `_job(plan, batch), _THE_BATCH`.

    A worker reads both when it unpickles the first one, which becomes the plan. Arguments are
    unpickled in their order, by one thread.
    """
    with suppress(pickle.PicklingError, AttributeError):  # a local class or function
        data, large = _pickled((plan, batch), _Pickler)
        if b"__main__" not in data:  # which is another module in a worker
            return _Later(_plan_of, data, large)
    # Ray's own pickle sends classes and functions of a script along, but takes longer.
    return _Later(_plan_of, *_pickled((plan, batch), cloudpickle.Pickler))


def _pickled(value: Any, kind: type[pickle.Pickler]) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """A value as bytes, and the large arrays in it."""
    large: list[pickle.PickleBuffer] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        if memoryview(buffer).nbytes < LARGE:
            return True
        large.append(buffer)
        return False

    file = BytesIO()
    kind(file, _PROTOCOL, buffer_callback=is_small).dump(value)
    return file.getvalue(), large


_pickled_recipes: dict[int, tuple[Recipe, bytes]] = {}  # by id, with its recipe


def _reduced(recipe: Recipe) -> tuple[Callable[[bytes], Recipe], tuple[bytes]]:
    """Recipes are pickled once, and read once by a worker, for the plans of many steps."""
    if id(recipe) not in _pickled_recipes:
        if len(_pickled_recipes) >= _MOST_RECIPES:
            _pickled_recipes.clear()
        _pickled_recipes[id(recipe)] = recipe, pickle.dumps(recipe, _PROTOCOL)
    return _recipe_of, (_pickled_recipes[id(recipe)][1],)


@lru_cache(maxsize=_MOST_RECIPES)
def _recipe_of(data: bytes) -> Recipe:
    recipe: Recipe = pickle.loads(data)
    return recipe


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table | {Recipe: _reduced}


_thread = threading.local()


def _plan_of(data: bytes, large: list[pickle.PickleBuffer]) -> RolloutPlan:
    plan: RolloutPlan
    plan, _thread.batch = pickle.loads(data, buffers=large)
    return plan


def _batch() -> RolloutBatch:
    batch: RolloutBatch = _thread.batch
    del _thread.batch  # its memory is free after the call
    return batch


_THE_BATCH = _Later(_batch)


def _get(stored: Any) -> Any:  # `ray.get` is a wrapper, which would be pickled with its code
    return ray.get(stored)
