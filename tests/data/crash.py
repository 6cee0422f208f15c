"""A training run that may be killed at any moment, and the process that starts it again.

    test ──a line──▶ zygote ──fork──▶ run ──fork──▶ workers of its loader
         ◀──pid, end──  (all imported)   └──▶ log, cursor

The run appends every micro-batch to its log and saves its cursor after some steps only, together
with the length of the log. A run truncates the log to that length when it starts.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch

from evenstep import Packed, PlannedStream, PooledStream, Recipe, Step, Steps
from evenstep.data import InMemory, Pool
from evenstep.integrations.dataloader import StreamLoader

STEPS, WORKERS = 500, 2
_SET_CHILD_SUBREAPER = 36


class Order(TypedDict):
    """A request to the zygote."""

    kind: str
    folder: str
    pause: float


def loader_of(kind: str, steps: int = STEPS) -> StreamLoader:
    rng = np.random.default_rng(7)
    source = InMemory([{"input_ids": rng.integers(0, 256, n)} for n in rng.integers(1, 17, 700)])
    endless: dict[str, Any] = {"infinite_loop": True, "max_num_steps": steps}
    layout = Packed(max_tokens=32)
    if kind == "planned":
        recipe = Recipe(layout=layout, steps=Steps(samples=11))
        return StreamLoader(PlannedStream(source, recipe, **endless), num_workers=WORKERS)
    recipe = Recipe(layout=layout, steps=Steps(micro_batches=3))
    stream = PooledStream(source, recipe, pool=Pool(samples=16), **endless)
    return StreamLoader(stream, num_workers=WORKERS, prefetch_factor=3)


def run(kind: str, folder: Path, pause: float) -> None:
    """Train from the saved cursor to the end, with a pause of `pause` seconds per micro-batch."""
    loader, saved = loader_of(kind), folder / "cursor.json"
    vouched = 0
    if saved.exists():
        state = json.loads(saved.read_text())
        loader.load_state_dict(state["cursor"])
        vouched = state["bytes"]
    log = os.open(folder / "log", os.O_RDWR | os.O_CREAT)
    os.ftruncate(log, vouched)
    size = os.lseek(log, 0, os.SEEK_END)
    for step in loader:
        for line in lines(step):
            size += os.write(log, line)
            time.sleep(pause)
        if saves_after(step.number):
            (folder / "new.json").write_text(
                json.dumps({"bytes": size, "cursor": step.cursor.to_dict()})
            )
            (folder / "new.json").replace(saved)
    (folder / "done").touch()


def lines(step: Step) -> list[bytes]:
    """One line per micro-batch: its index, the count, its samples, their tokens."""
    found = []
    for k, (micro, samples) in enumerate(step):
        segments = micro.segments
        tokens = [samples[n]["input_ids"].astype(np.uint8) for n in segments.sample.tolist()]
        content = np.concatenate(tokens).tobytes().hex() if tokens else ""
        names = ",".join(map(str, segments.sample.tolist()))
        found.append(f"{step.number} {step.epoch} {k} {len(step)} {names} {content}\n".encode())
    return found


def saves_after(step: int) -> bool:
    """Whether to save: sometimes after each step, sometimes after several."""
    return step % 20 < 4 or step % 4 == 1


def zygote() -> None:
    """Fork a run for each request on stdin; print its pid, and the exit codes of its processes."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # adopt orphaned workers
    for kind in ("planned", "pooled"):  # compile the kernels
        next(iter(loader_of(kind, 1).stream))
    for line in sys.stdin:
        order: Order = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            _run_and_exit(order)
        os.setpgid(child, child)
        print(child, flush=True)
        print(*_ends_of(child), flush=True)


def _ends_of(group: int) -> list[int]:
    """Wait for all processes of a group; return their exit codes."""
    ends: list[int] = []
    while True:
        try:
            _, status = os.waitpid(-group, 0)
        except ChildProcessError:
            return ends
        ends.append(os.waitstatus_to_exitcode(status))


def _run_and_exit(order: Order) -> None:
    try:
        run(order["kind"], Path(order["folder"]), order["pause"])
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
