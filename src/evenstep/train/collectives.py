"""Collectives: how ranks meet. A step meets once, to sum one small tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from evenstep.errors import ConfigError


class Collective(Protocol):
    """The ranks that share a step. Every rank makes the same calls in the same order.

    The result is the same on every rank, bit for bit.
    """

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors; the given one may be overwritten."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """One rank, which has nobody to meet.

    >>> Alone().all_reduce_sum(torch.tensor([1.0, 2.0])).tolist()
    [1.0, 2.0]
    """

    @property
    def rank(self) -> int:
        """The only one."""
        return 0

    @property
    def size(self) -> int:
        """One."""
        return 1

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor


@dataclass(frozen=True, slots=True)
class Distributed:
    """The ranks of a `torch.distributed` process group, the default one if none is named."""

    group: Any = None

    @property
    def rank(self) -> int:
        """This process in the group."""
        return int(self._torch().get_rank(self.group))

    @property
    def size(self) -> int:
        """Processes of the group."""
        return int(self._torch().get_world_size(self.group))

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Summed over the group; NCCL takes what is on a GPU, so there the sum is too."""
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
                "torch.distributed has no process group, so there are no ranks to meet. Call "
                "init_process_group first, or use Alone() for one process."
            )
        return distributed
