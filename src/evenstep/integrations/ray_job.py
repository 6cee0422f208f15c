"""Job: a plan and a batch, stored once by Ray and read by all workers."""

from __future__ import annotations

import copyreg
import pickle
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from io import BytesIO
from typing import Any

import ray
from ray import cloudpickle
from ray.util import client

from evenstep.core.recipe import Recipe
from evenstep.train.rollouts.rollout_batch import RolloutBatch
from evenstep.train.rollouts.rollout_plan import RolloutPlan

LARGE = 2**16  # bytes; smaller arrays are read faster as part of the pickled data
_MOST_RECIPES = 8  # kept by a driver, and by each worker
_PROTOCOL = pickle.HIGHEST_PROTOCOL


class _Job:
    """A plan and a batch, as the first two arguments of a call: `_Job, _THE_BATCH`.

    A worker reads both when it unpickles the first one, which becomes the plan. Arguments are
    unpickled in their order, by one thread.
    """

    def __init__(self, plan: RolloutPlan, batch: RolloutBatch) -> None:
        self._data, self._large = _pickled((plan, batch))

    def __reduce__(self) -> tuple[Callable[..., RolloutPlan], tuple[Any, ...]]:
        return _plan_of, (self._data, self._large)


def _pickled(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """A value as bytes, and the large arrays in it.

    Ray's own pickle sends classes and functions of a script along, but takes longer.
    """
    with suppress(pickle.PicklingError, AttributeError):  # a local class or function
        data, large = _dumped(_Pickler, value)
        if b"__main__" not in data:  # which is another module in a worker
            return data, large
    return _dumped(cloudpickle.Pickler, value)


def _dumped(kind: type[pickle.Pickler], value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    large: list[pickle.PickleBuffer] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        if memoryview(buffer).nbytes < LARGE:
            return True
        large.append(buffer)
        return False

    file = BytesIO()
    kind(file, _PROTOCOL, buffer_callback=is_small).dump(value)
    return file.getvalue(), large


class _Recipes:
    """Recipes are pickled once, and read once by a worker, for the plans of many steps."""

    def __init__(self) -> None:
        self._known = dict[int, tuple[Recipe, bytes]]()

    def reduce(self, recipe: Recipe) -> tuple[Callable[[bytes], Recipe], tuple[bytes]]:
        """How to make this recipe again; see `object.__reduce__`."""
        known = self._known.get(id(recipe))
        if known is None:
            if len(self._known) >= _MOST_RECIPES:
                self._known.clear()
            known = recipe, pickle.dumps(recipe, _PROTOCOL)
            self._known[id(recipe)] = known  # holds the recipe, so that its id stays its own
        return _recipe_of, (known[1],)


@lru_cache(maxsize=_MOST_RECIPES)
def _recipe_of(data: bytes) -> Recipe:
    recipe: Recipe = pickle.loads(data)
    return recipe


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table | {Recipe: _Recipes().reduce}


class _TheBatch:
    """The batch of the job that this thread has just read."""

    def __reduce__(self) -> tuple[Callable[[], RolloutBatch], tuple[()]]:
        return _batch, ()


_THE_BATCH = _TheBatch()
_read = threading.local()


def _plan_of(data: bytes, large: list[pickle.PickleBuffer]) -> RolloutPlan:
    plan: RolloutPlan
    plan, _read.batch = pickle.loads(data, buffers=large)
    return plan


def _batch() -> RolloutBatch:
    batch: RolloutBatch = _read.batch
    del _read.batch  # its memory is free after the call
    return batch


class _Fetched:
    """A stored object that the worker gets while it unpickles its arguments."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return _get, (self._stored,)


def _get(stored: Any) -> Any:  # `ray.get` is a wrapper, which would be pickled with its code
    return ray.get(stored)


def sent(plan: RolloutPlan, batch: RolloutBatch, workers: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Plan and batch as the first two arguments of a call of each worker."""
    if client.ray.is_connected():  # its server unpickles every argument
        return [(ray.put(plan), ray.put(batch))] * len(workers)
    stored = ray.put(_Job(plan, batch))
    return [(_argument(stored, worker), _THE_BATCH) for worker in workers]


def _argument(stored: Any, worker: Any) -> Any:
    """A stored object as an argument of a call of this worker.

    Ray asks the node for objects that are arguments before it starts the call. That takes longer
    than `ray.get` in the call, which would block other calls that the actor runs meanwhile.
    """
    alone = getattr(worker, "_ray_allow_out_of_order_execution", None) is False
    return _Fetched(stored) if alone else stored
