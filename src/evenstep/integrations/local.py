"""local: the workers of an RL job as plain objects in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from evenstep.core.recipe import World
from evenstep.errors import ConfigError
from evenstep.integrations.gathered import Gathered, check_job, no_method
from evenstep.train.rollouts.rollout_batch import RolloutBatch
from evenstep.train.rollouts.rollout_plan import RolloutPlan

__all__ = ["Dispatcher", "Gathered", "LocalDispatcher"]


class Dispatcher(Protocol):
    """Runs methods on all workers of an RL job: `LocalDispatcher`, or `RayDispatcher`."""

    @property
    def size(self) -> int:
        """Number of workers, which is the number of data-parallel ranks."""
        ...

    def dispatch(
        self, method: str, plan: RolloutPlan, batch: RolloutBatch, **keywords: Any
    ) -> Gathered:
        """Call `worker.method(plan, batch, world, **keywords)` on every worker."""
        ...

    def broadcast(self, method: str, *arguments: Any, **keywords: Any) -> list[Any]:
        """Call `worker.method(*arguments, **keywords)` on every worker; results by rank."""
        ...


class LocalDispatcher:
    """Workers in this process, called one after another in order of ranks.

    A controller written for it also runs on Ray, with a `RayDispatcher`. Workers cannot exchange
    tensors during a call, because they do not run at the same time; with one worker none has to.

    >>> import torch
    >>> from evenstep import Packed, Recipe, Topology
    >>> class Worker:
    ...     def count(self, plan, batch, world):
    ...         return [len(batch[int(row)]["input_ids"]) for row in plan.rows_of(world.rank)]
    >>> dispatcher = LocalDispatcher([Worker(), Worker()])
    >>> ids = torch.ones((3, 4), dtype=torch.int64)
    >>> batch = RolloutBatch({"input_ids": ids}, lengths=[4, 1, 2], padding_side="left")
    >>> recipe = Recipe(layout=Packed(max_tokens=4), topology=Topology(dp=dispatcher.size))
    >>> dispatcher.dispatch("count", batch.plan(recipe), batch).sequences().tolist()
    [4, 1, 2]
    """

    def __init__(self, workers: Sequence[Any]) -> None:
        if not workers:
            raise ConfigError("there are no workers. Pass at least one.")
        self.workers = list(workers)

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.workers)

    def dispatch(
        self, method: str, plan: RolloutPlan, batch: RolloutBatch, **keywords: Any
    ) -> Gathered:
        """Call `worker.method(plan, batch, world, **keywords)` on every worker.

        Each worker runs its own share: `plan.steps(batch, world)`.
        """
        check_job(plan, batch, self.size)
        calls = [(plan, batch, World(rank, self.size)) for rank in range(self.size)]
        return Gathered(plan, batch, tuple(self._on_all(method, calls, keywords)))

    def broadcast(self, method: str, *arguments: Any, **keywords: Any) -> list[Any]:
        """Call `worker.method(*arguments, **keywords)` on every worker; results by rank."""
        return self._on_all(method, [arguments] * self.size, keywords)

    def _on_all(
        self, method: str, calls: Sequence[tuple[Any, ...]], keywords: dict[str, Any]
    ) -> list[Any]:
        for rank, worker in enumerate(self.workers):
            if not callable(getattr(worker, method, None)):
                raise no_method(rank, worker, method)
        found = []
        for rank, (worker, arguments) in enumerate(zip(self.workers, calls, strict=True)):
            try:
                found.append(getattr(worker, method)(*arguments, **keywords))
            except Exception as error:
                error.add_note(f"in {method} of rank {rank}")
                raise
        return found
