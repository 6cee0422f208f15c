"""Ranks in threads: run distributed code without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from evenstep.train.collectives import Collective

T = TypeVar("T")
_DONE = "is done"


@dataclass(slots=True)
class _Exchange:
    """An all-gather between threads: every rank passes a value and gets those of all ranks."""

    size: int
    barrier: threading.Barrier = field(init=False)
    values: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)
        self.values = [None] * self.size

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        seen = list(self.values)
        self.barrier.wait()  # all ranks have read the values before the next are written
        return seen


@dataclass(frozen=True, slots=True, weakref_slot=True)
class FakeRank:
    """A `Collective` of threads. Sums are in order of ranks, so they are reproducible."""

    rank: int
    size: int
    exchange: _Exchange = field(repr=False)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors."""
        seen = self.exchange.gather(self.rank, tensor.detach().clone())
        shapes = [value if value is _DONE else tuple(value.shape) for value in seen]
        if len(set(shapes)) > 1:
            raise RuntimeError(
                f"ranks reduce different shapes: {shapes}. Real ranks would hang. Make the same "
                f"calls on every rank."
            )
        total = seen[0].clone()
        for other in seen[1:]:
            total += other
        return total

    def all_to_all(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Rows for each rank, `sent[r]` for rank r -> rows from each, `received[r]` from rank r."""
        seen = self.exchange.gather(self.rank, (values.detach().clone(), list(sent)))
        parts = [rows.split(sizes)[self.rank] for rows, sizes in seen]
        if [len(part) for part in parts] != list(received):
            raise RuntimeError(
                f"rank {self.rank} expects {received} rows of the ranks, but they send "
                f"{[len(part) for part in parts]}. Give all ranks the same plan."
            )
        rows: Tensor = values.new_empty((sum(received), *values.shape[1:]))
        for row, part in zip(rows.split(received), parts, strict=True):
            row.copy_(part)
        return rows


def run_ranks(size: int, function: Callable[[Collective], T]) -> list[T]:
    """Run `function(collective)` on `size` ranks in threads; return the results in order of ranks.

    An error on one rank stops the others and is raised with a note that names the rank. Ranks
    that do not make the same reductions are an error, too; processes would hang.

    >>> import torch
    >>> run_ranks(3, lambda ranks: float(ranks.all_reduce_sum(torch.tensor(float(ranks.rank)))))
    [3.0, 3.0, 3.0]
    """
    exchange = _Exchange(size)

    def run(rank: int) -> T:
        try:
            result = function(FakeRank(rank, size, exchange))
            seen = exchange.gather(rank, _DONE)
            if any(value is not _DONE for value in seen):
                raise RuntimeError(
                    f"rank {rank} returned while other ranks are still in a reduction. Real ranks "
                    f"would hang. Make the same calls on every rank."
                )
            return result
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = {rank: future.exception() for rank, future in enumerate(futures)}
    caused = {
        rank: error
        for rank, error in errors.items()
        if error is not None and not isinstance(error, threading.BrokenBarrierError)
    }
    for rank, error in caused.items():
        error.add_note(f"raised on rank {rank} of {size}")
        raise error
    return [future.result() for future in futures]
