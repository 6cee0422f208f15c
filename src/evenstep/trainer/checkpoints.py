"""Checkpoints: complete or not there.

    out/checkpoints/step-000120/        a complete checkpoint after 120 steps
    out/checkpoints/.step-000140/       one that was not finished; ignored and removed

A checkpoint holds what `torch.distributed.checkpoint` writes (model, optimizer, random states) and
`state.json` (step, cursor). It is written beside and renamed when every rank has finished. Loading
reshards it for any number of ranks.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from evenstep.core.archive import replace_file
from evenstep.errors import FileError
from evenstep.trainer.ranks import Ranks

_NAME = re.compile(r"step-(\d+)")
_STATE = "state.json"


class Place(NamedTuple):
    """Where a run is: steps done, and the cursor of the stream after them."""

    step: int
    cursor: dict[str, Any] | None


class Checkpoints:
    """The checkpoints of a run in one folder. All ranks make the same calls."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks) -> None:
        self.folder, self.keep, self.ranks = folder, keep, ranks

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        found = complete(self.folder)
        return found[-1] if found else None

    def save(self, place: Place, model: Any, optimizer: Any) -> None:
        """Write a checkpoint, then remove the oldest beyond `keep`."""
        name = f"step-{place.step:06d}"
        target, beside = self.folder / name, self.folder / f".{name}"
        if self.ranks.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in self.folder.glob(".step-*"):
                shutil.rmtree(old)
        self.ranks.wait()
        with _alone_is_fine():
            dcp.save(self._state(model, optimizer), checkpoint_id=beside, no_dist=self._alone)
        self.ranks.wait()
        if self.ranks.first:
            replace_file(beside / _STATE, json.dumps(place._asdict()).encode())
            if target.exists():
                shutil.rmtree(target)
            beside.rename(target)
            for old in complete(self.folder)[: -self.keep]:
                shutil.rmtree(old)
        self.ranks.wait()

    def load(self, path: Path, model: Any, optimizer: Any) -> Place:
        """Load a checkpoint into model and optimizer, and this rank's random state."""
        place = read_place(path)
        state = self._state(model, optimizer)
        names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        own = {name: value for name, value in state["random"].items() if f"random.{name}" in names}
        state["random"] = own
        if not own:
            del state["random"]
        with _alone_is_fine():
            dcp.load(state, checkpoint_id=path, no_dist=self._alone)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=_options(),
        )
        for value in own.values():
            torch.set_rng_state(value)
        return place

    @property
    def _alone(self) -> bool:
        return self.ranks.slow is None

    def _state(self, model: Any, optimizer: Any) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer, options=_options())
        random = {f"rank-{self.ranks.world.rank}": torch.get_rng_state()}
        return {"model": weights, "optimizer": moments, "random": random}


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    inside = folder.iterdir() if folder.is_dir() else ()
    found = [path for path in inside if _NAME.fullmatch(path.name) and (path / _STATE).exists()]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def read_place(path: Path) -> Place:
    """The step and the cursor of a checkpoint."""
    try:
        values = json.loads((path / _STATE).read_text("utf-8"))
        return Place(int(values["step"]), values["cursor"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileError(
            f"{path} is not a checkpoint ({type(error).__name__}: {error}). Remove it."
        ) from None


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """Without the warning that a single process is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _options() -> StateDictOptions:
    # Frozen weights come from the model's folder, not from a checkpoint.
    return StateDictOptions(ignore_frozen_params=True, strict=False)
