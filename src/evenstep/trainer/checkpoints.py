"""Checkpoints: complete and intact, or refused.

    out/checkpoints/step-000120/          a checkpoint after 120 steps
    out/checkpoints/.step-000140/         one that was not finished; ignored and removed
    out/checkpoints/damaged-step-000140/  one that `trainer.fall_back` went past

A checkpoint holds what `torch.distributed.checkpoint` writes (model, optimizer, random states) and
`state.json` (step, cursor, size and checksum of every file). It is copied to the host, then written
beside by a thread while training goes on, and renamed when every rank has finished. Loading
compares the checksums, before anything is unpickled, and reshards it for any number of ranks.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from evenstep.core.text import listed
from evenstep.data.manifest import Checksum, DamagedError, Manifest, checksum, damaged
from evenstep.errors import ConfigError, EvenstepError, FileError
from evenstep.train.gradients import local_tensor
from evenstep.trainer.ranks import Ranks

_NAME = re.compile(r"step-(\d+)")
_STATE = "state.json"

# One process needs no group; the filter holds in the thread that writes too.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class Place(NamedTuple):
    """Where a run is: steps done, the cursor of the stream after them, how many of the steps were
    skipped, and the step and the loss of the best evaluation."""

    step: int
    cursor: dict[str, Any] | None
    skipped: int = 0
    best: tuple[int, float] | None = None


class Checkpoints:
    """The checkpoints of a run in one folder. All ranks make the same calls."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks) -> None:
        self.folder, self.keep, self.ranks = folder, keep, ranks
        self._thread = ThreadPoolExecutor(1, "evenstep-checkpoints")
        # It starts here: `Watch` may interrupt a main thread that starts one (decision 067).
        self._thread.submit(int).result()
        gpu = ranks.device.type != "cpu"  # pinned memory, which is kept: the copy takes a tenth
        self._stager = DefaultStager(StagingOptions(gpu, False, False, gpu))
        self._written: tuple[Path, Future[str | None]] | None = None

    # Writing --------------------------------------------------------------------------------------

    def save(self, place: Place, model: Any, optimizer: Any) -> None:
        """Copy what a checkpoint holds and begin to write it. `finish` waits for its end.

        Refuses weights that are not finite. If it fails, the others remain.
        """
        self.finish()
        self._refuse_nonfinite(place, model, optimizer)
        target = self.folder / f"step-{place.step:06d}"
        state: Any = self._state(model, optimizer)
        failure: str | None = None
        try:
            if self.ranks.first:
                self.folder.mkdir(parents=True, exist_ok=True)
                for old in self.folder.glob(".step-*"):
                    shutil.rmtree(old)
            # Not in the thread: torch would start a second pool of threads there for its copies,
            # and on a CPU every later step would take a fifth longer.
            state = self._stager.stage(state)
        except (OSError, RuntimeError) as error:
            failure = _reason(error)
        self._agree(target, failure)
        self._written = target, self._thread.submit(self._write, state, place, target)

    def finish(self) -> None:
        """Wait until the last checkpoint is complete; raises on all ranks if it failed on any."""
        if self._written is None:
            return
        (target, future), self._written = self._written, None
        self._agree(target, future.result())

    def wait(self) -> None:
        """The same at the end of a run that has failed, whose error is more important."""
        if self._written is not None:
            self._written[1].exception()
        self._thread.shutdown()
        self._stager.close()

    def _write(self, state: Any, place: Place, target: Path) -> str | None:
        """In the thread: write all files and their checksums, and give the checkpoint its name; why
        not if that fails."""
        beside, failure = target.with_name(f".{target.name}"), None
        files: dict[str, Checksum] = {}
        try:
            dcp.save(state, checkpoint_id=beside, process_group=self.ranks.background)
            files = {file.name: checksum(file) for file in self._files_of_rank(beside)}
        except (CheckpointException, OSError, RuntimeError) as error:
            failure = _reason(error)
        parts = self.ranks.gather((failure, files), self.ranks.background)
        failures = [each for each, _ in parts if each is not None]
        if failures or not self.ranks.first:
            return failures[0] if failures else None
        try:
            for _, each in parts:
                files |= each
            Manifest(place._asdict(), files).save(beside / _STATE)
            if target.exists():
                shutil.rmtree(target)
            beside.rename(target)
            best = "" if place.best is None else f"step-{place.best[0]:06d}"
            for old in complete(self.folder)[: -self.keep]:
                if old.name != best:
                    shutil.rmtree(old)
        except (OSError, FileError) as error:
            return _reason(error)
        return None

    def _agree(self, target: Path, failure: str | None) -> None:
        """If a rank cannot write, all of them raise, and what was written is removed."""
        error: EvenstepError | None = None
        if failure is not None:
            newest = complete(self.folder)
            left = f"The run can continue from {newest[-1].name}. " if newest else ""
            error = FileError(
                f"{target} cannot be written ({failure}). {left}Check the free disk space and "
                f"start it again."
            )
        try:
            self.ranks.agree(error)
        except EvenstepError:
            shutil.rmtree(target.with_name(f".{target.name}"), ignore_errors=True)
            raise

    def _files_of_rank(self, folder: Path) -> list[Path]:
        """The files of this rank, `__RANK_*.distcp`; of rank 0 also those of no rank."""
        rank = self.ranks.world.rank
        files = [path for path in folder.iterdir() if path.name != _STATE]
        owners = [re.match(r"__(\d+)_", path.name) for path in files]
        pairs = zip(files, owners, strict=True)
        return [path for path, owner in pairs if (int(owner[1]) if owner else 0) == rank]

    def _refuse_nonfinite(self, place: Place, model: Any, optimizer: Any) -> None:
        trained = [each for each in model.parameters() if each.requires_grad]
        moments = [each for state in optimizer.state.values() for each in state.values()]
        if not self.ranks.any(not _all_finite([*trained, *moments], self.ranks.device)):
            return
        newest = complete(self.folder)
        left = f"; {newest[-1].name} is the newest checkpoint" if newest else ""
        raise ConfigError(
            f"the weights are not finite after step {place.step - 1}, so they were not "
            f"saved{left}. Lower optimizer.lr or set optimizer.clip, and start the run again."
        )

    # Reading --------------------------------------------------------------------------------------

    def resume(self, model: Any, optimizer: Any, fall_back: bool) -> Place:
        """Load the newest checkpoint, or with `fall_back` the newest that is not damaged; without
        any, the place before the first step."""
        paths = complete(self.folder)[::-1]
        faults: list[DamagedError] = []
        for at, path in enumerate(paths):
            try:
                with self.ranks.together(path, DamagedError):  # ranks share the files
                    verify(path, self.ranks.world.rank, self.ranks.world.size)
            except DamagedError as error:
                faults.append(error)
                if fall_back:
                    continue
                way = "Remove it to begin anew."
                if older := paths[at + 1 :]:
                    way = f"Set trainer.fall_back=true to continue from {older[0].name} or older."
                raise DamagedError(f"{error}. {way}") from None
            place = self._load(path, model, optimizer)
            if faults:
                self._set_aside(paths[:at], faults, path)
            return place
        if faults:
            raise DamagedError(
                f"no checkpoint in {self.folder} can be read: "
                f"{'; '.join(str(fault) for fault in faults)}. Remove them to begin anew."
            )
        return Place(0, None)

    def _load(self, path: Path, model: Any, optimizer: Any) -> Place:
        """Load a checkpoint into model and optimizer, and this rank's random states."""
        state = self._state(model, optimizer)
        _refuse_other_model(path, state["model"], stored(path, "model."))
        names = stored(path, "random.")
        random = {name: each for name, each in state.pop("random").items() if name in names}
        if random:  # the checkpoint may be of fewer ranks, or of another device
            state["random"] = random
        with loading(path, "Set trainer.out to another folder."):
            dcp.load(state, checkpoint_id=path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=_options(),
        )
        for name, each in random.items():
            _generators(self.ranks)[name].set_rng_state(each)
        return read_place(path)

    def _set_aside(self, paths: list[Path], faults: list[DamagedError], newest: Path) -> None:
        """Rename damaged checkpoints, so that they do not count as the newest ones."""
        self.ranks.gather(None)  # until no rank reads them
        if not self.ranks.first:
            return
        for path in paths:
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        said = "; ".join(str(fault) for fault in faults)
        warnings.warn(f"{said}: continuing from {newest.name}", stacklevel=2)

    def _state(self, model: Any, optimizer: Any) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer, options=_options())
        generators = _generators(self.ranks).items()
        random = {name: module.get_rng_state() for name, module in generators}
        return {"model": weights, "optimizer": moments, "random": random}


