"""Processes of a gloo group on this machine, forked from a server that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

# Children are forked from a process that has imported these, not from pytest and its threads.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.train.preloaded"])
PATIENCE = 900.0
"""Seconds after which processes that should end by themselves count as hung: they take seconds, but
minutes on a machine whose load is ten times its cores, or where kernels are compiled first."""


@dataclass(frozen=True)
class Ended:
    """How one process ended."""

    status: int | None
    """Exit status, minus the signal number, or None if it hung and was killed."""
    seconds: float
    """From the start of all processes to its end."""
    output: str
    result: Any


def run_processes(
    size: int,
    function: Callable[..., Any],
    folder: Path,
    *arguments: Any,
    limit: float = PATIENCE,
    store: str = "file",
    lingers: int | None = None,
) -> list[Ended]:
    """Run `function(rank, size, *arguments)` in processes of one group.

    The rank `lingers` is killed when all others have ended.
    """
    folder.mkdir(exist_ok=True)
    address = f"tcp://127.0.0.1:{free_port()}" if store == "tcp" else f"file://{folder}/store"
    processes = [
        _CONTEXT.Process(
            target=_child, args=(rank, size, address, str(folder), function, arguments)
        )
        for rank in range(size)
    ]
    began = time.monotonic()
    for process in processes:
        process.start()
    ends: dict[int, float] = {}
    awaited = size if lingers is None else size - 1
    while len(ends) < awaited and time.monotonic() - began < limit:
        for rank, process in enumerate(processes):
            if rank not in ends and process.exitcode is not None:
                ends[rank] = time.monotonic() - began
        time.sleep(0.02)
    ended = []
    for rank, process in enumerate(processes):
        status = process.exitcode
        if status is None:
            process.kill()
        process.join()
        found = folder / f"{rank}.pt"
        output = (folder / f"{rank}.txt").read_text() if (folder / f"{rank}.txt").exists() else ""
        result = torch.load(found, weights_only=False) if found.exists() else None
        ended.append(Ended(status, ends.get(rank, limit), output, result))
    return ended


def results_of(
    size: int, function: Callable[..., Any], folder: Path, *arguments: Any, **options: Any
) -> list[Any]:
    """The return value of each rank; an error on one of them is an error here."""
    ended = run_processes(size, function, folder, *arguments, **options)
    for rank, each in enumerate(ended):
        assert each.status == 0, f"rank {rank} ended with {each.status}:\n{each.output}"
    return [each.result for each in ended]


def _child(
    rank: int,
    size: int,
    address: str,
    folder: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    out = os.open(f"{folder}/{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
        result = function(rank, size, *arguments)
        torch.save(result, f"{folder}/{rank}.pt")
        distributed.destroy_process_group()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        os._exit(1)  # the group still has threads


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
