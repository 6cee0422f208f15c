"""Ranks without processes: one thread each, meeting in memory."""

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
class _Room:
    """Where ranks meet: each brings something, and all see what was brought."""

    size: int
    door: threading.Barrier = field(init=False)
    brought: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.door = threading.Barrier(self.size)
        self.brought = [None] * self.size

    def meet(self, rank: int, thing: Any) -> list[Any]:
        self.brought[rank] = thing
        self.door.wait()
        seen = list(self.brought)
        self.door.wait()  # nobody brings the next thing before all have seen this one
        return seen


@dataclass(frozen=True, slots=True)
class FakeRank:
    """A `Collective` of threads. Sums are taken in the order of the ranks, so they repeat."""

    rank: int
    size: int
    room: _Room = field(repr=False)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors."""
        seen = self.room.meet(self.rank, tensor.detach().clone())
        shapes = [thing if thing is _DONE else tuple(thing.shape) for thing in seen]
        if len(set(shapes)) > 1:
            raise RuntimeError(
                f"ranks do not make the same calls; real ones would hang. Reduced were {shapes}."
            )
        total = seen[0].clone()
        for other in seen[1:]:
            total += other
        return total


def run_ranks(size: int, function: Callable[[Collective], T]) -> list[T]:
    """Run `function(collective)` as each of `size` ranks; what they returned, in order.

    An error on one rank releases the others and is raised here, with a note that names the rank.
    So is a rank that reduces what another does not: processes would wait for ever.

    >>> import torch
    >>> run_ranks(3, lambda ranks: float(ranks.all_reduce_sum(torch.tensor(float(ranks.rank)))))
    [3.0, 3.0, 3.0]
    """
    room = _Room(size)

    def run(rank: int) -> T:
        try:
            result = function(FakeRank(rank, size, room))
            seen = room.meet(rank, _DONE)
            if any(thing is not _DONE for thing in seen):
                raise RuntimeError(
                    f"rank {rank} is done while others still reduce; real ones would hang."
                )
            return result
        except BaseException:
            room.door.abort()
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
