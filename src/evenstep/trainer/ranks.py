"""Ranks: the processes of a run, as torchrun starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

from evenstep.core.recipe import World
from evenstep.data.manifest import lock_file
from evenstep.errors import ConfigError, EvenstepError, FileError, RankError
from evenstep.train.budget import expand_segments
from evenstep.train.collectives import Alone, Collective, Distributed

T = TypeVar("T")

_LONG = timedelta(days=2)  # reading a corpus takes longer than any exchange of a step


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process and its peers."""

    world: World
    device: torch.device
    collective: Collective
    slow: Any
    """A process group on the CPU that waits long; None for one process."""
    background: Any
    """Another one, for the thread that writes checkpoints."""

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes and prints."""
        return self.world.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank."""
        if self.world.size == 1:
            return flag
        return bool(self.collective.all_reduce_sum(torch.tensor(float(flag))).item())

    def gather(self, value: T, group: Any = None) -> list[T]:
        """The values of all ranks, once all are here."""
        if self.slow is None:
            return [value]
        values: list[Any] = [None] * self.world.size
        torch.distributed.all_gather_object(values, value, group=group or self.slow)
        return values

    def agree(self, failure: EvenstepError | None, kind: type[EvenstepError] = RankError) -> None:
        """Raise on every rank if one has failed: its failure there, `kind` on the others."""
        said = self.gather(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        for text in said:
            if text is not None:
                raise kind(text)

    @contextmanager
    def together(self, folder: Path, kind: type[EvenstepError] = RankError) -> Iterator[None]:
        """What fails here on one rank, such as writing to the folder, is raised on all of them: as
        it is there, as `kind` on the others."""
        failure: EvenstepError | None = None
        try:
            yield
        except EvenstepError as error:
            failure = error
        except OSError as error:
            failure = FileError(
                f"{folder} cannot be written ({error.strerror or error}). Set trainer.out to "
                f"another folder."
            )
        self.agree(failure, kind)


@contextmanager
def reserved(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Keep other runs out of a folder until this one ends, in whatever way.

    Rank 0 holds a lock on `run.lock`, which the system releases when the process ends or is killed,
    so there are no stale ones.
    """
    lock: IO[str] | None = None
    try:
        with ranks.together(folder):
            if ranks.first:
                folder.mkdir(parents=True, exist_ok=True)
                lock = lock_file(folder / "run.lock")
        yield
    finally:
        if lock is not None:
            lock.close()


@contextmanager
def joined(device: str | None) -> Iterator[Ranks]:
    """The ranks that torchrun, Slurm or Ray started, or this process alone."""
    world = World.detect()
    chosen = device_of(device)
    if chosen.type == "cuda":
        expand_segments()
        torch.cuda.set_device(chosen)
    ready = torch.distributed.is_initialized()  # by Ray
    if world.size == 1 and not (ready or torch.distributed.is_torchelastic_launched()):
        yield Ranks(world=world, device=chosen, collective=Alone(), slow=None, background=None)
        return
    if not ready:
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend)
    try:
        slow, background = (
            torch.distributed.new_group(backend="gloo", timeout=_LONG) for _ in range(2)
        )
        yield Ranks(
            world=world, device=chosen, collective=Distributed(), slow=slow, background=background
        )
    finally:
        if not ready:
            torch.distributed.destroy_process_group()


def device_of(name: str | None) -> torch.device:
    """The device of this rank: as asked, else its GPU, else the CPU."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device: torch.device | None = None
    with suppress(RuntimeError):
        device = torch.device(name)
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is unknown. Use cpu or cuda.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no GPU. Set it to cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device is {name}, but the last GPU is cuda:{torch.cuda.device_count() - 1}. Leave "
            f"the number out: each process takes the GPU of its local rank."
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device