def _generators(ranks: Ranks) -> dict[str, Any]:
    """The modules of this rank's random generators: of the CPU, and of its device if that is
    another."""
    modules = {ranks.device.type: torch.get_device_module(ranks.device), "cpu": torch}
    return {f"rank-{ranks.world.rank}-{kind}": module for kind, module in modules.items()}


def complete(folder: Path) -> list[Path]:
    """The checkpoints in a folder that were finished, oldest first."""
    inside = folder.iterdir() if folder.is_dir() else ()
    finished = [path for path in inside if _NAME.fullmatch(path.name)]
    return sorted(finished, key=lambda path: int(path.name.partition("-")[2]))


def read_place(path: Path) -> Place:
    """The place of a checkpoint."""
    return _place_of(Manifest.load(path / _STATE), path)


def verify(path: Path, rank: int = 0, size: int = 1) -> None:
    """Compare the checksums of a checkpoint: those of every `size`-th file, from `rank` on."""
    try:
        manifest = Manifest.load(path / _STATE)
        _place_of(manifest, path)
        manifest.check(path, sorted(manifest.files)[rank::size])
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from None


@contextmanager
def loading(path: Path, remedy: str) -> Iterator[None]:
    """Turn what torch raises on a checkpoint that it cannot read into one sentence."""
    if not path.exists():  # torch would also log two tracebacks
        raise FileError(f"{path} was removed. {remedy}")
    try:
        yield
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise FileError(f"{path} cannot be loaded ({_reason(error)}). {remedy}") from None


