"""Measure every model class in a process of its own, with a time limit."""

from __future__ import annotations

import logging
import multiprocessing
import time
import warnings
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from tests.slow.kinds import Kind
from tests.slow.measure import measure

# Children are forked from a process that has imported transformers.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.slow.preloaded"])
SECONDS = 180.0
"""Time limit of a class."""


def survey(chosen: Iterable[Kind], workers: int = 2) -> Iterator[tuple[Kind, dict[str, Any]]]:
    """(class, what was measured) in the order in which they end."""
    waiting = list(chosen)[::-1]
    running: dict[Connection, tuple[Kind, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            kind = waiting.pop()
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_child, args=(kind, theirs))
            process.start()
            theirs.close()
            running[ours] = (kind, process, time.monotonic() + SECONDS)
        ready = set(wait(list(running), timeout=0.5))
        for ours, (kind, process, deadline) in list(running.items()):
            late = time.monotonic() > deadline
            if ours in ready or late:
                del running[ours]
                yield kind, _ended(ours, process, ours in ready)


def _ended(ours: Connection, process: Any, answered: bool) -> dict[str, Any]:
    try:
        found: dict[str, Any] = ours.recv() if answered else {"unbuildable": "over the time limit"}
    except EOFError:
        process.join()
        found = {"unbuildable": f"its process ended with {process.exitcode}"}
    if process.is_alive():
        process.kill()
    process.join()
    ours.close()
    return found


def _child(kind: Kind, into: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    found = measure(kind)
    into.send(found | {"seconds": round(time.monotonic() - began, 1)})
    into.close()
