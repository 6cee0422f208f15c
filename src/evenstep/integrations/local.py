"""Dispatcher: planned rollouts to the workers of an RL job; plain objects in one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenstep.core.ragged import IntArray, offsets_of
from evenstep.core.recipe import World
from evenstep.errors import ConfigError, InputError
from evenstep.tensors.batch import RaggedTensor
from evenstep.train.rollouts import RolloutBatch, RolloutPlan, over

__all__ = ["Dispatcher", "Gathered", "LocalDispatcher"]


class Dispatcher(ABC):
    """Runs methods on all workers of an RL job; worker i is rank i. A kind of worker says how it is
    called: `LocalDispatcher` plain objects, `RayDispatcher` actors.

        plan = batch.plan(Recipe(layout=..., topology=Topology(dp=dispatcher.size)))
        old = dispatcher.dispatch("log_probs", plan, batch).tokens()  # (rows, width)
    """

    def __init__(self, workers: Sequence[Any]) -> None:
        if not workers:
            raise ConfigError("there are no workers. Pass at least one.")
        self.workers = list(workers)
        """The worker of each rank."""

    @property
    def size(self) -> int:
        """Number of workers, which is the number of data-parallel ranks."""
        return len(self.workers)

    def dispatch(
        self, method: str, plan: RolloutPlan, batch: RolloutBatch, **keywords: Any
    ) -> Gathered:
        """Call `worker.method(plan, batch, world, **keywords)` on every worker.

        Each worker runs its own share: `plan.steps(batch, world)`.
        """
        if plan.num_ranks != self.size:
            raise ConfigError(
                f"the plan is for {plan.num_ranks} ranks, but there are {self.size} workers. Plan "
                f"with topology=Topology(dp={self.size})."
            )
        if len(batch) != batch.num_rows:
            raise InputError(
                f"this batch holds {len(batch)} of {batch.num_rows} rows. Dispatch the whole "
                f"batch; each worker runs its rows of it."
            )
        plan.check(batch)
        jobs = self._jobs(plan, batch)
        calls = [(*job, World(rank, self.size)) for rank, job in enumerate(jobs)]
        return Gathered(plan, batch, tuple(self._call_all(method, calls, keywords)))

    def broadcast(self, method: str, *arguments: Any, **keywords: Any) -> list[Any]:
        """Call `worker.method(*arguments, **keywords)` on every worker; results by rank."""
        shared = tuple(map(self._shared, arguments))
        return self._call_all(method, [shared] * self.size, keywords)

    def _call_all(
        self, method: str, calls: Sequence[tuple[Any, ...]], keywords: Mapping[str, Any]
    ) -> list[Any]:
        for rank, worker in enumerate(self.workers):
            if not callable(getattr(worker, method, None)):
                kind = type(worker).__name__
                raise ConfigError(f"worker {rank} has no method {method!r}. It is a {kind}.")
        return self.call(method, calls, {name: self._shared(v) for name, v in keywords.items()})

    @abstractmethod
    def call(
        self, method: str, calls: Sequence[tuple[Any, ...]], keywords: Mapping[str, Any]
    ) -> list[Any]:
        """Call a method of every worker with its arguments of `calls`; results by rank."""

    def _shared(self, value: Any) -> Any:
        """An argument that all workers get."""
        return value

    def _jobs(self, plan: RolloutPlan, batch: RolloutBatch) -> list[tuple[Any, Any]]:
        """Plan and batch as arguments of each worker."""
        return [(plan, batch)] * self.size


class LocalDispatcher(Dispatcher):
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

    def call(
        self, method: str, calls: Sequence[tuple[Any, ...]], keywords: Mapping[str, Any]
    ) -> list[Any]:
        """Call a method of every worker with its arguments of `calls`; results by rank."""
        results = []
        for rank, (worker, arguments) in enumerate(zip(self.workers, calls, strict=True)):
            try:
                results.append(getattr(worker, method)(*arguments, **keywords))
            except Exception as error:
                error.add_note(f"in {method} of rank {rank}")
                raise
        return results


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """The results of a dispatched method, one for each rank.

    `tokens` and `sequences` put results per row into the order, width and padding of the batch. A
    worker returns them for `plan.rows_of(rank)`, in that order. Every row is needed once.

    >>> ids = torch.tensor([[5, 6, 0], [7, 0, 0]])
    >>> batch = RolloutBatch({"input_ids": ids}, lengths=[2, 1], padding_side="right")
    >>> from evenstep import Packed, Recipe, Topology
    >>> plan = batch.plan(Recipe(layout=Packed(max_tokens=3), topology=Topology(dp=1)))
    >>> Gathered(plan, batch, ([torch.tensor([1, 2]), torch.tensor([3])],)).tokens().tolist()
    [[1, 2, 0], [3, 0, 0]]
    """

    plan: RolloutPlan
    batch: RolloutBatch
    by_rank: tuple[Any, ...]
    """What each worker returned, in order of ranks."""

    def tokens(self, *, pad: float = 0.0) -> Tensor:
        """(rows, width, ...), from a value per token of each row; padding gets `pad`.

        A worker returns one tensor per row, as `compute_log_probs(model, step)` does, or a single
        tensor with the tokens of its rows end to end, which is faster to send.
        """
        rows = self._rows()
        parts: list[Tensor] = []
        lengths: list[IntArray] = []
        for rank, values in enumerate(self.by_rank):
            if isinstance(values, (Tensor, np.ndarray)):
                counts = np.maximum(self.plan.lengths[rows[rank]], 1)  # an empty row runs as one
                _check_count(rank, len(values), int(counts.sum()), "tokens")
                parts.append(_tensor(values))
            else:
                counts = np.array([len(each) for each in values], np.int64)
                _check_count(rank, len(values), len(rows[rank]), "rows")
                parts += map(_tensor, values)
            lengths.append(counts)
        offsets = torch.from_numpy(offsets_of(np.concatenate(lengths)))
        ragged = RaggedTensor(_joined(parts), offsets)
        return self.batch.restore_tokens(ragged, np.concatenate(rows), pad=pad)

    def sequences(self, *, pad: float = 0.0) -> Tensor:
        """(rows, ...), from a value per row; empty rows get `pad`."""
        rows = self._rows()
        for rank, values in enumerate(self.by_rank):
            _check_count(rank, len(values), len(rows[rank]), "rows")
        values = _joined([_tensor(values) for values in self.by_rank])
        return self.batch.restore_sequences(values, np.concatenate(rows), pad=pad)

    def _rows(self) -> list[IntArray]:
        """The rows of each rank; no row may be on two of them."""
        rows = [self.plan.rows_of(rank) for rank in range(self.plan.num_ranks)]
        numbers, times = np.unique(np.concatenate(rows), return_counts=True)
        if (times > 1).any():
            raise InputError(
                f"row {numbers[times > 1][0]} runs on several ranks, so it has several results. "
                f"Plan one epoch, and do not split rows."
            )
        return rows


def _tensor(values: Any) -> Tensor:
    return over(values) if isinstance(values, np.ndarray) else torch.as_tensor(values)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """End to end; ranks without rows do not decide the dtype."""
    full = [part for part in parts if len(part)]
    return torch.cat(full) if full else torch.zeros(0)


def _check_count(rank: int, returned: int, expected: int, what: str) -> None:
    if returned != expected:
        raise InputError(
            f"rank {rank} returned {returned} values for {expected} {what}. Return one for each, "
            f"in the order of plan.rows_of({rank})."
        )