def _place_of(manifest: Manifest, path: Path) -> Place:
    try:
        place = Place(**manifest.values)
    except TypeError:
        raise damaged(path, f"{_STATE} is not what was written") from None
    best = None if place.best is None else (int(place.best[0]), float(place.best[1]))
    return place._replace(best=best)


def stored(path: Path, prefix: str) -> dict[str, tuple[int, ...] | None]:
    """The names in a checkpoint that begin so, without it; the shapes of those that are tensors."""
    names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items()
    within = [(name.removeprefix(prefix), each) for name, each in names if name.startswith(prefix)]
    return {name: tuple(each.size) if hasattr(each, "size") else None for name, each in within}


def _refuse_other_model(path: Path, weights: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose weights have other names or shapes than the model's."""
    shapes = {name: tuple(each.shape) for name, each in weights.items() if hasattr(each, "shape")}
    faults = [
        f"{name} has shape {known[name]}, but {shape} in the model"
        for name, shape in shapes.items()
        if known.get(name, shape) != shape
    ]
    faults += [f"it lacks {name}" for name in shapes if name not in known]
    more = [name for name, shape in known.items() if shape is not None and name not in shapes]
    faults += [f"it has {name}" for name in more]
    if faults:
        raise ConfigError(
            f"{path} is of another model: {listed(faults, most=2)}. Use the model of the run, or "
            f"set trainer.out to another folder."
        )


def _all_finite(tensors: Iterable[Any], device: torch.device) -> bool:
    """Whether all numbers of these tensors on this rank are finite; waits for the device once."""
    shards = map(local_tensor, tensors)
    floats = [each for each in shards if isinstance(each, Tensor) and each.is_floating_point()]
    flags = [each.isfinite().all().to(device, non_blocking=True) for each in floats]
    return not flags or bool(torch.stack(flags).all())


def _reason(error: BaseException) -> str:
    """What the system said, in one line: torch reports a full disk as a later error."""
    if isinstance(error, CheckpointException) and error.failures:
        return _reason(next(iter(error.failures.values()))[0])
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, OSError):
        return cause.strerror or str(cause)
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    return "a file is shorter than what was written" if "unexpected pos" in text else text


def _options() -> StateDictOptions:
    # Frozen weights come from the model's folder, not from a checkpoint.
    return StateDictOptions(ignore_frozen_params=True, strict=False)
