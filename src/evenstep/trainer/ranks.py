"""Ranks: the processes of a run, as torchrun starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from evenstep.core.world import World
from evenstep.errors import ConfigError
from evenstep.train.collectives import Alone, Collective, Distributed

_LONG = timedelta(days=2)  # reading a corpus takes longer than any exchange of a step


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process and its peers."""

    world: World
    device: torch.device
    collective: Collective
    slow: Any
    """A process group on the CPU that waits long; None for one process."""

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes and prints."""
        return self.world.rank == 0

    def wait(self) -> None:
        """Until every rank is here."""
        if self.slow is not None:
            torch.distributed.monitored_barrier(self.slow, timeout=_LONG)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank."""
        if self.world.size == 1:
            return flag
        return bool(self.collective.all_reduce_sum(torch.tensor(float(flag))).item())


@contextmanager
def joined(device: str | None) -> Iterator[Ranks]:
    """The ranks that torchrun started, or this process alone."""
    world = World.detect()
    chosen = device_of(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world.size == 1 and not torch.distributed.is_torchelastic_launched():
        yield Ranks(world=world, device=chosen, collective=Alone(), slow=None)
        return
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend)
    try:
        slow = torch.distributed.new_group(backend="gloo", timeout=_LONG)
        yield Ranks(world=world, device=chosen, collective=Distributed(), slow=slow)
    finally:
        torch.distributed.destroy_process_group()


def device_of(name: str | None) -> torch.device:
    """The device of this rank: as asked, else its GPU, else the CPU."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is unknown. Use cpu or cuda.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no GPU. Set it to cpu.")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device
