"""Small training runs, in this process or started with torchrun."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from evenstep import Packed, Recipe, Steps
from evenstep.config import Settings
from evenstep.data import Corpus
from evenstep.trainer import train
from tests.internals import PARTS, run_module

SAMPLES, PER_STEP = 24, 6
ROOT = Path(__file__).parents[2]


def texts(folder: Path, count: int = SAMPLES, start: str = "") -> str:
    """A JSONL file of `count` texts of very different lengths; one begins with `start`."""
    random = np.random.default_rng(0)
    path = folder / "texts.jsonl"
    lengths = np.clip(random.lognormal(3.5, 1.0, count), 2, 400).astype(int)
    words = ["".join(random.choice(list("abcdef "), length)) for length in lengths]
    words[count // 2] = start + words[count // 2]
    path.write_text("".join(json.dumps({"text": word}) + "\n" for word in words))
    return str(path)


def settings(out: Path, paths: str, **changes: Any) -> Settings:
    """A run of 12 steps: three epochs of 24 samples.

    `changes` replace sections, or single values as in `trainer={"save_every": 2}`.
    """
    parts: dict[str, dict[str, Any]] = {
        "stream": {"max_num_steps": 12},
        "model": {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 48},
        "optimizer": {"lr": 3e-3, "warmup_steps": 2},
        "trainer": {"out": str(out), "save_every": 3},
    }
    recipe = Recipe(layout=Packed(max_tokens=512), steps=Steps(samples=PER_STEP))
    whole: dict[str, Any] = {"recipe": recipe, "data": Corpus(paths=paths)}
    for name, given in parts.items():
        change = changes.pop(name, {})
        if not isinstance(change, dict):
            whole[name] = change
            continue
        base = {} if "path" in change else given  # the config of a path has the sizes
        whole[name] = PARTS[name](**base | change)
    return Settings(**whole | changes)


def break_on(letter: str) -> None:
    """From now on, the outputs of tokens that are this letter are NaN."""
    forward_for = vars(run_module)["forward_for"]

    def broken(*arguments: Any) -> Any:
        forward = forward_for(*arguments)

        def run(model: Any, batch: Any) -> Any:
            outputs = forward(model, batch)
            return outputs.masked_fill((batch.tokens == ord(letter))[..., None], torch.nan)

        return run

    vars(run_module).update(forward_for=broken)


def checkpoint(path: Path) -> dict[str, Any]:
    """All tensors of a checkpoint, by name."""
    whole: dict[str, Any] = {}
    loader = _EmptyStateDictLoadPlanner()
    _load_state_dict(whole, FileSystemReader(path), planner=loader, no_dist=True)
    flat, _ = flatten_state_dict(whole)
    return {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}


def logged(out: Path) -> list[dict[str, Any]]:
    """The log of a run, one record per step."""
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[Any]:
    """The loss of every step; None if it was not finite."""
    return [record["loss"] for record in logged(out)]


def start(out: Path, paths: str, ranks: int = 1, **changes: Any) -> subprocess.Popen[str]:
    """Start a run in `ranks` processes with torchrun, or in one without it."""
    script = [str(Path(__file__)), str(out), paths, json.dumps(changes)]
    command = [sys.executable, *script]
    if ranks > 1:
        flags = ["--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, "-m", "torch.distributed.run", *flags, *script]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a run that must succeed; returns what it printed."""
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, printed
    return printed


def main() -> None:
    """Run as a script: OUT PATHS CHANGES."""
    out, paths, changes = sys.argv[1:]
    options = json.loads(changes)
    if "break_on" in options:
        break_on(options.pop("break_on"))
    if "samples" in options:  # of a step
        steps = Steps(samples=options.pop("samples"))
        options["recipe"] = Recipe(layout=Packed(max_tokens=256), steps=steps)
    if "validation" in options:
        options["data"] = Corpus(paths=paths, validation=options.pop("validation"))
    if "file_limit" in options:  # as if the disk were full after so many bytes of a file
        limit = options.pop("file_limit")
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    print(train(settings(Path(out), paths, **options)))


if __name__ == "__main__":
    main()
