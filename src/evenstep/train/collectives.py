"""Collectives: how ranks exchange sums. A step needs one all-reduce of a small tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from evenstep.errors import ConfigError


class Collective(Protocol):
    """The ranks that share a step. Every rank makes the same calls in the same order.

    Results are bitwise equal on all ranks.
    """

    @property
    def rank(self) -> int:
        """This rank, starting at 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks. `tensor` may be overwritten."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """A single rank.

    >>> Alone().all_reduce_sum(torch.tensor([1.0, 2.0])).tolist()
    [1.0, 2.0]
    """

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def size(self) -> int:
        """Always 1."""
        return 1

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor


@dataclass(frozen=True, slots=True)
class Distributed:
    """The ranks of a `torch.distributed` process group, by default the default group.

    The process group must be initialised:

        torch.distributed.init_process_group("nccl")
        runner = Runner(model=model, loss=cross_entropy(), collective=Distributed())
    """

    group: Any = None

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return int(self._torch().get_rank(self.group))

    @property
    def size(self) -> int:
        """Number of processes in the group."""
        return int(self._torch().get_world_size(self.group))

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over the group; with NCCL the result is on the GPU."""
        distributed = self._torch()
        if tensor.device.type == "cpu" and distributed.get_backend(self.group) == "nccl":
            tensor = tensor.cuda()
        distributed.all_reduce(tensor, group=self.group)
        return tensor

    @staticmethod
    def _torch() -> Any:
        distributed = torch.distributed
        if not distributed.is_available() or not distributed.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialised. Call init_process_group first, or use "
                "Alone() for one process."
            )
        return distributed
